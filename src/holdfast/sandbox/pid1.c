/* pid 1 of a session: reaps every orphan and tells the host who died and how. Nothing else.
 *
 *   argv[1]   number of a SOCK_SEQPACKET descriptor whose other end the host holds
 *   sends     { int32 pid, int32 wait status }; pid 0 once, when it is up
 *
 * It exists as C because a forked Python costs 2 MiB a session. `pid1.py` does the same where no compiler was
 * at hand. It ends when the host's end is closed or when nobody is left; the kernel then ends whatever remains.
 */
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct report { int32_t pid, status; };
static const struct timespec PAUSE = {0, 5000000};

/* A packet costs memory of the session's. At its cap Linux refuses that: we try again until the host has made room,
 * for the whole session would end with us, and nobody would know of what. */
static void tell(int host, int32_t pid, int32_t status) {
    struct report report = {pid, status};
    while (send(host, &report, sizeof report, MSG_NOSIGNAL) < 0) {
        if (errno != ENOBUFS && errno != ENOMEM && errno != EINTR) _exit(0);
        nanosleep(&PAUSE, 0);
    }
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    int host = atoi(argv[1]);
    /* exec made us dumpable again; /proc/1/mem must not open even where the guest has our uid. */
    if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0) return 3;
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, 0);
    tell(host, 0, 0);
    for (;;) {
        int status = 0;
        pid_t pid = waitpid(-1, &status, __WALL);
        if (pid > 0) tell(host, pid, status);
        else if (errno == ECHILD) return 0;
    }
}

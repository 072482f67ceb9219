/* Preloaded into a test's child: writes down each sync and rename, and lets syncs fail while $SYNCS_FAIL exists. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void note(const char *what, const char *of) {
    const char *path = getenv("SYNCS_LOG");
    int log = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (log >= 0) {
        dprintf(log, "%s %s\n", what, of);
        close(log);
    }
}

static int sync_by(const char *what, int fd) {
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    note(what, path);
    const char *fail = getenv("SYNCS_FAIL");
    if (fail && access(fail, F_OK) == 0) {
        errno = EIO;
        return -1;
    }
    int (*real)(int) = dlsym(RTLD_NEXT, what);
    return real(fd);
}

int fsync(int fd) { return sync_by("fsync", fd); }
int fdatasync(int fd) { return sync_by("fdatasync", fd); }
int syncfs(int fd) { return sync_by("syncfs", fd); }

int renameat(int from_dir, const char *from, int to_dir, const char *to) {
    note("rename", to);
    int (*real)(int, const char *, int, const char *) = dlsym(RTLD_NEXT, "renameat");
    return real(from_dir, from, to_dir, to);
}

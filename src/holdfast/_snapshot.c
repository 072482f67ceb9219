/* holdfast._snapshot: a fork that keeps every thread.
 *
 * fork() copies the memory of a process but only the thread that calls it. Whoever wakes such a copy finds thread
 * pools that never answer and locks whose holders do not exist. `take` makes a copy that can be woken whole:
 *
 *   1. Every other thread is *parked*: a signal interrupts it, and its handler writes down what Linux knows about the
 *      thread and memory does not (TLS base, tid address, robust list, name), then waits. The interrupted registers lie
 *      in the signal frame on the thread's own stack.
 *   2. The calling thread forks. Memory, with all stacks and signal frames, is copied.
 *   3. In the original the parked threads are let go; for them nothing happened.
 *   4. The copy, alone in its process, waits for a message on a socket: frozen. When it comes, it makes a new thread
 *      for each parked one, with the same TLS and tid address, that does nothing but return from the very signal frame
 *      its forerunner was parked in (rt_sigreturn). Each thread goes on at the instruction where it was interrupted.
 *
 * The copy is made with CLONE_PARENT, as a sibling: it is a child of pid 1, and user code's os.wait() never sees it.
 * It is not dumpable while it is frozen, so its memory cannot be opened through /proc.
 *
 * What cannot be kept: thread ids (they are new, so a recursive pthread mutex held across a snapshot has a stranger for
 * an owner), interval timers, pending signals, alternate signal stacks of the calling thread.
 *
 * Limits are errors: too many threads, a thread that cannot be parked in time, a kernel call refused. Then nothing was
 * forked, and every thread goes on.
 *
 * Signal 33 is the one that libraries cannot block: glibc keeps it for itself (SIGSETXID), and its sigprocmask lets it
 * through. Our handler passes on what is not ours.
 */
#include "_snapshot.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if __has_include(<sys/rseq.h>)
#include <sys/rseq.h>
#define HAVE_RSEQ 1
#else
#define HAVE_RSEQ 0
#endif

#define MAX_THREADS 1024
#define PARK_SIGNAL 33
#define PARK_TIMEOUT_MS 1000
#define RESUME_STACK 4096

/* -- Linux, without libc: a parked thread must not touch errno, which is part of what it resumes with ------------- */

#if defined(__x86_64__)
static inline long sys6(long number, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
static inline unsigned long tls_base(void) {
    unsigned long base;
    __asm__("mov %%fs:0, %0" : "=r"(base)); /* the ABI keeps the base's own address there */
    return base;
}
#define RSEQ_SIGNATURE 0x53053053
#define SA_RESTORER_FLAG 0x04000000
extern void holdfast_restore(void);
__asm__(".text\n"
        ".hidden holdfast_restore\n"
        ".globl holdfast_restore\n"
        ".type holdfast_restore,@function\n"
        "holdfast_restore:\n"
        "  mov $15, %eax\n" /* rt_sigreturn */
        "  syscall\n");
#elif defined(__aarch64__)
static inline long sys6(long number, long a, long b, long c, long d, long e, long f) {
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
}
static inline unsigned long tls_base(void) {
    unsigned long base;
    __asm__("mrs %0, tpidr_el0" : "=r"(base));
    return base;
}
#define RSEQ_SIGNATURE 0xd428bc00
#define SA_RESTORER_FLAG 0
static void (*const holdfast_restore)(void) = 0; /* the vDSO has one */
#else
#error "holdfast._snapshot knows x86-64 and aarch64"
#endif

#define SYS0(n) sys6(n, 0, 0, 0, 0, 0, 0)
#define SYS2(n, a, b) sys6(n, (long)(a), (long)(b), 0, 0, 0, 0)
#define SYS3(n, a, b, c) sys6(n, (long)(a), (long)(b), (long)(c), 0, 0, 0)
#define SYS4(n, a, b, c, d) sys6(n, (long)(a), (long)(b), (long)(c), (long)(d), 0, 0)

static void wait_while(volatile int *word, int value, long timeout_ms) {
    struct timespec limit = {timeout_ms / 1000, timeout_ms % 1000 * 1000000};
    sys6(SYS_futex, (long)word, FUTEX_WAIT_PRIVATE, value, timeout_ms < 0 ? 0 : (long)&limit, 0, 0);
}

static void wake_all(volatile int *word) { SYS3(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 30); }

static long now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000L + now.tv_nsec / 1000;
}

/* -- parking -------------------------------------------------------------------------------------------------------- */

struct parked {
    void *frame;       /* where rt_sigreturn finds the interrupted registers */
    unsigned long tls; /* thread pointer */
    int *tid_address;  /* cleared and woken when the thread ends: how pthread_join knows */
    void *robust_list;
    size_t robust_length;
    char name[16];
    int tid;
};

static struct parked threads[MAX_THREADS];
static volatile int parked_count;  /* threads that have taken a slot and filled it */
static volatile int slots_taken;
static volatile int round_number;  /* parked threads wait for it to change */
static volatile int parking;       /* a snapshot is being taken, by `parker` */
static volatile int resumed_count; /* in a woken copy: threads that have left their resume stack */
static char *resume_stacks;

struct kernel_sigaction {
    void (*handler)(int, siginfo_t *, void *);
    unsigned long flags;
    void (*restorer)(void);
    uint64_t mask;
};
static struct kernel_sigaction previous;

static void on_park_signal(int number, siginfo_t *info, void *context) {
    if (!parking || info->si_code != SI_TKILL || info->si_pid != (pid_t)SYS0(SYS_getpid)) {
        if (previous.handler != (void *)SIG_DFL && previous.handler != (void *)SIG_IGN)
            previous.handler(number, info, context); /* glibc's own use of the signal */
        return;
    }
    int round = round_number;
    int slot = __atomic_fetch_add(&slots_taken, 1, __ATOMIC_SEQ_CST);
    if (slot >= MAX_THREADS) return; /* `park_all` sees too many and gives up */
    struct parked *me = &threads[slot];
#if defined(__x86_64__)
    me->frame = context; /* rt_sigreturn looks one word below its stack pointer, past the return address */
#else
    me->frame = info; /* the frame begins with the siginfo */
#endif
    me->tls = tls_base();
    me->tid = (int)SYS0(SYS_gettid);
    me->tid_address = 0;
    SYS2(SYS_prctl, PR_GET_TID_ADDRESS, &me->tid_address);
    SYS3(SYS_get_robust_list, 0, &me->robust_list, &me->robust_length);
    SYS2(SYS_prctl, PR_GET_NAME, me->name);
    __atomic_fetch_add(&parked_count, 1, __ATOMIC_SEQ_CST);
    wake_all(&parked_count);
    while (__atomic_load_n(&round_number, __ATOMIC_SEQ_CST) == round) wait_while(&round_number, round, -1);
}

/* Again before each snapshot: user code may have put a handler of its own there by a raw system call. */
static long install_handler(void) {
    struct kernel_sigaction current, ours = {on_park_signal, SA_SIGINFO | SA_RESTART | SA_RESTORER_FLAG, holdfast_restore, ~0ULL};
    long failed = SYS4(SYS_rt_sigaction, PARK_SIGNAL, 0, &current, 8);
    if (failed || current.handler == on_park_signal) return failed;
    previous = current;
    return SYS4(SYS_rt_sigaction, PARK_SIGNAL, &ours, 0, 8);
}

static void release_all(void) {
    __atomic_store_n(&parking, 0, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&round_number, 1, __ATOMIC_SEQ_CST);
    wake_all(&round_number);
}

struct directory_entry {
    uint64_t inode;
    int64_t offset;
    unsigned short length;
    unsigned char type;
    char name[];
};

/* The threads of this process but the calling one. Negative: an errno. */
static int list_threads(int *tids, int room, int me) {
    static char buffer[1 << 16];
    int directory = open("/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0) return -errno;
    int count = 0;
    long size;
    while ((size = syscall(SYS_getdents64, directory, buffer, sizeof buffer)) > 0) {
        for (long at = 0; at < size;) {
            struct directory_entry *entry = (void *)(buffer + at);
            int tid = entry->name[0] == '.' ? 0 : atoi(entry->name);
            at += entry->length;
            if (tid == 0 || tid == me) continue;
            if (count == room) {
                close(directory);
                return -EAGAIN;
            }
            tids[count++] = tid;
        }
    }
    int failed = size < 0 ? -errno : 0;
    close(directory);
    return failed ? failed : count;
}

static int is_parked(int tid) {
    int count = __atomic_load_n(&slots_taken, __ATOMIC_SEQ_CST);
    for (int i = 0; i < count && i < MAX_THREADS; i++)
        if (threads[i].tid == tid) return 1;
    return 0;
}

/* Park every other thread. Threads may start and end meanwhile: it is over when a fresh listing has only parked ones,
 * for a parked thread starts no other. Returns how many, or a negative errno with all of them released. */
static int park_all(void) {
    static int tids[MAX_THREADS], signalled[MAX_THREADS];
    int me = (int)SYS0(SYS_gettid), process = (int)SYS0(SYS_getpid), signals = 0;
    long deadline = now_us() + PARK_TIMEOUT_MS * 1000L;
    memset(threads, 0, sizeof *threads * (size_t)(slots_taken < MAX_THREADS ? slots_taken : MAX_THREADS));
    slots_taken = parked_count = 0;
    __atomic_store_n(&parking, 1, __ATOMIC_SEQ_CST);
    for (;;) {
        int seen = parked_count, count = list_threads(tids, MAX_THREADS, me), waiting = 0;
        for (int i = 0; i < count; i++) {
            if (is_parked(tids[i])) continue;
            waiting++;
            int known = 0;
            for (int j = 0; j < signals; j++) known |= signalled[j] == tids[i];
            if (known) continue;
            if (signals == MAX_THREADS) { count = -EAGAIN; break; }
            signalled[signals++] = tids[i];
            SYS3(SYS_tgkill, process, tids[i], PARK_SIGNAL); /* ESRCH: it ended; the next listing lacks it */
        }
        if (count < 0) { release_all(); return count; }
        /* Slots are filled before they are counted: all listed are parked, and each of them completely. */
        if (!waiting && parked_count == slots_taken) return parked_count;
        if (now_us() > deadline) { release_all(); return -ETIMEDOUT; }
        wait_while(&parked_count, seen, 2);
    }
}

int stop_threads(uint64_t *mask) {
    uint64_t all = ~0ULL;
    SYS4(SYS_rt_sigprocmask, SIG_SETMASK, &all, mask, 8);
    long failed = install_handler();
    int count = failed ? (int)failed : park_all();
    if (count < 0) SYS4(SYS_rt_sigprocmask, SIG_SETMASK, mask, 0, 8);
    return count;
}

void let_threads_go(uint64_t mask) {
    release_all();
    SYS4(SYS_rt_sigprocmask, SIG_SETMASK, &mask, 0, 8);
}

/* -- resuming, in the woken copy ------------------------------------------------------------------------------------- */

static __attribute__((noinline, noreturn, used)) void resume(struct parked *me) {
    if (me->robust_list) SYS2(SYS_set_robust_list, me->robust_list, me->robust_length);
#if HAVE_RSEQ
    if (__rseq_size) SYS4(SYS_rseq, me->tls + __rseq_offset, 32, 0, RSEQ_SIGNATURE);
#endif
    SYS2(SYS_prctl, PR_SET_NAME, me->name);
    /* The last use of this stack is before the count: whoever waits for it may then use the stack again. */
#if defined(__x86_64__)
    __asm__ volatile("mov %0, %%rsp\n\t"
                     "lock incl %1\n\t"
                     "mov $15, %%eax\n\t" /* rt_sigreturn */
                     "syscall\n\t"
                     "hlt"
                     :
                     : "r"(me->frame), "m"(resumed_count)
                     : "memory");
#else
    __asm__ volatile("mov sp, %0\n\t"
                     "1: ldaxr w9, [%1]\n\t"
                     "add w9, w9, #1\n\t"
                     "stlxr w10, w9, [%1]\n\t"
                     "cbnz w10, 1b\n\t"
                     "mov x8, #139\n\t" /* rt_sigreturn */
                     "svc #0\n\t"
                     "brk #0"
                     :
                     : "r"(me->frame), "r"(&resumed_count)
                     : "x8", "w9", "w10", "memory");
#endif
    __builtin_unreachable();
}

#define THREAD_FLAGS                                                                                          \
    (CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_SETTLS |        \
     CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID)

/* A thread that begins in `resume`, on a stack that it leaves at once. */
static long start_thread(struct parked *thread, char *stack_top) {
    long result;
#if defined(__x86_64__)
    register long r10 __asm__("r10") = (long)thread->tid_address;
    register long r8 __asm__("r8") = (long)thread->tls;
    register struct parked *r12 __asm__("r12") = thread; /* registers are copied: the new thread finds it there */
    __asm__ volatile("syscall\n\t"
                     "test %%rax, %%rax\n\t"
                     "jnz 1f\n\t"
                     "xor %%ebp, %%ebp\n\t"
                     "mov %%r12, %%rdi\n\t"
                     "call resume\n"
                     "1:"
                     : "=a"(result)
                     : "a"(SYS_clone), "D"(THREAD_FLAGS), "S"(stack_top), "d"(0), "r"(r10), "r"(r8), "r"(r12)
                     : "rcx", "r11", "memory");
#else
    register long x8 __asm__("x8") = SYS_clone;
    register long x0 __asm__("x0") = THREAD_FLAGS;
    register long x1 __asm__("x1") = (long)stack_top;
    register long x2 __asm__("x2") = 0;
    register long x3 __asm__("x3") = (long)thread->tls;
    register long x4 __asm__("x4") = (long)thread->tid_address;
    register struct parked *x19 __asm__("x19") = thread;
    __asm__ volatile("svc #0\n\t"
                     "cbnz x0, 1f\n\t"
                     "mov x29, #0\n\t"
                     "mov x0, x19\n\t"
                     "bl resume\n"
                     "1:"
                     : "+r"(x0)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x19)
                     : "x30", "memory");
    result = x0;
#endif
    return result;
}

/* Returns 0, or the errno of the first thread that could not be made. */
static int resume_all(int count) {
    resumed_count = 0;
    for (int i = 0; i < count; i++) {
        long tid = start_thread(&threads[i], resume_stacks + (size_t)(i + 1) * RESUME_STACK);
        if (tid < 0) return (int)-tid;
    }
    while (__atomic_load_n(&resumed_count, __ATOMIC_SEQ_CST) < count) SYS0(SYS_sched_yield);
    return 0;
}

/* -- the snapshot ------------------------------------------------------------------------------------------------------ */

/* As glibc's _Fork, but a sibling: no atfork handlers, tid address and robust list kept. */
static long fork_sibling(void) {
    int *tid_address = 0;
    void *robust_list = 0;
    size_t length = 0;
    SYS2(SYS_prctl, PR_GET_TID_ADDRESS, &tid_address);
    SYS3(SYS_get_robust_list, 0, &robust_list, &length);
    long flags = CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | SIGCHLD;
#if defined(__x86_64__)
    long pid = sys6(SYS_clone, flags, 0, 0, (long)tid_address, 0, 0);
#else
    long pid = sys6(SYS_clone, flags, 0, 0, 0, (long)tid_address, 0);
#endif
    if (pid == 0 && robust_list) SYS2(SYS_set_robust_list, robust_list, length);
    return pid;
}

/* Under memory pressure the kernel is to die, and not the copy that could replace it. */
static void set_oom_score(const char *value, size_t length) {
    int score = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (score < 0) return;
    if (write(score, value, length) < 0) { /* it stays as likely a victim as the kernel: no harm but the obvious one */ }
    close(score);
}

/* One message of the host's, and the descriptor that may come with it; -1 if none does. */
static long receive(int socket, char *message, size_t room, int *descriptor) {
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr aligned;
    } ancillary;
    struct iovec piece = {message, room};
    struct msghdr header = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = &ancillary};
    long size;
    do {
        header.msg_controllen = sizeof ancillary;
        size = SYS3(SYS_recvmsg, socket, &header, MSG_CMSG_CLOEXEC);
    } while (size == -EINTR);
    *descriptor = -1;
    struct cmsghdr *first = size > 0 ? CMSG_FIRSTHDR(&header) : 0;
    if (first && first->cmsg_level == SOL_SOCKET && first->cmsg_type == SCM_RIGHTS)
        memcpy(descriptor, CMSG_DATA(first), sizeof *descriptor);
    return size;
}

static int say_asleep(int socket) { return sys6(SYS_sendto, socket, (long)"asleep", 6, MSG_NOSIGNAL, 0, 0) == 6; }

/* All signals are blocked. What user code sent to a sleeper would be the first thing to reach the kernel that it is now. */
static void forget_signals(void) {
    uint64_t all = ~0ULL;
    struct timespec at_once = {0, 0};
    for (int left = 1 << 16; left > 0 && SYS4(SYS_rt_sigtimedwait, &all, 0, &at_once, 8) > 0; left--) {}
}

/* The whole life of a frozen copy: say that it is there, wait to be woken, or end. The host reads who it is from the
 * credentials that Linux attaches to the message.
 *
 * All copies are born on one socket, and only one may sleep there. Who is to sleep on while another is born gets a
 * socket of its own from the host, a bed, which nobody else has; there it says again that it sleeps. */
static void sleep_until_woken(int wake_fd) {
    char message[64] = {0};
    int bed;
    set_oom_score("0", 1);
    if (SYS3(SYS_prctl, PR_SET_DUMPABLE, 0, 0) != 0) SYS2(SYS_exit_group, 1, 0);
    if (!say_asleep(wake_fd)) SYS2(SYS_exit_group, 1, 0);
    long size = receive(wake_fd, message, sizeof message, &bed);
    while (bed >= 0) {
        int given = bed, ours = say_asleep(given);
        /* One that the host has closed was meant for somebody who died before he had it. */
        size = receive(ours ? given : wake_fd, message, sizeof message, &bed);
        SYS2(SYS_close, given, 0);
        if (ours) break;
    }
    /* The host is gone, or the descriptor is; or there was no room for the bed. */
    if (size != 4 || memcmp(message, "wake", 4) != 0) SYS2(SYS_exit_group, 0, 0);
    forget_signals();
    SYS3(SYS_prctl, PR_SET_DUMPABLE, 1, 0);
    set_oom_score("500", 3); /* it is the kernel now; after DUMPABLE, which decides who may write there */
}

/* -- pages that every cell writes to ------------------------------------------------------------------------------
 *
 * After a fork each page is shared with the copy, and the first write to it is a fault that makes one of our own. Which
 * pages a cell writes to is much the same each time: the interpreter's counts and caches. So they are learned, and
 * made ours after each fork, all at once and in the caller's thinking time.
 *
 *   1. After one fork in LEARN_EVERY nothing is made ours. What is ours alone at the next one was written in between.
 *   2. Long runs are left out: they are data that one cell filled and the next may not touch.
 *   3. What is mapped there may have changed since: only what is still memory of a process is touched. */

#define LEARN_EVERY 16
#define HOT_PAGES 2048
#define HOT_RUNS HOT_PAGES /* no fewer: the last in memory, the stack among them, would be forgotten */
#define LONGEST_RUN 128
#define MOST_LOOKED_AT (1L << 18) /* pages; and of one mapping half of them: larger ones are data, or reserved */
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; before it nothing happens, and the cells pay */
#endif

static struct run {
    uintptr_t page; /* its number */
    size_t pages;
} hot[HOT_RUNS];
static int hot_runs;
static size_t hot_pages;

int read_pagemap(int pagemap, uint64_t *entries, uintptr_t page, size_t pages) {
    return pread(pagemap, entries, pages * 8, (off_t)(page * 8)) == (ssize_t)(pages * 8);
}

static void keep(struct run run) {
    if (run.pages == 0 || run.pages > LONGEST_RUN || hot_pages + run.pages > HOT_PAGES || hot_runs == HOT_RUNS) return;
    hot[hot_runs++] = run;
    hot_pages += run.pages;
}

static void look_at(int pagemap, uintptr_t page, uintptr_t end) {
    uint64_t entries[PAGEMAP_CHUNK];
    struct run run = {page, 0};
    while (page < end) {
        size_t count = end - page < PAGEMAP_CHUNK ? end - page : PAGEMAP_CHUNK;
        if (!read_pagemap(pagemap, entries, page, count)) return;
        for (size_t i = 0; i < count; i++, page++) {
            if ((entries[i] & (PRESENT | OF_A_FILE | OURS_ALONE)) == (PRESENT | OURS_ALONE)) {
                run.pages++;
            } else {
                keep(run);
                run = (struct run){page + 1, 0};
            }
        }
    }
    keep(run);
}

static void learn_hot_pages(void) {
    unsigned long start, end, page_size = (unsigned long)sysconf(_SC_PAGESIZE);
    long left = MOST_LOOKED_AT;
    char line[512], may[5];
    int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    FILE *maps = pagemap < 0 ? 0 : fopen("/proc/self/maps", "re");
    hot_runs = 0, hot_pages = 0;
    while (maps && fgets(line, sizeof line, maps)) {
        if (!strchr(line, '\n')) /* a long file name: the rest is no line of its own */
            for (int c = 0; c != '\n' && c != EOF;) c = fgetc(maps);
        if (sscanf(line, "%lx-%lx %4s", &start, &end, may) != 3 || strcmp(may, "rw-p") != 0) continue;
        long pages = (long)((end - start) / page_size);
        if (pages > left || pages > MOST_LOOKED_AT / 2) continue;
        left -= pages;
        look_at(pagemap, start / page_size, end / page_size);
    }
    if (maps) fclose(maps);
    if (pagemap >= 0) close(pagemap);
}

int is_hot(uintptr_t page) {
    int low = 0, high = hot_runs; /* they are in order */
    while (low < high) {
        int middle = (low + high) / 2;
        if (hot[middle].page + hot[middle].pages <= page) low = middle + 1;
        else high = middle;
    }
    return low < hot_runs && hot[low].page <= page;
}

static size_t make_hot_pages_ours(void) {
    uint64_t entries[LONGEST_RUN];
    size_t done = 0, page_size = (size_t)sysconf(_SC_PAGESIZE);
    int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    for (int i = 0; pagemap >= 0 && i < hot_runs; i++) {
        int memory = read_pagemap(pagemap, entries, hot[i].page, hot[i].pages);
        for (size_t j = 0; memory && j < hot[i].pages; j++) memory = (entries[j] & (PRESENT | OF_A_FILE)) == PRESENT;
        void *start = (void *)(hot[i].page * page_size);
        if (memory && madvise(start, hot[i].pages * page_size, MADV_POPULATE_WRITE) == 0) done += hot[i].pages;
    }
    if (pagemap >= 0) close(pagemap);
    return done;
}

PyObject *refuse(int error, const char *what) {
    PyObject *arguments = Py_BuildValue("(is)", error, what);
    if (arguments) PyErr_SetObject(PyExc_OSError, arguments);
    Py_XDECREF(arguments);
    return 0;
}

PyDoc_STRVAR(take_doc,
"take(wake_fd, /)\n--\n\n"
"Fork a frozen copy of this process, threads included; it wakes when a message arrives on the socket `wake_fd`.\n\n"
"Returns (pid, threads, microseconds, pages) in the original, where pid is the copy's, and pages are those that need not\n"
"be copied when they are next written to; and (0, threads, 0, 0) in the copy, once it is awake. Raises OSError, with\n"
"nothing forked, if a thread cannot be parked.");

static PyObject *take(PyObject *module, PyObject *argument) {
    (void)module;
    int wake_fd = (int)PyLong_AsLong(argument);
    if (wake_fd == -1 && PyErr_Occurred()) return 0;
    if (!resume_stacks) {
        void *region = mmap(0, (size_t)MAX_THREADS * RESUME_STACK, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (region == MAP_FAILED) return refuse(errno, "memory for the threads' stacks");
        resume_stacks = region;
    }
    static unsigned turn;
    unsigned phase = turn++ % LEARN_EVERY;
    if (phase == 1) learn_hot_pages();
    uint64_t mask;
    long started = now_us();
    int count = stop_threads(&mask);
    if (count < 0) {
        if (count == -ETIMEDOUT) return refuse(ETIMEDOUT, "a thread could not be parked");
        if (count == -EAGAIN) return refuse(EAGAIN, "more threads than a snapshot can keep");
        return refuse(-count, "parking the threads");
    }
    if (phase <= 1) give_back_pages(); /* it takes as long as the fork; the others need not wait for it */
    long pid = fork_sibling();
    if (pid == 0) {
        sleep_until_woken(wake_fd);
        parking = 0;
        round_number++;
        /* A copy that cannot be whole is none: better a fresh kernel and a true report. */
        if (resume_all(count) != 0) SYS2(SYS_exit_group, 1, 0);
        SYS4(SYS_rt_sigprocmask, SIG_SETMASK, &mask, 0, 8);
    } else {
        let_threads_go(mask);
    }
    if (pid < 0) return refuse((int)-pid, "fork");
    long taken = now_us() - started;
    size_t pages = pid > 0 && phase != 0 ? make_hot_pages_ours() : 0;
    return Py_BuildValue("(liln)", pid, count, pid ? taken : 0L, (Py_ssize_t)pages);
}

static PyMethodDef methods[] = {{"take", take, METH_O, take_doc}, {0}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "holdfast._snapshot", "A fork that keeps every thread.", -1, methods, 0, 0, 0, 0};

PyMODINIT_FUNC PyInit__snapshot(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddFunctions(module, image_methods) < 0) Py_CLEAR(module);
    if (module && PyModule_AddIntConstant(module, "MAX_THREADS", MAX_THREADS) < 0) Py_CLEAR(module);
    return module;
}

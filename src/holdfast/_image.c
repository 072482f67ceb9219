/* The part of holdfast._snapshot that lets all kernels of a zygote share what it had in memory, for good.
 *
 * A fork shares every page until somebody writes to it. Python writes everywhere: counts of references and caches of
 * instructions lie in the objects themselves, and many of these writes are taken back a moment later. The page is a
 * copy of the kernel's own from then on, although it says what it said before.
 *
 *   1. In the zygote, once, `make_image`: what kernels will write to in passing is copied into a sealed file in
 *      memory, the *image*, and mapped back over itself, privately. Nothing looks different. But now there is something
 *      to go back to.
 *   2. In a kernel, `give_back_pages`: a page that is a copy of its own and says what the image says is dropped. Linux
 *      maps the image's page there again at the next touch. Pages that cells are known to write to are kept: each would
 *      cost the next cell a fault.
 *
 * What is in it, and why nothing else. In a private mapping of a file MADV_DONTNEED brings back the file's contents and
 * not zeros, and mremap can grow past the file's end. So memory of allocators that do either is left alone (jemalloc,
 * mimalloc, blocks that malloc got by mmap, arenas of threads), and stacks and thread-local memory, which Linux itself
 * writes to, as well. Left are:
 *
 *   the heap (brk)        malloc shrinks and grows it by brk, which unmaps, and maps zeros. malloc_trim does use
 *                         MADV_DONTNEED, inside of free blocks, which calloc clears before it hands them out.
 *   Python's arenas       where small objects are. Only ever unmapped as a whole.
 *   Python's own .data    and .bss: its static types, None.
 *
 * Together they are nearly all that is ever written to.
 */
#define _GNU_SOURCE
#include "_snapshot.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U /* Linux 6.3; where a machine insists on it, nothing else is allowed */
#endif
#define SEALS (F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define MAX_RANGES 4096
#define LARGEST_LOOKED_AT (256UL << 20) /* a mapping; larger ones are reserved by some allocator of its own */

static struct {
    char *reference; /* the whole of it, to compare with; 0: there is none */
    uint64_t *sums;  /* of each page: most that were written to are known by it, without a look at the reference */
    size_t bytes;
    dev_t device;
    ino_t inode;
} image;

static uintptr_t page_size(void) { return (uintptr_t)sysconf(_SC_PAGESIZE); }

/* -- /proc/self/maps, without malloc: whoever holds its lock may be parked ----------------------------------------- */

struct mapping {
    uintptr_t start, end;
    char may[5];
    uintptr_t offset;
    unsigned major, minor;
    unsigned long inode;
    char name[16]; /* as much of it as we ask for */
};

struct listing {
    int file;
    size_t at, filled;
    char text[4096];
};

static int next_char(struct listing *maps) {
    if (maps->at == maps->filled) {
        ssize_t size = read(maps->file, maps->text, sizeof maps->text);
        if (size <= 0) return EOF;
        maps->filled = (size_t)size, maps->at = 0;
    }
    return (unsigned char)maps->text[maps->at++];
}

static int next_mapping(struct listing *maps, struct mapping *found) {
    char line[160]; /* names are longer, and cut */
    size_t length = 0;
    int c;
    while ((c = next_char(maps)) != EOF && c != '\n')
        if (length < sizeof line - 1) line[length++] = (char)c;
    if (c == EOF) return 0;
    line[length] = 0;
    found->name[0] = 0;
    return sscanf(line, "%lx-%lx %4s %lx %x:%x %lu %15s", &found->start, &found->end, found->may, &found->offset,
                  &found->major, &found->minor, &found->inode, found->name) >= 7;
}

/* -- what belongs into the image ----------------------------------------------------------------------------------- */

struct range {
    uintptr_t start, end;
};

struct ranges {
    size_t count;
    struct range *list; /* by address; they do not overlap */
    int too_many;
};

static void add(struct ranges *ranges, uintptr_t start, uintptr_t end) {
    uintptr_t size = page_size();
    start = (start + size - 1) / size * size, end = end / size * size;
    if (start >= end) return;
    if (ranges->count && ranges->list[ranges->count - 1].end == start) {
        ranges->list[ranges->count - 1].end = end;
    } else if (ranges->count == MAX_RANGES) {
        ranges->too_many = 1;
    } else {
        ranges->list[ranges->count++] = (struct range){start, end};
    }
}

/* Python's small objects lie in pools of 16 KiB, aligned to that, and some of those make an arena. Each pool begins
 * with a header (Objects/obmalloc.c, the same since 3.10), which is known by what must be true of it. Where another
 * Python has another layout, no pool is found, and arenas are not shared. */
#define POOL 16384
#define ARENA (1UL << 20)
#define SMALL_CLASSES 32
#define MAX_ARENAS 4096

struct pool_header {
    unsigned count, unused;
    uintptr_t free_block;
    uintptr_t next, previous;
    unsigned arena, size_class, next_offset, last_offset;
};

static int is_pool(uintptr_t address) {
    const struct pool_header *pool = (const void *)address;
    unsigned size = (pool->size_class + 1) * 16;
    return pool->size_class < SMALL_CLASSES && pool->last_offset == POOL - size && pool->arena < MAX_ARENAS &&
           pool->next_offset >= sizeof *pool && pool->next_offset <= POOL && pool->count <= POOL / size &&
           (pool->free_block == 0 || (pool->free_block > address && pool->free_block < address + POOL));
}

/* From the first to the last pool of each arena: what lies in between is the same arena's. */
static void add_arenas(struct ranges *ranges, int pagemap, struct mapping *area, size_t free_blocks[SMALL_CLASSES]) {
    uintptr_t size = page_size(), first = 0, last = 0;
    unsigned arena = MAX_ARENAS;
    uint64_t entry;
    for (uintptr_t at = (area->start + POOL - 1) / POOL * POOL; at + POOL <= area->end; at += POOL) {
        if (!read_pagemap(pagemap, &entry, at / size, 1) || !(entry & PRESENT) || !is_pool(at)) continue;
        const struct pool_header *pool = (const void *)at;
        unsigned found = pool->arena, room = (POOL - (unsigned)sizeof *pool) / ((pool->size_class + 1) * 16);
        if (pool->count > 0 && pool->count < room) free_blocks[pool->size_class] += room - pool->count;
        if (found != arena || at - first >= ARENA) {
            if (arena != MAX_ARENAS) add(ranges, first, last + POOL);
            arena = found, first = at;
        }
        last = at;
    }
    if (arena != MAX_ARENAS) add(ranges, first, last + POOL);
}

/* What a pool has free is used before a new pool is begun, here and there in pages that are shared. Where it is taken
 * here, for good, new objects of a kernel go side by side into pages of their own. */
static void fill_pools(const size_t free_blocks[SMALL_CLASSES]) {
    for (size_t class = 0; class < SMALL_CLASSES; class++)
        for (size_t left = free_blocks[class]; left > 0; left--)
            if (!PyObject_Malloc((class + 1) * 16)) return;
}

static int find_python(struct dl_phdr_info *object, size_t size, void *found) {
    (void)size;
    struct range *python = found, data = {0, 0};
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        if (part->p_type != PT_LOAD || !(part->p_flags & PF_W)) continue;
        data = (struct range){object->dlpi_addr + part->p_vaddr, object->dlpi_addr + part->p_vaddr + part->p_memsz};
        uintptr_t none = (uintptr_t)Py_None;
        if (none >= data.start && none < data.end) {
            *python = data;
            return 1;
        }
    }
    return 0;
}

static uintptr_t later(uintptr_t a, uintptr_t b) { return a > b ? a : b; }
static uintptr_t earlier(uintptr_t a, uintptr_t b) { return a < b ? a : b; }

/* 0, or an errno. */
static int find_ranges(struct ranges *ranges, size_t free_blocks[SMALL_CLASSES]) {
    struct listing maps = {.file = open("/proc/self/maps", O_RDONLY | O_CLOEXEC)};
    int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC), failed = 0;
    struct range python = {0, 0};
    struct mapping area;
    uintptr_t heap_end = (uintptr_t)sbrk(0);
    dl_iterate_phdr(find_python, &python);
    if (maps.file < 0 || pagemap < 0) failed = errno;
    while (!failed && next_mapping(&maps, &area)) {
        if (strcmp(area.may, "rw-p") != 0) continue;
        if (strcmp(area.name, "[heap]") == 0)
            add(ranges, area.start, earlier(area.end, heap_end)); /* its last page may yet grow: whole ones only */
        else if (area.start < python.end && area.end > python.start)
            add(ranges, later(area.start, python.start), earlier(area.end, python.end));
        else if (area.inode == 0 && area.name[0] == 0 && area.end - area.start <= LARGEST_LOOKED_AT)
            add_arenas(ranges, pagemap, &area, free_blocks);
    }
    if (maps.file >= 0) close(maps.file);
    if (pagemap >= 0) close(pagemap);
    return failed ? failed : ranges->too_many ? E2BIG : 0;
}

static uint64_t sum_of(const void *page, size_t bytes) {
    const uint64_t *words = page;
    uint64_t a = 1, b = 2, c = 3, d = 4;
    const uint64_t odd = 0x9E3779B97F4A7C15;
    for (size_t i = 0; i < bytes / 8; i += 4) {
        a = (a ^ words[i]) * odd, b = (b ^ words[i + 1]) * odd;
        c = (c ^ words[i + 2]) * odd, d = (d ^ words[i + 3]) * odd;
        a ^= a >> 32, b ^= b >> 32, c ^= c >> 32, d ^= d >> 32;
    }
    return ((a * odd ^ b) * odd ^ c) * odd ^ d;
}

/* -- making it ----------------------------------------------------------------------------------------------------- */

static int create_file(const char *name) {
    int file = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    return file >= 0 || errno != EINVAL ? file : memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
}

/* 0, or an errno. Every page is written, also those that are zero: nobody is to pay for a hole in a file. */
static int fill(int file, struct ranges *ranges, uint64_t *sums) {
    size_t size = page_size();
    for (size_t i = 0; i < ranges->count; i++) {
        struct range range = ranges->list[i];
        for (uintptr_t at = range.start; at < range.end; at += size) *sums++ = sum_of((void *)at, size);
        for (uintptr_t at = range.start; at < range.end;) {
            ssize_t done = write(file, (void *)at, range.end - at);
            if (done <= 0) return done < 0 ? errno : EIO;
            at += (uintptr_t)done;
        }
    }
    return fcntl(file, F_ADD_SEALS, SEALS) ? errno : 0;
}

static int map_over(int file, struct ranges *ranges) {
    off_t offset = 0;
    for (size_t i = 0; i < ranges->count; i++) {
        size_t bytes = ranges->list[i].end - ranges->list[i].start;
        void *start = (void *)ranges->list[i].start;
        if (mmap(start, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file, offset) != start) return errno;
        offset += (off_t)bytes;
    }
    return 0;
}

/* In a child, whose memory is a copy: what fails half-way there leaves us whole. */
static int rehearse(int file, struct ranges *ranges) {
    int status = 0;
    pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0); /* no atfork handlers: nothing is to change */
    if (child == 0) _exit(map_over(file, ranges) == 0 ? 0 : 1);
    if (child < 0) return errno;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) return errno;
    return status == 0 ? 0 : ENOMEM;
}

static void die_of(const char *why) {
    if (write(2, why, strlen(why)) < 0) {}
    _exit(1);
}

/* All other threads are parked, all signals blocked: nothing changes but what is on this stack. 0, or an errno. */
static int share(int file, struct ranges *ranges, size_t bytes) {
    size_t sums_bytes = bytes / page_size() * sizeof(uint64_t);
    void *sums = mmap(0, sums_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (sums == MAP_FAILED) return errno;
    int failed = fill(file, ranges, sums);
    void *reference = failed ? MAP_FAILED : mmap(0, bytes, PROT_READ, MAP_PRIVATE, file, 0);
    if (!failed && reference == MAP_FAILED) failed = errno;
    if (!failed) failed = rehearse(file, ranges);
    if (failed) {
        munmap(sums, sums_bytes);
        if (reference != MAP_FAILED) munmap(reference, bytes);
        return failed;
    }
    if (map_over(file, ranges)) die_of("the image could be mapped in a copy of the zygote, but not in itself\n");
    image.reference = reference;
    image.sums = sums;
    image.bytes = bytes;
    return 0;
}

static int make(const char *name, struct ranges *ranges, size_t *bytes) {
    size_t free_blocks[SMALL_CLASSES] = {0};
    struct stat status;
    uint64_t mask;
    int failed = find_ranges(ranges, free_blocks), file;
    if (failed) return failed;
    fill_pools(free_blocks); /* which may have taken a new arena: */
    ranges->count = 0;
    if ((failed = find_ranges(ranges, free_blocks))) return failed;
    for (size_t i = 0; i < ranges->count; i++) *bytes += ranges->list[i].end - ranges->list[i].start;
    if (*bytes == 0) return ENOTSUP;
    if ((file = create_file(name)) < 0) return errno;
    failed = fstat(file, &status) ? -errno : stop_threads(&mask);
    if (failed >= 0) {
        failed = -share(file, ranges, *bytes);
        let_threads_go(mask);
        image.device = status.st_dev, image.inode = status.st_ino;
    }
    close(file);
    return -failed;
}

PyDoc_STRVAR(make_image_doc,
"make_image(name, /)\n--\n\n"
"Let this process and all that it forks share what it has in memory now, also after writing to it: see `give_back`.\n\n"
"Returns (bytes, ranges), the size of what is shared. Raises OSError, with nothing changed.");

static PyObject *make_image(PyObject *module, PyObject *argument) {
    (void)module;
    size_t bytes = 0;
    const char *name = PyUnicode_AsUTF8AndSize(argument, 0);
    if (!name) return 0;
    if (image.reference) return refuse(EEXIST, "there is an image");
    /* Not by malloc: its memory is what is looked at. */
    struct ranges ranges = {0, mmap(0, MAX_RANGES * sizeof(struct range), PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 0};
    if (ranges.list == MAP_FAILED) return refuse(errno, "memory for a list");
    int failed = make(name, &ranges, &bytes);
    munmap(ranges.list, MAX_RANGES * sizeof(struct range));
    if (failed) return refuse(failed, "sharing the zygote's memory");
    return Py_BuildValue("(nn)", (Py_ssize_t)bytes, (Py_ssize_t)ranges.count);
}

/* -- giving back --------------------------------------------------------------------------------------------------- */

/* Of one mapping of the image. Nothing is written to memory here but to this stack: it may be what is looked at. */
static size_t give_back_in(int pagemap, struct mapping *area, uintptr_t size) {
    uint64_t entries[PAGEMAP_CHUNK];
    uintptr_t page = area->start / size, end = area->end / size, run = 0;
    const char *original = image.reference + area->offset;
    const uint64_t *sum = image.sums + area->offset / size;
    size_t given = 0;
    while (page < end) {
        size_t count = end - page < PAGEMAP_CHUNK ? end - page : PAGEMAP_CHUNK;
        if (!read_pagemap(pagemap, entries, page, count)) return given;
        for (size_t i = 0; i < count; i++, page++, original += size, sum++) {
            const void *here = (const void *)(page * size);
            int same = (entries[i] & (PRESENT | OF_A_FILE)) == PRESENT && !is_hot(page) && sum_of(here, size) == *sum &&
                       memcmp(here, original, size) == 0;
            if (same && !run) run = page;
            if (run && (!same || page + 1 == end)) {
                uintptr_t stop = same ? page + 1 : page;
                if (madvise((void *)(run * size), (stop - run) * size, MADV_DONTNEED) == 0) given += stop - run;
                run = 0;
            }
        }
    }
    return given;
}

size_t give_back_pages(void) {
    if (!image.reference) return 0;
    struct listing maps = {.file = open("/proc/self/maps", O_RDONLY | O_CLOEXEC)};
    int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    struct mapping area;
    size_t given = 0;
    /* By what is mapped now, and not by what was: an arena may have been unmapped, and others be in its place. */
    while (maps.file >= 0 && pagemap >= 0 && next_mapping(&maps, &area))
        if (area.inode == image.inode && makedev(area.major, area.minor) == image.device &&
            strcmp(area.may, "rw-p") == 0 && area.offset + (area.end - area.start) <= image.bytes)
            given += give_back_in(pagemap, &area, page_size());
    if (maps.file >= 0) close(maps.file);
    if (pagemap >= 0) close(pagemap);
    madvise(image.reference, image.bytes, MADV_DONTNEED); /* what of it was read is mapped now, and need not be */
    return given;
}

PyDoc_STRVAR(give_back_doc,
"give_back()\n--\n\n"
"Drop the pages that this process has of its own although they say what they said in the zygote. Returns how many.");

static PyObject *give_back(PyObject *module, PyObject *nothing) {
    (void)module, (void)nothing;
    uint64_t mask;
    int threads = stop_threads(&mask);
    if (threads < 0) return refuse(-threads, "parking the threads");
    size_t given = give_back_pages();
    let_threads_go(mask);
    return PyLong_FromSize_t(given);
}

PyMethodDef image_methods[] = {
    {"make_image", make_image, METH_O, make_image_doc},
    {"give_back", give_back, METH_NOARGS, give_back_doc},
    {0},
};

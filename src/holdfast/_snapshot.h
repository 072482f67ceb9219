/* What the two parts of holdfast._snapshot know of each other: `_snapshot.c` copies, `_image.c` shares. */
#ifndef HOLDFAST_SNAPSHOT_H
#define HOLDFAST_SNAPSHOT_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stddef.h>
#include <stdint.h>

#define HIDDEN __attribute__((visibility("hidden")))

#define PRESENT (1ULL << 63) /* bits of /proc/self/pagemap */
#define OF_A_FILE (1ULL << 61)
#define OURS_ALONE (1ULL << 56)
#define PAGEMAP_CHUNK 512

/* Block all signals, and park every other thread. Their number, or a negative errno with nothing changed. */
HIDDEN int stop_threads(uint64_t *mask);
/* Let them go on, and signals come again as `mask` says. */
HIDDEN void let_threads_go(uint64_t mask);

HIDDEN int read_pagemap(int pagemap, uint64_t *entries, uintptr_t page, size_t pages);
/* Whether cells are known to write to this page, by its number. */
HIDDEN int is_hot(uintptr_t page);
HIDDEN PyObject *refuse(int error, const char *what);

/* All other threads are parked. How many pages were given back. */
HIDDEN size_t give_back_pages(void);
HIDDEN extern PyMethodDef image_methods[];

#endif

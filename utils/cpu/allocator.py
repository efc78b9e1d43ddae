"""Keeps freed memory of CPU tensors for the next step, which needs as much."""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


def keep_freed_memory() -> None:
    """Tell glibc's malloc to give no freed memory back to the kernel, which would clear its pages again, one by one.

    A forked process would hold what is free at that moment for as long as it lives: before a fork all of it goes back.
    A C library without mallopt (musl) stays as it is. Source: mallopt(3), malloc_trim(3).
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):
        libc.mallopt(M_MMAP_MAX, 0)  # large blocks, too, come from the heap ...
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # ... which never shrinks
        os.register_at_fork(before=lambda: libc.malloc_trim(0))

"""Memory of the CPU's tensors: kept when it is freed, for the next step needs as much."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


def keep_freed_memory() -> None:
    """Tell glibc's malloc to give no freed memory back to the kernel, which would clear its pages again, one by one.

    A C library without mallopt (musl) stays as it is. Source: mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)  # large blocks, too, come from the heap ...
        mallopt(M_TRIM_THRESHOLD, -1)  # ... which never shrinks

"""One setting of the C library's allocator that a training step on a CPU needs."""

from __future__ import annotations

import ctypes

# Of mallopt(3), as in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20


def keep_freed_memory() -> bool:
    """Lets the process keep the memory that a step frees, for the next one; True where the C library can.

    By default glibc gives large blocks back to the system and takes them again, page after page, in every step: 20,000
    page faults and up to a tenth of the time of a step of the debug model. The peak stays what it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it; other C libraries may not
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))

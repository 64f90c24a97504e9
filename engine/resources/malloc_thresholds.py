"""Keeps big freed tensors in the process, on Linux with glibc.

A step's activations are tens of megabytes that are freed and asked for again at once. glibc
gives blocks of this size back to the operating system, and every page of the next one is zeroed
and mapped anew: thousands of page faults per step of a prefill. The thresholds belong to the
whole process, so memory that anything else in it frees is kept for later too.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

__all__ = ["keep_freed_memory"]

# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_TRIM_BYTES = 1 << 30
# The largest that glibc takes.
_MMAP_BYTES = 32 << 20


@cache
def keep_freed_memory() -> bool:
    """Raise glibc's thresholds, once per process; elsewhere do nothing.

    Returns:
        Whether the thresholds were raised.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))

"""Keeping large buffers instead of giving them back to the kernel after every operation."""

from __future__ import annotations

import contextlib
import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_LARGEST = 1 << 30


def keep_freed_memory() -> None:
    """A CPU step allocates the same hundred megabytes each time; glibc would return them and fault them in again
    (measured: 25,000 page faults a step, docs/decisions/0003-cpu-threads.md). Other C libraries are left alone."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST - 1)

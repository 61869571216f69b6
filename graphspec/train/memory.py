"""Makes glibc's allocator keep the large blocks of a training step: a setting of the whole process, for commands that only train."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Parameters of ``mallopt`` (malloc.h)."""
MAX = 2**31 - 1
PADDING = 2**28


def keep_freed_memory() -> None:
    """Keep freed blocks in the process instead of returning each one to the kernel, if the C library is glibc.

    Every step allocates the same large tensors; mapping and faulting them in each time can take a third of the step.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, MAX), (M_TOP_PAD, PADDING)):
            mallopt(parameter, value)

"""Memory of large tensors in huge pages.

A pass over weights or keys reads each byte once. With pages of 4 KiB the processor looks up an address every 64 lines, and its prefetchers
stop at the end of each page. Linux gives huge pages to memory that asks for them, unless
``/sys/kernel/mm/transparent_hugepage/enabled`` is ``never``.
"""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

SIZE = 2 << 20
"""Bytes of a huge page."""
HUGEPAGE, COLLAPSE = 14, 25
"""Advice: pages that are touched later may be huge; those that are there become huge now (Linux 6.1)."""


def use_huge_pages(tensor: Tensor) -> Tensor:
    """Ask for huge pages for the memory of a tensor; of one that is not plain CPU memory, or smaller than two such pages, nothing is asked.

    Returns:
        The tensor, whose values stay.
    """
    if type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.nbytes >= 2 * SIZE and sys.platform == "linux":
        begin = -(-tensor.data_ptr() // SIZE) * SIZE
        end = (tensor.data_ptr() + tensor.nbytes) // SIZE * SIZE
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        # A system that has none refuses, and the memory stays as it is.
        for advice in (HUGEPAGE, COLLAPSE):
            advise(begin, end - begin, advice)
    return tensor

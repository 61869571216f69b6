"""Figures of this machine: copy bandwidth, matrix products, and the time of a repeated call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ...plan.buffers import DTYPES
from .metrics import quantiles

MIN_COPY = 2**14
"""Bytes of the smallest copy that is timed; a call takes longer than a smaller one."""
COPIED_AT_ONCE = 2**24
"""Bytes that are copied on a CPU between two readings of the clock."""


def measure(
    run: Callable[[], Any], rewind: Callable[[], None], block: int, device: str, seconds: float, warm_up: float
) -> dict[str, float]:
    """Milliseconds of ``run``: blocks of ``block`` calls, the time of a call in each block, median and spread.

    Args:
        block: calls between two events (``cuda``) or two readings of the clock.
        seconds: measure at least this long, and at least one block.
        warm_up: seconds before that, at least one block.

    Returns:
        ``median``, ``minimum``, ``p10``, ``p90`` in milliseconds, and the number of ``blocks``.
    """
    on_gpu = device == "cuda"

    def once() -> float:
        rewind()
        if not on_gpu:
            began = time.perf_counter()
            with torch.no_grad():
                for _ in range(block):
                    run()
            return 1e3 * (time.perf_counter() - began) / block
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        with torch.no_grad():
            for _ in range(block):
                run()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / block

    end = time.perf_counter() + warm_up
    once()
    while time.perf_counter() < end:
        once()
    times, end = [once()], time.perf_counter() + seconds
    while time.perf_counter() < end:
        times.append(once())
    return {**quantiles(times), "least": min(times), "blocks": len(times)}


def copy_bandwidth(device: str, gib: float | None = None, seconds: float = 0.5, *, working_set: float | None = None) -> float:
    """Bytes per second, read plus written, of a copy within the memory of ``device``; the bandwidth that floors use.

    On a CPU it is that of the fastest copy: other programs only make one slower, and a floor is the least time.

    Args:
        gib: size of what is copied; None: 2 GiB, on a CPU 0.25 (more than most caches hold).
        working_set: bytes that a program touches again and again, which a CPU may hold in its caches: a copy there touches no more. A GPU's
            is not measured by it.
    """
    on_gpu = device == "cuda"
    size = int((gib if gib is not None else 2.0 if on_gpu else 0.25) * 2**30)
    if working_set is not None and not on_gpu:
        size = min(size, max(MIN_COPY, int(working_set) // 2))
    # Not zeros: memory that was never written can be one page for all.
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source).copy_(source)
    block = 5 if on_gpu else max(1, COPIED_AT_ONCE // size)
    found = measure(lambda: target.copy_(source), lambda: None, block, device, seconds, 0.2)
    return 2 * size / (found["median" if on_gpu else "least"] / 1e3)


def matmul_rate(device: str, dtype: str, size: int | None = None, seconds: float = 0.5) -> float:
    """Operations per second of a square matrix product; a multiplication and an addition are two.

    Args:
        size: rows and columns; None: 8192, on a CPU 1024.
    """
    size = size or (8192 if device == "cuda" else 1024)
    left, right = (torch.ones(size, size, dtype=DTYPES[dtype], device=device) for _ in range(2))
    out = torch.empty_like(left)
    found = measure(lambda: torch.mm(left, right, out=out), lambda: None, 3, device, seconds, 0.2)
    return 2 * size**3 / (found["median"] / 1e3)

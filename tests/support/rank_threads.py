"""Ranks that are threads of one process, and the collectives between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


class ThreadComm:
    """Collectives between threads, in order of rank."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=300)
        self.calls = {"sums": 0, "gathers": 0}

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.parts[rank] = x
        self.barrier.wait()
        found = [part for part in self.parts if part is not None]
        self.barrier.wait()
        return found

    def of(self, rank: int) -> OneThread:
        return OneThread(self, rank)


class OneThread:
    def __init__(self, all_ranks: ThreadComm, rank: int) -> None:
        self.all_ranks, self.rank = all_ranks, rank

    def all_reduce(self, x: Tensor) -> Tensor:
        self.all_ranks.calls["sums"] += self.rank == 0
        total, *others = self.all_ranks.exchange(self.rank, x)
        for other in others:
            total = total + other
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        self.all_ranks.calls["gathers"] += self.rank == 0
        return torch.cat(self.all_ranks.exchange(self.rank, x), dim=-1)


def together(size: int, run: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]

"""Ranks that are threads of one process, the collectives between them, and what a rank reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.facts import ModelFacts
from graphspec.lab.predict.ranks import sums_of
from graphspec.models import tensor_files
from graphspec.models.layers import join_ranks
from graphspec.models.target import load_target
from graphspec.models.vocabulary import VocabParallelLinear
from tests.support.checkpoints import DenseAttention


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


def run_ranks(
    facts: ModelFacts, size: int, taps: tuple[int, ...], token_BT: Tensor, attention: Callable[[ModelFacts], DenseAttention]
) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Logits and tapped features of whole prompts, the same on every rank, and the collectives they took, as many as the plan counts."""
    comm = ThreadComm(size)

    def run(rank: int) -> tuple[Tensor, Tensor]:
        own = facts.of_rank(rank, size)
        with torch.inference_mode():
            ours = load_target(own, taps, token_BT.shape[1], torch.float32, "cpu")
            join_ranks(ours, comm.of(rank))
            found = ours(token_BT, attention(own))
            assert found.feature_BTF is not None and isinstance(ours.lm_head, VocabParallelLinear)
            return ours.lm_head.gather(ours.logits(found.hidden_BTH)), found.feature_BTF

    (logits, features), *others = together(size, run)
    for other_logits, other_features in others:
        assert torch.equal(other_logits, logits) and torch.equal(other_features, features)
    assert sum(comm.calls.values()) == sums_of(facts.of_rank(0, size), size)
    return logits, features, comm.calls


def count_numbers_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number: how many are read from safetensors files from now on. Set it to 0 to begin anew."""
    read = [0]
    for method in ("tensor", "part"):
        usual = getattr(tensor_files._Safetensors, method)

        def counted(*arguments: Any, usual: Any = usual) -> Tensor:
            found: Tensor = usual(*arguments)
            read[0] += found.numel()
            return found

        monkeypatch.setattr(tensor_files._Safetensors, method, counted)
    return read

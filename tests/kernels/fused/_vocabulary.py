"""Shared by the tests of the kernels over a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from graphspec.kernels import op_of
from graphspec.kernels.fused.launch import INTERPRETED, semaphores

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
"""Where the kernels run here: in the interpreter, or for real."""


def functions(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Reference and fused implementation of an op."""
    op = op_of(name)
    return op.reference, op.implementation("fused")


def on_device(case: dict[str, Any]) -> dict[str, Any]:
    return {key: value.to(DEVICE) if isinstance(value, Tensor) else value for key, value in case.items()}


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, torch.empty gives NaN and the largest integers: what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def call(function: Callable[..., Any], case: dict[str, Any]) -> tuple[Tensor, ...]:
    """One call on poisoned memory, back on the CPU; the counters between programs must be at 0 again."""
    with poisoned():
        result = function(**on_device(case))
    assert not semaphores(DEVICE, 1).any()
    return tuple(x.cpu() for x in (result if isinstance(result, tuple) else (result,)))


def lane(case: dict[str, Any], index: int, row: int | None = None) -> dict[str, Any]:
    """A case of one lane of another, or of one row of it: names that end in _B.. lose the other lanes, _BT.. the other rows."""
    alone = {}
    for key, value in case.items():
        letters = key.rpartition("_")[2]
        if isinstance(value, Tensor) and letters.startswith("B"):
            value = value[index : index + 1]
            if row is not None and letters.startswith("BT"):
                value = value[:, row : row + 1]
        alone[key] = value
    return alone

"""CUDA graphs without CUDA: a program's operations are recorded once and replayed over the same memory, without running its Python again.

As in a graph, every address, every shape and every number that Python read while recording is fixed. Between two replays the program's
intermediate tensors are overwritten with garbage, as in a memory pool that other graphs use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphspec.plan.buffers import POISON, Arena

FORBIDDEN = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def spoil(tensor: Tensor) -> None:
    """NaN, or for integers a value that is out of range as an index."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(1 if tensor.dtype is torch.bool else max(POISON, torch.iinfo(tensor.dtype).min))


@dataclass(frozen=True)
class Step:
    """One operation, and its results that have their own memory."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: tuple[tuple[int, Tensor], ...]


class Recorder(TorchDispatchMode):
    """Runs and records operations. Views need no replay, because the memory keeps its address."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FORBIDDEN:
            raise RuntimeError(f"{func} inside a captured program")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        known = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        fresh = tuple((i, t) for i, t in enumerate(tensors(result)) if t.untyped_storage().data_ptr() not in known and t.numel())
        if fresh or func._schema.is_mutable:
            self.steps.append(Step(func, args, kwargs, fresh))
        return result


class Tape:
    """A recorded program."""

    def __init__(self, steps: list[Step], arena: Arena, poisons: bool = True) -> None:
        self.steps, self.arena, self.poisons = steps, arena, poisons
        self.replays = 0

    @property
    def pool_bytes(self) -> int | None:
        return sum(t.numel() * t.element_size() for step in self.steps for _, t in step.fresh)

    def __call__(self) -> None:
        self.replays += 1
        if self.poisons:
            self.arena.poison(("lane",))
        for step in self.steps:
            for _, tensor in step.fresh:
                spoil(tensor)
        for step in self.steps:
            found = tensors(step.op(*step.args, **step.kwargs))
            for index, tensor in step.fresh:
                tensor.copy_(found[index])


class TapeCapturer:
    """Replaces the CUDA-graph capturer. ``refuse`` selects programs for which memory runs out; ``poisons`` fills the lanes' slots with
    garbage before each replay, on which segments of one program must not depend.
    """

    def __init__(self, arena: Arena, refuse: Callable[[Any], bool] = lambda program: False, *, poisons: bool = True) -> None:
        self.arena, self.refuse, self.poisons = arena, refuse, poisons
        self.order: list[Any] = []

    def capture(self, program: Any) -> Tape:
        owner = getattr(program, "__self__", program)
        self.order.append(owner)
        if self.refuse(owner):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        with Recorder() as recorder:
            program()
        return Tape(recorder.steps, self.arena, self.poisons)

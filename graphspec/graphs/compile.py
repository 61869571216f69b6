"""torch.compile of stages: one graph for each region, static shapes, nothing shared between programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch._dynamo import lookup_backend
from torch._dynamo.utils import counters

from ..buffers import Views
from .stage import Stage


class Region:
    """One compiled callable without arguments or results, over tensors that never move.

    The first call compiles. Later ones hand the compiled code the same tensors again and pass Dynamo by: there is nothing to guard when
    every address and every shape stays what it was.

    Args:
        run: what to compile; a function with a code object of its own.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._first: Callable[[], None] = torch.compile(run, fullgraph=True, dynamic=False, backend=self._backend)
        self._code: Callable[..., Any] | None = None
        self._tensors: tuple[Any, ...] = ()

    def _backend(self, module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        code = lookup_backend("inductor")(module, inputs)

        def first(*tensors: Any) -> Any:
            self._code, self._tensors = code, tensors
            return code(*tensors)

        return first

    def __call__(self) -> None:
        if self._code is None:
            self._first()
        else:
            self._code(*self._tensors)


def compile_stages(stages: Sequence[Stage], views: Views) -> Callable[[], None]:
    """Compile ``stages`` over ``views`` as one region; the compilation itself happens at the first call.

    The region has a code object of its own. Dynamo keeps its compiled graphs per code object; with one code object for all buckets it would
    look through all of them, and hit the recompilation limit.
    """
    ordered = tuple(stages)

    def run() -> None:
        for stage in ordered:
            stage(views)

    name = f"run_{ordered[0].name}" if len(ordered) == 1 else "run_cycle"
    return Region(FunctionType(run.__code__.replace(co_name=name), run.__globals__, name, None, run.__closure__))


def graphs_compiled() -> int:
    """Graphs this process has compiled so far; constant after warm-up."""
    return int(counters["stats"]["unique_graphs"])

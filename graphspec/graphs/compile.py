"""torch.compile of stages: one graph for each region, static shapes, nothing shared between programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType

import torch
from torch._dynamo.utils import counters

from ..buffers import Views
from .stage import Stage


def compile_stages(stages: Sequence[Stage], views: Views) -> Callable[[], None]:
    """Compile ``stages`` over ``views`` as one region; the compilation itself happens at the first call.

    The region has a code object of its own. Dynamo keeps its compiled graphs per code object and looks through all of them at every call;
    with one code object for all buckets the search grows with their number and hits the recompilation limit.
    """
    ordered = tuple(stages)

    def run() -> None:
        for stage in ordered:
            stage(views)

    name = f"run_{ordered[0].name}" if len(ordered) == 1 else "run_cycle"
    isolated = FunctionType(run.__code__.replace(co_name=name), run.__globals__, name, None, run.__closure__)
    compiled: Callable[[], None] = torch.compile(isolated, fullgraph=True, dynamic=False)
    return compiled


def graphs_compiled() -> int:
    """Graphs this process has compiled so far; constant after warm-up."""
    return int(counters["stats"]["unique_graphs"])

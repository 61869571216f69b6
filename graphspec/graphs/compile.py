"""torch.compile of single stages: one graph each, static shapes, nothing shared between programs."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch._dynamo.utils import counters

from ..buffers import Views
from .stage import Stage

OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {}


def isolated(stage: Stage, views: Views) -> Callable[[], None]:
    """A call of ``stage`` on ``views`` with a code object of its own.

    Dynamo keeps its compiled graphs per code object and looks through all of them at every call; with one code object for all buckets the
    search grows with their number and hits the recompilation limit.
    """

    def run() -> None:
        stage(views)

    return FunctionType(run.__code__.replace(co_name=f"run_{stage.name}"), run.__globals__, f"run_{stage.name}", None, run.__closure__)


def compile_stage(stage: Stage, views: Views) -> Callable[[], None]:
    """Compile ``stage`` over ``views``; the compilation itself happens at the first call."""
    compiled: Callable[[], None] = torch.compile(isolated(stage, views), fullgraph=True, dynamic=False, options=OPTIONS or None)
    return compiled


def graphs_compiled() -> int:
    """Graphs this process has compiled so far; constant after warm-up."""
    return int(counters["stats"]["unique_graphs"])

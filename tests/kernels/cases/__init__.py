"""Small inputs of every op, drawn on the CPU: a function of the op's name in the file of its topic."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from torch import Generator

from graphspec.kernels import KernelOp
from graphspec.kernels.op import Case


def cases_of(op: KernelOp, generator: Generator) -> list[Case]:
    """Inputs of an op, odd sizes included."""
    topic = op.reference.__module__.rpartition(".")[0].rpartition(".")[2]
    draw: Callable[[Generator], list[Case]] = getattr(importlib.import_module(f"{__name__}.{topic}"), op.name)
    return draw(generator)

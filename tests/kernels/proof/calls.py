"""Calls of launchers on ``meta`` tensors, whose kernels are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from graphspec.kernels import op_of
from graphspec.kernels.fused.launch import launcher


@dataclass(frozen=True, slots=True)
class AotCase:
    """A call of a launcher, in the shapes of a real model.

    Attributes:
        name: unique in its file, and part of its key in the table of registers.
        launcher: the launcher.
        arguments: returns its keyword arguments; a function, so that listing the cases allocates nothing.
    """

    name: str
    launcher: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]]


def aot_case(name: str, op_name: str, sizes: Mapping[str, int], numerics: str = "fast", **given: Any) -> AotCase:
    """A call of an op's launcher with these sizes; see :meth:`graphspec.kernels.op.KernelOp.without_data`."""
    op = op_of(op_name)
    return AotCase(name, launcher(op, numerics), lambda: op.signature.gather(op.without_data(sizes, **given)))

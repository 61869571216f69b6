"""Work of a launch: what it reads, computes and waits for. A kernel declares it next to its code; estimates of time ask the launch.

A kernel that declares none is :data:`SMALL`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .launch import Launch


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one launch.

    Attributes:
        bytes: streamed from memory by all programs together.
        programs: that share them.
        in_flight: bytes that a program has requested at a time.
        memory, cache: exposed round trips, those that fill the stream's pipeline included.
        alone: bytes that one program moves over the link of its multiprocessor.
        flops: operations of all programs.
    """

    bytes: float = 0.0
    programs: int = 1
    in_flight: float = 16 * 1024
    memory: float = 0
    cache: float = 0
    alone: float = 0.0
    flops: float = 0.0


SMALL = Work(cache=3)
"""A kernel of one or a few programs over small buffers: it loads its arguments, loads what they point to, and stores."""
ARRIVAL = 3
"""Round trips of a merge: the stores drain, the counter is incremented, the parts of the other programs are loaded."""


@dataclass(frozen=True, slots=True)
class Situation:
    """Properties of the engine that the work of a launch depends on.

    Attributes:
        context: committed tokens of each row.
        programmatic: kernels of ours begin while the one before them drains.
        chain: every node's ancestors are the nodes before it.
    """

    context: int
    programmatic: bool = False
    chain: bool = False


Describe = Callable[["Launch", Situation], Work]


def works(describe: Describe) -> Callable[[Any], Any]:
    """Declare the work of a kernel's launches; a decorator of a ``triton.jit`` function."""

    def declare(kernel: Any) -> Any:
        kernel.work = describe
        return kernel

    return declare


def work_of(launch: Launch, at: Situation) -> Work:
    """The work of a launch."""
    describe: Describe | None = getattr(launch.kernel, "work", None)
    return SMALL if describe is None else describe(launch, at)

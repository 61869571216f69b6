"""The calls of ``make gpu-check``, their parts in order, and the seconds each part may take.

A call has ten minutes. A part may take the time that the parts after it do not need: each part has a minimum that is reserved for it, so
that a part which hangs, or compiles longer than expected, does not cost README its figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a call.

    Attributes:
        name: in ``--only`` and in result files.
        maximum: most seconds that it may take; unused ones are left to later parts.
        minimum: seconds that are reserved for it.
        about: description for ``--help`` and the output.
    """

    name: str
    maximum: float
    minimum: float
    about: str


CALLS: dict[str, tuple[Part, ...]] = {
    "first": (
        Part("probes", 90, 90, "what nothing works without, and every kernel once"),
        Part("cache", 30, 30, "kernels of the 8B cycles compiled by many processes"),
        Part("rows", 250, 200, "README's rows: none, trees, chain, one draft step"),
        Part("core", 240, 180, "the tests that decide green"),
        Part("rest", 570, 0, "the other probes; stages and nodes of a cycle"),
    ),
    "second": (Part("tests", 570, 300, "every test in tests/gpu, the sanitizer among them"),),
    "third": (
        Part("engine", 200, 120, "the whole engine, two cycles in flight, and its first token, at 8B shapes"),
        Part("buckets", 400, 240, "baselines, JetSpec's shape, other kernels, batches"),
        Part("ops", 60, 0, "FlashInfer's ops next to ours, where it is installed"),
        Part("speed", 150, 0, "the demo model, where the checks were green"),
    ),
}
MINUTES = 9.5
GAP = 4.0
"""Seconds allowed between two parts: imports, files, ending processes."""
SHORTEST = 10.0
"""A part with less time than this is not started."""


def all_parts() -> tuple[Part, ...]:
    """The parts of all calls, in order."""
    return tuple(part for parts in CALLS.values() for part in parts)


def needed(parts: Sequence[Part]) -> float:
    """The fewest minutes in which every one of ``parts`` gets its least."""
    return sum(part.minimum + GAP for part in parts) / 60


def allowed(parts: Sequence[Part], name: str, elapsed: float, minutes: float) -> float:
    """Seconds that part ``name`` may take.

    Args:
        parts: of this call, in order.
        name: of the part to start.
        elapsed: seconds since the call began.
        minutes: for the whole call, at least :func:`needed`.
    """
    place = next(number for number, part in enumerate(parts) if part.name == name)
    kept = sum(part.minimum + GAP for part in parts[place + 1 :])
    return max(0.0, min(parts[place].maximum, 60 * minutes - elapsed - kept))

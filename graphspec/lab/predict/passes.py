"""Times of single network passes on this machine, and cycles of any shape predicted from them. Pure functions.

The time of a pass over R rows that attend C committed tokens is interpolated linearly between the measured numbers of rows, and between the
two measured contexts. The time of a cycle beyond its passes is ::

    host + each * draft passes + tree, where the shape is one + rate * logits

fitted to the few cycles that were timed whole; no term is negative. Passes are counted by :class:`graphspec.lab.floor.FloorModel`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...shapes import CycleShape
from ..floor import FloorModel, Forward, Hardware, StageCost

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MEGA = 1e6


@dataclass(frozen=True, slots=True)
class Curve:
    """Milliseconds of a part of a pass: ``times[i][j]`` for ``rows[i]`` after ``contexts[j]`` tokens, both ascending."""

    rows: tuple[int, ...]
    times: tuple[tuple[float, ...], ...]
    contexts: tuple[int, ...] = (0,)

    def at(self, rows: int, context: int = 0) -> float:
        """Milliseconds of ``rows`` rows after ``context`` tokens; past the measured ones, extrapolated from the last two."""
        found = [_between(self.rows, [times[place] for times in self.times], rows) for place in range(len(self.contexts))]
        return max(_between(self.contexts, found, context), min(found))


def _between(places: Sequence[int], values: Sequence[float], place: int) -> float:
    """The value at ``place``, interpolated linearly; constant before the first of ``places``, extrapolated after the last."""
    if len(places) == 1 or place <= places[0]:
        return values[0]
    right = next((index for index in range(1, len(places)) if places[index] >= place), len(places) - 1)
    low, high = places[right - 1], places[right]
    return values[right - 1] + (values[right] - values[right - 1]) * (place - low) / (high - low)


@dataclass(frozen=True, slots=True)
class TimedCycle:
    """A cycle that ran: its shape, rows, committed tokens of each half-way, and the median milliseconds it took, host included."""

    shape: CycleShape
    batch: int
    context: int
    ms: float


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Times measured on this machine, and estimates for other cycles from them.

    Attributes:
        curves: by network and part: ``target.layers``, ``target.head``, ``draft.layers``, ``draft.head``, ``draft.fuse``.
        beyond: milliseconds beyond the passes: of every cycle, of each draft pass, of a tree, of a megabyte of logits.
        cycles: that ``beyond`` was fitted to.
        bandwidth: bytes per second of a copy, measured at the same time.
    """

    curves: Mapping[str, Curve]
    beyond: tuple[float, float, float, float]
    cycles: tuple[TimedCycle, ...]
    bandwidth: float
    source: str

    @classmethod
    def fit(cls, model: FloorModel, curves: Mapping[str, Curve], cycles: Sequence[TimedCycle], bandwidth: float, source: str) -> PassTimes:
        """From curves and some whole cycles of one model."""
        times, terms = [], []
        for cycle in cycles:
            costs = model.stages(cycle.shape, cycle.batch, cycle.context)
            spent = sum(_milliseconds(curves, forward) for cost in costs for forward in cost.forwards)
            times.append((cycle.ms - spent) / cycle.ms)
            terms.append([term / cycle.ms for term in _terms(cycle.shape, costs)])
        return cls(curves, _not_negative(np.array(terms), np.array(times)), tuple(cycles), bandwidth, source)

    def milliseconds(self, cost: StageCost, hardware: Hardware) -> float:
        """Time that the passes of a stage take; ``hardware`` is not used."""
        del hardware
        return sum(_milliseconds(self.curves, forward) for forward in cost.forwards)

    def beyond_ms(self, shape: CycleShape, costs: Sequence[StageCost]) -> float:
        """Time that a cycle takes beyond its passes."""
        return sum(factor * term for factor, term in zip(self.beyond, _terms(shape, costs), strict=True))

    def record(self) -> dict[str, Any]:
        """The figures as JSON."""
        return {
            "curves": {name: {"rows": c.rows, "times": c.times, "contexts": c.contexts} for name, c in self.curves.items()},
            "beyond": dict(zip(("host_ms", "draft_pass_ms", "tree_ms", "logits_ms_per_mb"), self.beyond, strict=True)),
            "cycles": [{"shape": c.shape.numbers, "batch": c.batch, "context": c.context, "ms": c.ms} for c in self.cycles],
            "bandwidth": self.bandwidth,
        }


def read_curves(record: Mapping[str, Any]) -> dict[str, Curve]:
    """The curves of :meth:`PassTimes.record`.

    Raises:
        KeyError, TypeError, ValueError: it is no such record.
    """
    return {
        name: Curve(tuple(map(int, c["rows"])), tuple(tuple(map(float, row)) for row in c["times"]), tuple(map(int, c["contexts"])))
        for name, c in record["curves"].items()
    }


def _milliseconds(curves: Mapping[str, Curve], forward: Forward) -> float:
    parts = {"layers": forward.rows, "head": forward.scored, **({"fuse": forward.rows} if forward.fused else {})}
    found = ((curves.get(f"{forward.network}.{part}"), rows) for part, rows in parts.items())
    return sum(curve.at(rows, forward.context) for curve, rows in found if curve is not None)


def _terms(shape: CycleShape, costs: Iterable[StageCost]) -> tuple[float, float, float, float]:
    costs = list(costs)
    drafts = sum(forward.network == "draft" for cost in costs for forward in cost.forwards)
    # A drafter without a network counts as one draft pass.
    passes = drafts or min(shape.num_steps, 1)
    return 1.0, float(passes), float(not shape.is_chain), sum(cost.parts["logits"] for cost in costs) / _MEGA


def _not_negative(terms: NDArray[np.float64], times: NDArray[np.float64]) -> tuple[float, float, float, float]:
    """Least squares with factors of at least 0: the most negative one is dropped until none is negative."""
    kept = [column for column in range(terms.shape[1]) if terms[:, column].any()]
    while kept:
        factors = np.linalg.lstsq(terms[:, kept], times, rcond=None)[0]
        if factors.min() >= 0:
            found = dict(zip(kept, factors.tolist(), strict=True))
            host, each, tree, rate = (found.get(column, 0.0) for column in range(4))
            return host, each, tree, rate
        kept.pop(int(factors.argmin()))
    return 0.0, 0.0, 0.0, 0.0

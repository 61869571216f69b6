"""From floors to advice: predicted cycle times, shapes ranked by predicted speed, the width that verification has free, the crossover.

A stage is predicted to take its floor divided by an *efficiency*, the share of the floor's speed that it reaches; stages follow one
another without gaps, and the host adds ``Efficiency.host_ms``. These are assumptions, which the output of :mod:`.plan` states.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...config.catalog import Variant
from ...errors import ConfigError
from ...shapes import MAX_WINDOW, PLAIN, CycleShape
from ..floor import FloorModel, Hardware, StageCost

DEFAULT_EFFICIENCY = 0.85
"""README's aim for plain decoding; used if nothing was measured."""
FREE = 0.05
"""Verification of N nodes counts as free if its floor, or its measured time, is at most this share above that of one node."""
LARGEST_BATCH = 4096
_DEPTHS = range(1, 11)
_FANS = (2, 3, 4, 6, 8)
_NODES = (4, 6, 8, 12, 16, 24, 32, 48, 64)
_DEEP, _WIDE = (12, 15, 16, 20), (96, 128)
"""Further depths and nodes for a drafter whose pass costs the same at any depth."""


class Timing(Protocol):
    """How long things take: by a share of their floors (:class:`Efficiency`) or as measured (:class:`.passes.PassTimes`)."""

    @property
    def source(self) -> str:
        """Where the figures come from."""
        ...

    def milliseconds(self, cost: StageCost, hardware: Hardware) -> float:
        """Time that a stage is predicted to take."""
        ...

    def beyond_ms(self, shape: CycleShape, costs: Sequence[StageCost]) -> float:
        """Time that a cycle takes beyond its stages with weights."""
        ...

    def record(self) -> dict[str, Any]:
        """The figures, as JSON."""
        ...


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Share of the floor's speed that stages reach, and what they take beyond that.

    Attributes:
        overall: share of every stage without a figure of its own.
        rates: operations per second, by stage: a stage takes its operations divided by this in addition to its share of the floor. Only
            measured results have such figures: a processor whose caches hold the weights is limited by something other than its memory.
    """

    overall: float = DEFAULT_EFFICIENCY
    stages: Mapping[str, float] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    host_ms: float = 0.0
    source: str = "assumed"

    def __post_init__(self) -> None:
        for name, value in (("overall", self.overall), *self.stages.items(), *self.rates.items()):
            if value <= 0:
                raise ConfigError(f"efficiency of {name}", "a number above 0", value)

    def milliseconds(self, cost: StageCost, hardware: Hardware) -> float:
        """Time that a stage is predicted to take."""
        beyond = 1e3 * cost.flops / self.rates[cost.name] if cost.name in self.rates else 0.0
        return cost.floor_ms(hardware) / self.stages.get(cost.name, self.overall) + beyond

    def beyond_ms(self, shape: CycleShape, costs: Sequence[StageCost]) -> float:
        """The host's time, the same for every cycle."""
        del shape, costs
        return self.host_ms

    def record(self) -> dict[str, Any]:
        """The figures as JSON."""
        return {"overall": self.overall, "stages": dict(self.stages), "rates": dict(self.rates), "host_ms": self.host_ms}


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """One stage: its bytes and operations, its floor, and its predicted time, in milliseconds."""

    name: str
    cost: StageCost
    floor_ms: float
    ms: float
    compute_bound: bool


@dataclass(frozen=True, slots=True)
class Prediction:
    """One cycle.

    Attributes:
        cycle_ms: predicted milliseconds of a cycle, the host's share included.
    """

    shape: CycleShape
    batch: int
    context: int
    stages: tuple[StagePrediction, ...]
    cycle_ms: float
    floor_ms: float

    def tokens_per_second(self, length: float) -> float:
        """Tokens per second of all rows together, when a cycle commits ``length`` tokens of each."""
        return 1e3 * self.batch * length / self.cycle_ms


@dataclass(frozen=True, slots=True)
class Ranked:
    """A shape and its predicted speed; ``acceptance_length`` is tokens per row and cycle."""

    prediction: Prediction
    acceptance_length: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all rows together."""
        return self.prediction.tokens_per_second(self.acceptance_length)

    @property
    def shape(self) -> CycleShape:
        """(S, K, N)."""
        return self.prediction.shape

    def record(self) -> dict[str, Any]:
        """The shape, its batch and its figures as JSON."""
        figures = {"predicted_ms": self.prediction.cycle_ms, "tokens_per_second": self.tokens_per_second}
        return {"batch": self.prediction.batch, "shape": self.shape.numbers, **figures, "acceptance_length": self.acceptance_length}


@dataclass(frozen=True, slots=True)
class Outlook:
    """What cycles are predicted from.

    Attributes:
        context: committed tokens of each row.
        timing: default: :data:`DEFAULT_EFFICIENCY` for every stage, and no host time.
    """

    model: FloorModel
    context: int
    hardware: Hardware
    timing: Timing = field(default_factory=Efficiency)

    def predict(self, shape: CycleShape, batch: int) -> Prediction:
        """One cycle of ``batch`` rows."""
        stages, costs = [], self.model.stages(shape, batch, self.context)
        for cost in costs:
            times = cost.floor_ms(self.hardware), self.timing.milliseconds(cost, self.hardware)
            stages.append(StagePrediction(cost.name, cost, *times, cost.compute_bound(self.hardware)))
        total = sum(stage.ms for stage in stages) + self.timing.beyond_ms(shape, costs)
        return Prediction(shape, batch, self.context, tuple(stages), total, sum(stage.floor_ms for stage in stages))

    def rank(self, lengths: Mapping[CycleShape, float], batch: int) -> list[Ranked]:
        """Shapes by predicted tokens per second, fastest first; the smaller first where two are equally fast.

        Args:
            lengths: tokens per cycle of each shape; with ``PLAIN`` among them plain decoding is ranked too.
        """
        ranked = [Ranked(self.predict(shape, batch), length) for shape, length in lengths.items()]
        return sorted(ranked, key=lambda entry: (-entry.tokens_per_second, entry.shape.num_draft_tokens, entry.shape))

    def free_width(self, batch: int, slack: float = FREE) -> int:
        """The most nodes N per row, at most a window's, whose verification takes at most ``slack`` longer than that of one node.

        Times are floors, unless they were measured.
        """

        def verify(nodes: int) -> float:
            cost = self.model.stages(PLAIN if nodes == 1 else CycleShape(nodes - 1, 1, nodes), batch, self.context)[-1]
            assumed = isinstance(self.timing, Efficiency)
            return cost.floor_ms(self.hardware) if assumed else self.timing.milliseconds(cost, self.hardware)

        maximum = (1 + slack) * verify(1)
        return 1 + bisect_left(range(2, MAX_WINDOW + 1), True, key=lambda nodes: verify(nodes) > maximum)

    def verify_costs(self, batch: int, nodes: Sequence[int]) -> list[StageCost]:
        """What verification costs with each of these numbers of nodes per row."""
        shapes = (PLAIN if count == 1 else CycleShape(count - 1, 1, count) for count in nodes)
        return [self.model.stages(shape, batch, self.context)[-1] for shape in shapes]

    def crossover(self, lengths: Mapping[CycleShape, float], largest: int = LARGEST_BATCH) -> int | None:
        """The smallest batch from which no shape is predicted to be faster than plain decoding; None: up to ``largest`` some always is.

        Powers of two are tried first, because with a mixture of experts drafting may pay at large batches only; the boundary after the
        last one that pays is then found by bisection.
        """

        def pays(batch: int) -> bool:
            best = self.rank(lengths, batch)
            return bool(best) and best[0].tokens_per_second > self.predict(PLAIN, batch).tokens_per_second(1.0)

        tried = sorted({*(2**power for power in range(largest.bit_length())), largest})
        low = max((batch for batch in tried if pays(batch)), default=0)
        if low == largest:
            return None
        high = next(batch for batch in tried if batch > low)
        return low + 1 + bisect_left(range(low + 1, high), True, key=lambda batch: not pays(batch))


def candidate_shapes(variant: Variant, heads: int = 1, deepest: int | None = None) -> list[CycleShape]:
    """Shapes to consider: chains, and trees of every depth, fan-out and size that this drafter can serve.

    Args:
        variant: catalog entry; one that does not speculate has none.
        heads: prediction heads of the draft with layers of their own; more than one allows chains only, of at most that many steps.
    """
    if not variant.speculates:
        return []
    pool = variant.auto_shape.pool
    at_once = pool == "marginals"
    every_depth, sizes = (*_DEPTHS, *(_DEEP if at_once else ())), (*_NODES, *(_WIDE if at_once else ()))
    limit = min(deepest or every_depth[-1], heads if heads > 1 else every_depth[-1])
    depths = [depth for depth in every_depth if depth <= limit]
    found = [CycleShape(depth, 1, depth + 1, pool) for depth in depths]
    if heads > 1:
        return found
    for depth in depths:
        for fan in _FANS:
            maximum = 1 + (fan * depth if pool == "paths" else fan + (depth - 1) * fan**2)
            slots = (depth - 1) * fan + 1 if pool == "beams" else 0
            found += [
                CycleShape(depth, fan, nodes, pool) for nodes in sizes if depth + 1 < nodes <= maximum and max(nodes, slots) <= MAX_WINDOW
            ]
    return found

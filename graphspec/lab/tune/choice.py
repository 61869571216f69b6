"""Conclusions of ``graphspec tune``: the shape, further depths, and each bucket's first depth. Pure functions over measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

BACKLOGS = (32, 64, 128)
CATCH_UP_SHARE = 0.005
"""Largest share of the time at depth 0 that the drafter may spend on catching up."""

NEAR = 0.05
"""A bucket begins at another depth only if that is estimated to be faster by this share: the shape was measured on the workload, other
depths were only timed."""

Shape = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One shape at one batch size, measured together with plain decoding.

    Attributes:
        ratio: median of the rounds' ratios to plain decoding.
        acceptance_length: tokens per cycle; None if no cycle was whole.
        shares: of drafts accepted at depth 1, 2, ... given the ones before, as deep as there were any.
        cycle_ms: median time of a cycle, host included, between two bursts; None if no request had two cycles.
    """

    shape: Shape
    batch: int
    tokens_per_second: float
    ratio: float
    acceptance_length: float | None
    shares: tuple[float, ...]
    cycle_ms: float | None = None
    plain_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen shape.

    Attributes:
        shape: None if plain decoding was fastest at every batch size, or, with a drafter of fixed depth, over all of them.
        score: of the shape: the geometric mean over batch sizes of its ratio to plain decoding, as :func:`choose` counts it.
        scores: of every shape that was measured at all batch sizes, best first.
        ratios: of the same shapes, the geometric mean of the measured ratios.
        fastest: batch size to its fastest shape, None if that is plain decoding.
    """

    shape: Shape | None
    score: float
    scores: dict[Shape, float]
    ratios: dict[Shape, float]
    fastest: dict[int, Shape | None]


def choose(outcomes: Sequence[Outcome], *, adapts: bool = True) -> Choice:
    """The best shape over all batch sizes.

    An engine has one shape and shallower cycles of it. Where the shape does not pay the engine decodes plainly, so a ratio below 1 counts
    as 1 in the score, unless the drafter's depth is fixed. Of two shapes with the same score, the one with fewer nodes is chosen.

    Args:
        outcomes: of shapes whose tokens were right. A shape that was not measured at every batch size is not chosen.
    """
    batches = sorted({outcome.batch for outcome in outcomes})
    by_shape: dict[Shape, dict[int, Outcome]] = {}
    for outcome in outcomes:
        by_shape.setdefault(outcome.shape, {})[outcome.batch] = outcome
    whole = {shape: found for shape, found in by_shape.items() if len(found) == len(batches)}
    ratios = {shape: geometric_mean([outcome.ratio for outcome in found.values()]) for shape, found in whole.items()}
    minimum = 1.0 if adapts else 0.0
    scores = {shape: geometric_mean([max(minimum, outcome.ratio) for outcome in found.values()]) for shape, found in whole.items()}
    order = sorted(scores, key=lambda shape: (-scores[shape], shape[2], shape))
    pays = bool(order) and scores[order[0]] > 1
    fastest: dict[int, Shape | None] = {}
    for batch in batches:
        best = max((outcome for outcome in outcomes if outcome.batch == batch), key=lambda outcome: outcome.tokens_per_second)
        fastest[batch] = best.shape if best.ratio > 1 else None
    shape, score = (order[0], scores[order[0]]) if pays else (None, 1.0)
    in_order = [{shape: found[shape] for shape in order} for found in (scores, ratios)]
    return Choice(shape, score, in_order[0], in_order[1], fastest)


def shallower_depths(steps: int) -> list[int]:
    """Depths below ``steps`` to build cycles for: 0, a quarter and a half. Each costs a program per bucket."""
    return sorted({0, *(depth for depth in (steps // 4, steps // 2) if depth < steps)})


def mean_shares(outcomes: Sequence[Outcome]) -> list[float]:
    """Mean shares of one shape over its batch sizes, for each depth over those where it was observed."""
    deepest = max((len(outcome.shares) for outcome in outcomes), default=0)
    columns = [[outcome.shares[depth] for outcome in outcomes if len(outcome.shares) > depth] for depth in range(deepest)]
    return [sum(column) / len(column) for column in columns]


def cycle_times(timed: Mapping[int, Mapping[int, float]], measured: Sequence[Outcome]) -> dict[int, dict[int, float]]:
    """Times of cycles by bucket and depth, in milliseconds to four digits.

    An engine times its programs alone, with empty rows. Where a bucket ran the workload, the times of its deepest cycle and of plain
    decoding are those of that run, host and context included, and depths between them are interpolated as the engine's times are.

    Args:
        timed: bucket to depth to milliseconds, as the engine timed them; the depths are the same in all buckets.
    """
    found = {outcome.batch: outcome for outcome in measured}
    times = {}
    for bucket, table in timed.items():
        deepest, outcome = max(table), found.get(bucket)
        if outcome is not None and outcome.cycle_ms is not None and outcome.plain_ms is not None and 0 in table:
            low, high, span = outcome.plain_ms, outcome.cycle_ms, table[deepest] - table[0]
            # A deeper program that was timed faster than a plain one: noise.
            places = {depth: (time - table[0]) / span if span > 0 else depth / deepest for depth, time in table.items()}
            table = {depth: low + (high - low) * min(1.0, max(0.0, place)) for depth, place in places.items()}
        times[bucket] = {depth: float(f"{time:.4g}") for depth, time in table.items()}
    return times


def first_depths(times: Mapping[int, Mapping[int, float]], shares: Sequence[float], ratios: Mapping[int, float]) -> dict[int, int]:
    """The first depth of each bucket: the one with the most tokens per second by times and shares, or the deepest if within :data:`NEAR`.

    The deepest was measured as a whole engine, which counts for more than times of programs: where it did not pay, a bucket begins at depth
    0.

    Args:
        shares: of drafts accepted at depth 1, 2, ... given the ones before.
        ratios: batch size to the deepest cycle's measured ratio to plain decoding.
    """
    found = {}
    for bucket, table in times.items():
        speeds = {depth: expected_tokens(shares, depth) / time for depth, time in table.items()}
        depth, deepest = max(table, key=lambda depth: (speeds[depth], -depth)), max(table)
        if speeds[depth] < (1 + NEAR) * speeds[deepest]:
            depth = deepest
        ratio = ratio_at(bucket, ratios)
        found[bucket] = 0 if depth == deepest and 0 in table and ratio is not None and ratio <= 1 else depth
    return found


def expected_tokens(shares: Sequence[float], depth: int) -> float:
    """Tokens a cycle of ``depth`` commits; depths past the shares accept nothing."""
    total = reach = 1.0
    for share in shares[:depth]:
        reach *= share
        total += reach
    return total


def ratio_at(bucket: int, ratios: Mapping[int, float]) -> float | None:
    """The ratio of the smallest measured batch size that fills the bucket; if none does, of the largest."""
    if not ratios:
        return None
    return ratios[min((batch for batch in ratios if batch >= bucket), default=max(ratios))]


def backlog_for(times: Mapping[int, Mapping[int, float]], maximum: int) -> int:
    """Tokens that a row decodes at depth 0 before its drafter catches up, so that this takes at most ``CATCH_UP_SHARE`` of the time.

    Catching up takes about the difference between the shallowest drafting cycle and a plain one.
    """
    shares = [min(table[depth] for depth in table if depth) / table[0] - 1 for table in times.values() if 0 in table and len(table) > 1]
    wanted = max(shares, default=0.0) / CATCH_UP_SHARE
    return min(next((backlog for backlog in BACKLOGS if backlog >= wanted), BACKLOGS[-1]), maximum)

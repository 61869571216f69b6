"""Turns measured ratios into a verdict. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN = 0.03
"""Smallest share that counts as a difference, however steady: two processes of the same code may differ by less."""
FEWEST_STARTS, FEWEST_ROUNDS = 2, 10
"""With fewer, all rounds may be on one side by chance."""
FASTER, SLOWER, SAME, UNEQUAL = "faster", "slower", "no difference beyond the spread", "tokens differ"
TOO_FEW = "too few rounds to call it a difference"


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie, linear between neighbours.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("quantile: expected at least one value, found none")
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class Comparison:
    """One workload on both sides.

    Attributes:
        ratios: time of HEAD over time of BASE: per start of the two processes, a list with a ratio per round.
        equal: whether both sides gave the same tokens in every round.
        minimum: smallest share that counts as a difference.
    """

    ratios: Sequence[Sequence[float]]
    equal: bool = True
    minimum: float = MIN

    @property
    def pooled(self) -> list[float]:
        """The ratios of all starts."""
        return [ratio for start in self.ratios for ratio in start]

    @property
    def median(self) -> float:
        return statistics.median(self.pooled)

    @property
    def p10(self) -> float:
        return quantile(self.pooled, 0.1)

    @property
    def p90(self) -> float:
        return quantile(self.pooled, 0.9)

    @property
    def verdict(self) -> str:
        """``faster`` or ``slower`` only if the spread excludes 1, the difference is at least ``minimum``, and all starts agree."""
        if not self.equal:
            return UNEQUAL
        starts = [statistics.median(start) for start in self.ratios]
        faster = self.p90 < 1 and self.median < 1 - self.minimum and max(starts) < 1 - self.minimum / 2
        slower = self.p10 > 1 and self.median > 1 + self.minimum and min(starts) > 1 + self.minimum / 2
        if not (faster or slower):
            return SAME
        if len(starts) < FEWEST_STARTS or len(self.pooled) < FEWEST_ROUNDS:
            return TOO_FEW
        return FASTER if faster else SLOWER

"""How many tokens a cycle commits: an estimate from the shares of a chain, for shapes that were not measured.

For a chain there is nothing to estimate: with ``c_d`` the share of drafts accepted at depth d given the ones before, a cycle of depth S
commits ``1 + c_1 + c_1 c_2 + ... + c_1 ... c_S`` tokens. A tree offers further candidates in addition to the best one. The model assumes:

* the r-th best sibling is right in a share ``g^(r-1) c_d`` of the cases in which all better ones are wrong, so that one of k siblings
  is right in a share ``1 - (1 - c)(1 - g c)(1 - g^2 c)...`` (``1 - (1-c)^k`` for g = 1);
* a path is right with the product of its shares, whatever the context. A real drafter's probabilities depend on the context, so a real tree
  spends its nodes better than that.

The nodes are those that a tree of that size would have: every level expands the K best paths, and the N - 1 best of all candidates stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import ConfigError
from ...plan.acceptance import ranks_with_noise
from ...shapes import CycleShape

if TYPE_CHECKING:
    from ...config.command_options import LaunchConfig

SIBLING = 0.6
"""g, acceptance of a sibling relative to the next better one. Fitted to the demo drafts' chains and trees; see ``docs/measuring.md``."""
COUPLED_SIBLING = 0.7
"""g where drafts are ranked with the sampler's noise, which moves probable tokens up among the siblings too."""
GUESS = (0.8, 0.75, 0.7, 0.65, 0.65, 0.65, 0.65)
"""Shares of a chain if none were measured: about those of EAGLE-3 with Llama-3.1-8B on MT-bench (vLLM issue 20780: 2.79 tokens per
cycle at S = 3, 3.54 at S = 7). They vary with draft, text and temperature."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of a draft.

    Attributes:
        shares: of drafts accepted at depth 1, 2, ... given the ones before, for the best candidate; deeper ones have the last share.
        measured: tokens per cycle of shapes that were run, which take precedence over the estimate.
    """

    shares: tuple[float, ...] = GUESS
    source: str = "a guess"
    sibling: float = SIBLING
    measured: dict[CycleShape, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.shares or any(not 0 <= share <= 1 for share in self.shares):
            raise ConfigError("plan.acceptance", "at least one share, each from 0 to 1", list(self.shares))

    def length(self, shape: CycleShape) -> float:
        """New tokens per cycle, the bonus token included: measured for this very shape, else estimated."""
        return self.measured[shape] if shape in self.measured else self.estimate(shape)

    def estimate(self, shape: CycleShape) -> float:
        """New tokens per cycle by the model of this module, whether measured or not."""
        return 1.0 + sum(sorted(self._paths(shape), reverse=True)[: shape.num_draft_tokens - 1])

    def share(self, depth: int) -> float:
        """Conditional share of the best candidate at ``depth``, from 1 on."""
        return self.shares[min(depth, len(self.shares)) - 1]

    def ranked(self, depth: int, count: int) -> list[float]:
        """Probability that the best, second best, ... of ``count`` siblings is the right one."""
        left, found = 1.0, []
        for rank in range(count):
            found.append(left * self.share(depth) * self.sibling**rank)
            left -= found[-1]
        return found

    def _paths(self, shape: CycleShape) -> list[float]:
        """Probability of each candidate to be on the accepted path."""
        if shape.num_steps == 0:
            return []
        level = self.ranked(1, shape.topk)
        found = list(level)
        for depth in range(2, shape.num_steps + 1):
            if shape.pool == "paths":
                level = [path * self.share(depth) for path in level]
            else:
                ranked = self.ranked(depth, shape.topk)
                beams = sorted(level, reverse=True)[: shape.topk]
                level = [path * chance for path in beams for chance in ranked]
            found += level
        return found


def conditional(rates: Sequence[float]) -> tuple[float, ...]:
    """Conditional shares from unconditional ones (share of cycles that accept depth 1, 2, ...); a depth that was never accepted has 0."""
    shares, before = [], 1.0
    for rate in rates:
        shares.append(min(1.0, rate / before) if before > 0 else 0.0)
        before = rate
    return tuple(shares)


def usual_sibling(config: LaunchConfig) -> float:
    """The g of a draft whose trees were not measured."""
    coupled = config.sampling.stated_temperature > 0 and ranks_with_noise(config.accept, config.variant)
    return COUPLED_SIBLING if coupled else SIBLING


def fit_sibling(shares: tuple[float, ...], trees: dict[CycleShape, float]) -> float | None:
    """The g whose estimates are closest to the measured trees, by least squares over 0, 0.01, ... 1.5; None without a tree."""
    trees = {shape: length for shape, length in trees.items() if shape.topk > 1}
    if not trees:
        return None

    def squared_error(sibling: float) -> float:
        model = Acceptance(shares, sibling=sibling)
        return sum((model.estimate(shape) / length - 1) ** 2 for shape, length in trees.items())

    return min((step / 100 for step in range(151)), key=squared_error)

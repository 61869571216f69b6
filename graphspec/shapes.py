"""Letters, cycle shapes and graph keys. Standard library only.

Suffixes name dimensions throughout the package (``hidden_BAF`` is ``[B, A, F]``):

======  ==============================================================================
``B``   lanes of the bucket (padded batch)
``R``   persistent rows (requests the engine holds); index ``R`` itself is the dummy row
``S``   ``num_steps``: draft depth
``K``   ``topk``: fan-out of a draft step
``N``   ``num_draft_tokens``: verify nodes, root included
``A``   ``A_max = S_max + 1``: widest accepted run, one per engine
``W``   window slots from the root on, ``max(N, (S-1)*K + 1, A)``
``X``   64-bit ancestor words, ``ceil(W / 64)``
``M``   draft candidates, ``K + (S-1)*K*K``
``T``   query tokens per lane of whatever stage runs
``C``   tokens of a prefill chunk
``H``   hidden size of the model at hand
``F``   feature width fed to the drafter (H, 3H, or none)
``V``   target vocabulary; ``Vd`` draft vocabulary
``P``   page-table columns
``Q``   query heads, ``G`` key/value heads, ``D`` head dimension
======  ==============================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import ConfigError

WORD_BITS = 64
MAX_WINDOW = 128


@dataclass(frozen=True, slots=True, order=True)
class CycleShape:
    """Static shape of one speculative cycle: ``(S, K, N)``.

    ``S == 0`` is plain decoding: no draft, ``N == 1``.

    Raises:
        ConfigError: a number is out of range, or ``N`` can't be reached with ``S`` and ``K``.
    """

    num_steps: int
    topk: int
    num_draft_tokens: int

    def __post_init__(self) -> None:
        if self.num_steps < 0:
            raise ConfigError("num_steps", "an integer >= 0", self.num_steps)
        if self.topk < 1:
            raise ConfigError("topk", "an integer >= 1", self.topk)
        if self.num_draft_tokens < 1:
            raise ConfigError("num_draft_tokens", "an integer >= 1 (the root counts)", self.num_draft_tokens)
        if self.num_draft_tokens - 1 > self.num_candidates:
            most = self.num_candidates + 1
            raise ConfigError(
                "num_draft_tokens",
                f"at most {most} for num_steps={self.num_steps} and topk={self.topk} (1 + topk + (num_steps-1)*topk^2)",
                self.num_draft_tokens,
            )
        if self.is_chain and self.num_draft_tokens != self.num_steps + 1:
            raise ConfigError("num_draft_tokens", f"num_steps + 1 = {self.num_steps + 1} when topk is 1", self.num_draft_tokens)
        if self.window_width > MAX_WINDOW:
            raise ConfigError("num_draft_tokens", f"a window of at most {MAX_WINDOW} slots", f"{self.window_width} slots for {self}")

    @property
    def is_chain(self) -> bool:
        """Nodes already lie in path order, so no tree is built and no KV is moved."""
        return self.topk == 1

    @property
    def num_candidates(self) -> int:
        """M: draft candidates offered to the tree."""
        return 0 if self.num_steps == 0 else self.topk + (self.num_steps - 1) * self.topk**2

    @property
    def accept_width(self) -> int:
        """Most tokens one cycle can commit: ``S + 1``."""
        return self.num_steps + 1

    @property
    def window_width(self) -> int:
        """W: slots from the root on that draft or verify may touch."""
        return max(self.num_draft_tokens, (self.num_steps - 1) * self.topk + 1, self.accept_width)

    @property
    def num_words(self) -> int:
        """X: 64-bit ancestor words a node needs."""
        return math.ceil(self.window_width / WORD_BITS)


PLAIN = CycleShape(0, 1, 1)


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """Everything that distinguishes one captured or compiled cycle from another."""

    bucket: int
    shape: CycleShape
    sampling: bool
    """False: every live row is greedy and no noise is computed at all."""


def pick_bucket(buckets: tuple[int, ...], lanes: int) -> int:
    """Smallest bucket that holds ``lanes``; the one place where a bucket is chosen.

    Raises:
        ConfigError: no bucket is large enough.
    """
    for bucket in buckets:
        if bucket >= lanes:
            return bucket
    raise ConfigError("runtime.buckets", f"a bucket of at least {lanes} lanes", list(buckets))

"""Facts that draft networks of all variants have. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..shapes import CycleShape
from .model import ModelFacts


@dataclass(frozen=True, slots=True)
class DraftPass:
    """One forward pass of a draft network in a cycle."""

    stage: str
    """Name of the stage it belongs to."""
    rows: int
    """Tokens per lane."""
    scored: int
    """Rows per lane that get logits."""
    head: int = 0
    """Which of its prediction heads runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFacts:
    """A draft checkpoint that was checked against its target: what the plan must know of it."""

    path: Path
    decoder: ModelFacts
    """The layers that have KV in the draft pool; RoPE and context are the draft's own, ``vocab_size`` the target's, or less with
    ``begins_vocabulary``."""
    draft_vocab_size: int
    """Vd: columns of its logits."""
    target_hidden_size: int
    feature_size: int = 0
    """F: width of what it reads from the target for each token; 0: it reads tokens only."""
    tap_layers: tuple[int, ...] = ()
    """Ascending i: the feature is the target's residual streams entering layers i, side by side; i may be the number of layers, for the
    stream that leaves the last one, before the final norm. Empty with a feature: the target's hidden state after its final norm."""
    num_heads: int = 1
    """Prediction heads with layers of their own, one per draft step; 1: one network is applied over and over."""

    begins_vocabulary: bool = False
    """Its vocabulary is smaller than the target's and that one's beginning."""

    max_steps: int | None = None
    """Most levels it can draft; None: the shape says."""

    target_layers: tuple[int, ...] = ()
    """By layer of the decoder, the layer of the target whose keys and values it reads; the draft then keeps nothing of a token. Empty: its
    layers have keys and values of their own."""

    attention_inputs: ClassVar[int] = 1
    """Vectors of hidden size that the first layer's attention reads side by side."""
    owns_embedding: ClassVar[bool] = False
    """Its embedding is its own, not the target's."""

    @property
    def owns_head(self) -> bool:
        """Its language-model head is its own, not the target's, as far as its config tells."""
        return self.draft_vocab_size != self.decoder.vocab_size

    @property
    def head_share(self) -> float:
        """The part of the language-model head's weights that the logits of one row read."""
        return 1.0

    @property
    def attends(self) -> bool:
        """Writing a token's draft KV takes attention: not with one layer that attends, whose KV follows from its input."""
        return self.decoder.kv_layers > 1

    def slots(self, shape: CycleShape) -> int:
        """Slots from the root on that a draft pass writes, where these are more than the shape's own."""
        return shape.window_width

    def passes(self, shape: CycleShape) -> tuple[DraftPass, ...]:
        """The passes of one cycle that drafts, in order; scratch and floors are counted from them. A variant with stages of its own says
        here what they run.
        """
        later = DraftPass("static_steps" if shape.pool == "nodes" else "draft_steps", shape.topk, shape.topk)
        return (DraftPass("draft_extend", shape.accept_width, 1), *[later] * (shape.num_steps - 1))

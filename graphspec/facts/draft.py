"""What every draft network has in common, whatever its variant. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .model import ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFacts:
    """A draft checkpoint that was checked against its target: what the plan must know of it."""

    path: Path
    decoder: ModelFacts
    """The layers that have KV in the draft pool; RoPE and context are the draft's own, ``vocab_size`` the target's."""
    draft_vocab_size: int
    """Vd: columns of its logits."""
    target_hidden_size: int
    feature_size: int = 0
    """F: width of what it reads from the target for each token; 0: it reads tokens only."""
    tap_layers: tuple[int, ...] = ()
    """Ascending i: the feature is the target's residual streams entering layers i (``hidden_states[i]`` of transformers), side by side.
    Empty with a feature: the target's hidden state after its final norm."""
    num_heads: int = 1
    """Prediction heads with layers of their own, one per draft step; 1: one network is applied over and over."""

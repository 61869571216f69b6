"""The target network of a checkpoint."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from ..layouts import PREDICTION_HEADS
from .checkpoint import Checkpoint, Progress, fill
from .llama import LlamaModel

if TYPE_CHECKING:
    from ..facts import ModelFacts


def _prediction_heads(checkpoint: Checkpoint, num_layers: int) -> set[str]:
    """Tensors of prediction heads, which are no part of the model: a layer past the last one is such a head if it has an ``eh_proj``."""
    names = checkpoint.names()
    found = {re.fullmatch(r"(model\.layers\.(\d{1,4})\.)eh_proj\.weight", name) for name in names}
    layers = tuple(match[1] for match in found if match and int(match[2]) >= num_layers)
    return {name for name in names if name.startswith((*PREDICTION_HEADS, *layers))}


def load_target(
    facts: ModelFacts,
    tap_layers: tuple[int, ...],
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> LlamaModel:
    """The target of a checkpoint, in ``dtype`` on ``device``. Multi-token-prediction heads in the same files are left unread.

    Args:
        facts: from :func:`graphspec.facts.read_model_facts`.
        tap_layers: layers whose entering residual stream the drafter reads, ascending.
        max_positions: positions the RoPE table covers.
        dtype: of the weights.
        device: of the weights.
        progress: called after each tensor.

    Raises:
        CheckpointError: a file or tensor that is missing, damaged, superfluous or of another shape or dtype.
    """
    layout = facts.family.layout
    checkpoint = Checkpoint(facts.path, layout.renamed)
    with torch.device("meta"):
        model = LlamaModel(facts, tap_layers, max_positions)
    own = [name for name, _ in model.named_parameters()]  # a tied head is no parameter of its own
    ignored = {"lm_head.weight"} if facts.tie_word_embeddings else set()  # some files store the tied copy
    ignored |= _prediction_heads(checkpoint, facts.num_layers)
    fill(model, checkpoint, layout, own, ignored, dtype, torch.device(device), progress)
    if facts.tie_word_embeddings:
        model.lm_head.weight, model.lm_head.stored = model.embed_tokens.weight, model.embed_tokens.stored
    if facts.recurrent is not None:
        model.stacked_convolution()
    return model.to(device).eval()

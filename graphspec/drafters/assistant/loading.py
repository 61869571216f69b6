"""Gemma 4's assistant of a checkpoint, in the layout of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from ...errors import CheckpointError
from ...facts.layouts import GEMMA4_LAYOUT, TensorRule
from ...models.checkpoint import INTEGERS, Checkpoint, Progress, fill
from ...models.target import unread_projections
from .network import AssistantDraft, ClusterHead

if TYPE_CHECKING:
    from torch import Tensor

    from ...models.decoder import Decoder
    from .facts import AssistantFacts

LAYOUT = replace(
    GEMMA4_LAYOUT,
    rules=(
        *(TensorRule(name, (name,)) for name in ("pre_projection.weight", "post_projection.weight")),
        TensorRule("lm_head.centroids.weight", ("masked_embedding.centroids.weight",)),
        *GEMMA4_LAYOUT.rules,
        TensorRule("lm_head.weight", ("model.embed_tokens.weight",)),  # tied, and stored under this name alone
    ),
)
ORDERING = "masked_embedding.token_ordering"
"""int64 ``[V]``: the tokens, cluster by cluster."""


def _read_ordering(checkpoint: Checkpoint, vocab_size: int) -> Tensor:
    """The tokens, cluster by cluster.

    Raises:
        CheckpointError: no such tensor, or not every token once.
    """
    token_V = checkpoint.read(ORDERING, (vocab_size,), INTEGERS).long()
    if not torch.equal(token_V.sort().values, torch.arange(vocab_size)):
        found = f"{len(token_V.unique())} different numbers from {int(token_V.min())} to {int(token_V.max())}"
        raise CheckpointError(checkpoint.key(ORDERING), f"every token from 0 to {vocab_size - 1} once", found)
    return token_V


def load_assistant(
    facts: AssistantFacts,
    target: Decoder,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> AssistantDraft:
    """The assistant of a checkpoint, in ``dtype`` on ``device``. It shares the target's embedding.

    Raises:
        CheckpointError: a tensor that is missing, superfluous, or of another shape or dtype; an order that lacks a token; a damaged file.
    """
    device = torch.device(device)
    checkpoint = Checkpoint(facts.path, LAYOUT.renamed)
    with torch.device("meta"):
        draft = AssistantDraft(facts, target.facts, max_positions, target.embed_tokens)
    own = [name for name, _ in draft.named_parameters() if not name.startswith("embed_tokens.")]
    # Its own embedding is read by nothing but a tied head.
    ignored = {"model.embed_tokens.weight", *unread_projections(facts.decoder)}
    clusters = facts.clusters is not None
    fill(draft, checkpoint, LAYOUT, own, ignored | ({ORDERING} if clusters else set()), dtype, device, progress)
    if clusters:
        head = cast("ClusterHead", draft.lm_head)
        checkpoint.check(ORDERING, (facts.draft_vocab_size,), INTEGERS)
        head.order(head.token_V if device.type == "meta" else _read_ordering(checkpoint, facts.draft_vocab_size))
    draft.rotaries.to(device)  # alone: moving the whole module would move what it shares with the target
    return draft.eval()


def outline(facts: AssistantFacts, target: Decoder) -> AssistantDraft:
    """See :attr:`graphspec.config.catalog.Variant.outline`; it shares the target's embedding."""
    return AssistantDraft(facts, target.facts, 1, target.embed_tokens)

"""EAGLE-1/2 heads of a checkpoint."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...errors import CheckpointError
from ...facts.layouts import Layout, TensorRule, decoder_rules
from ...models.checkpoint import Checkpoint, Progress
from ...models.decoder import Decoder
from ..heads.tensors import TargetVocabulary, fill_head, looks_like, settle, settle_decoder
from .network import EagleDraft

if TYPE_CHECKING:
    from .facts import EagleFacts

_SPECULATORS = (
    ("fusion_fc.", "fc."),
    ("transformer.", "layers.0."),
    ("transformer.input_layernorm.", "hidden_layernorm."),
    ("embedding_layernorm.", "embed_layernorm."),
    ("pre_lm_head_layernorm.", "lm_head_layernorm."),
)
"""The prefixes of speculators before it removed EAGLE-1."""
EAGLE_LAYOUT = Layout(
    rules=(
        *(TensorRule(name, (name,)) for name in ("fc.weight", "fc.bias", "embed_tokens.weight")),
        *(TensorRule(f"{name}.weight", (f"{name}.weight",)) for name in ("embed_layernorm", "lm_head_layernorm")),
        TensorRule("layer.input_layernorm.weight", ("hidden_layernorm.weight",)),
        *decoder_rules("layer.", "layers.0."),
    ),
    ignored=("layers.0.self_attn.rotary_emb.inv_freq",),  # derived from config.json
    renamed=_SPECULATORS,
)
"""EAGLE-1/2 heads, with or without the norms of HASS."""
_MODELOPT = (("layers.0.input_layernorm.", "hidden_layernorm."), ("norm.", "lm_head_layernorm."))
"""Names of two of these norms where ``eagle_config`` has ModelOpt's keys; elsewhere they are those of another kind of checkpoint."""


EAGLE_WRITTEN: dict[str, tuple[tuple[str, str], ...]] = {
    "safeailab": (),
    "hass": (),
    "speculators-old": tuple((re.escape(ours), theirs) for theirs, ours in _SPECULATORS),
}
"""Per layout of EAGLE-1/2 heads: patterns that match the beginning of the names above, and their replacements in its files."""
EAGLE_NORMS = ("embed_layernorm", "hidden_layernorm", "lm_head_layernorm")


def eagle_checkpoint(facts: EagleFacts) -> tuple[Checkpoint, EagleFacts, tuple[str, ...]]:
    """The tensors of a head, its facts with all that the tensors settle, and the norms it has.

    Raises:
        CheckpointError: another kind of checkpoint, or norms that config and tensors disagree on.
    """
    checkpoint = Checkpoint(facts.path, EAGLE_LAYOUT.renamed + (_MODELOPT if facts.layout == "modelopt" else ()))
    foreign = any(name.endswith("hidden_norm.weight") for name in checkpoint.names()) or "d2t" in checkpoint
    if "fc.weight" not in checkpoint or foreign:
        expected = "an EAGLE-1/2 head, with fc.weight and without hidden_norm or d2t"
        found = "another set of tensors" if "fc.weight" in checkpoint else "no such tensor"
        raise CheckpointError(f"{checkpoint.path}: fc.weight", expected, found, f"this looks like {looks_like(checkpoint)}")
    norms = tuple(name for name in EAGLE_NORMS if f"{name}.weight" in checkpoint)
    if facts.layernorms is not None and len(norms) != (len(EAGLE_NORMS) if facts.layernorms else 0):
        wanted = ", ".join(EAGLE_NORMS) if facts.layernorms else "none of them"
        expected = f"{wanted}, as config.json says layernorms = {str(facts.layernorms).lower()}"
        raise CheckpointError(f"{checkpoint.path}: layer norms", expected, ", ".join(norms) or "none")
    fc_bias = settle(checkpoint, "bias", facts.fc_bias, "fc.bias")
    return checkpoint, replace(facts, decoder=settle_decoder(checkpoint, facts.decoder), fc_bias=fc_bias), norms


def load_eagle(
    facts: EagleFacts,
    target: Decoder,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> EagleDraft:
    """The EAGLE-1/2 head of a checkpoint, in ``dtype`` on ``device``, with the target's head and, unless the file has another, embedding.

    Raises:
        CheckpointError: as :func:`load_target`; also another kind of checkpoint, or norms that config and tensors disagree on.
    """
    checkpoint, facts, norms = eagle_checkpoint(facts)
    size = facts.decoder.hidden_size
    checkpoint.check("fc.weight", (size, 2 * size))  # first: its shape distinguishes kinds of heads best
    own_embedding, embedding = False, "embed_tokens.weight"
    if embedding in checkpoint:
        checkpoint.check(embedding, (facts.decoder.vocab_size, size))
        own_embedding = TargetVocabulary(target.facts, device).differs(checkpoint, embedding, "embed_tokens")
    with torch.device("meta"):
        draft = EagleDraft(facts, max_positions, None if own_embedding else target.embed_tokens, target.lm_head, norms)
    shared = {"lm_head.weight", *(() if own_embedding else (embedding,))}
    copies = set() if own_embedding else {embedding}
    fill_head(draft, checkpoint, EAGLE_LAYOUT, shared, dtype, device, progress, copies)
    return draft.eval()

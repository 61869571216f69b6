"""EAGLE-3 heads of a checkpoint."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...facts.layouts import Layout, TensorRule, decoder_rules
from ...models.checkpoint import INTEGERS, Checkpoint, Progress
from ...models.decoder import Decoder
from ...models.layers import set_weight
from ..heads.tensors import fill_head, looks_like, settle, settle_decoder
from .network import Eagle3Draft

if TYPE_CHECKING:
    from collections.abc import Callable

    from .facts import Eagle3Facts

_LOG = logging.getLogger(__name__)
Network = TypeVar("Network", bound=Eagle3Draft)
EAGLE3_LAYOUT = Layout(
    rules=(
        *(TensorRule(name, (name,)) for name in ("fc.weight", "fc.bias", "input_norm.weight", "fc_norm.*.weight")),
        TensorRule("embed_tokens.weight", ("embed_tokens.weight",)),
        *decoder_rules("layers.*.", "layers.*."),
        TensorRule("norm.weight", ("norm.weight",)),
        TensorRule("lm_head.weight", ("lm_head.weight",)),
    ),
    ignored=(
        "layers.*.self_attn.rotary_emb.inv_freq",  # derived from config.json
        "t2d",  # the inverse of d2t: checked against it, then dropped
        "d2t",  # becomes the buffer target_token_Vd
    ),
    renamed=(
        ("midlayer.", "layers.0."),
        ("aux_norm_low.", "fc_norm.0."),
        ("aux_norm_mid.", "fc_norm.1."),
        ("aux_norm_high.", "fc_norm.2."),
    ),
)
"""The first published heads and SpecForge name the layer ``midlayer``; speculators, ModelOpt and vLLM ``layers.0``."""


EAGLE3_WRITTEN: dict[str, tuple[tuple[str, str], ...]] = {
    "safeailab": ((r"layers\.0\.", "midlayer."),),
    "sglang": ((r"layers\.0\.", "midlayer."), (r"layers\.([1-9]\d*)\.input_layernorm\.", r"layers.\1.hidden_norm.")),
    "speculators": (),
    "modelopt": (),
}
"""Per layout of EAGLE-3 heads: patterns that match the beginning of the names above, and their replacements in its files."""


def read_vocab_map(checkpoint: Checkpoint, vocab_size: int, draft_vocab_size: int) -> Tensor | None:
    """Target id of each draft id, or None without a map; ``d2t`` holds offsets: target id = draft id + d2t[draft id].

    Raises:
        CheckpointError: a map that is needed and missing, leaves the vocabulary, holds ids instead of offsets, or disagrees with ``t2d``.
    """
    mask_V = checkpoint.read("t2d", (vocab_size,), ("BOOL", "U8", *INTEGERS)).bool() if "t2d" in checkpoint else None
    if "d2t" not in checkpoint:
        if draft_vocab_size != vocab_size or (mask_V is not None and not mask_V.all()):
            expected = f"{draft_vocab_size} offsets into a vocabulary of {vocab_size}"
            raise CheckpointError(f"{checkpoint.path}: d2t", expected, "no such tensor")
        return None
    offset_Vd = checkpoint.read("d2t", (draft_vocab_size,), INTEGERS).long()
    token_Vd = torch.arange(draft_vocab_size) + offset_Vd

    def is_map(ids_Vd: Tensor) -> bool:
        inside = bool(((ids_Vd >= 0) & (ids_Vd < vocab_size)).all()) and bool((ids_Vd.diff() > 0).all())
        return inside and (mask_V is None or (int(mask_V.sum()) == draft_vocab_size and bool(mask_V[ids_Vd].all())))

    if is_map(token_Vd):
        return token_Vd
    hint = "d2t looks like target ids, not offsets" if is_map(offset_Vd) else ""
    expected = f"offsets: i + d2t[i] strictly ascending in [0, {vocab_size})" + ("" if mask_V is None else ", the ids that t2d marks")
    if bool(((token_Vd >= 0) & (token_Vd < vocab_size)).all()) and bool((token_Vd.diff() > 0).all()) and mask_V is not None:
        found = f"ids that differ from the {int(mask_V.sum())} marked in t2d"
    else:
        found = f"i + d2t[i] from {int(token_Vd.min())} to {int(token_Vd.max())}, {int((token_Vd.diff() <= 0).sum())} steps not ascending"
    raise CheckpointError(checkpoint.key("d2t"), expected, found, hint)


def _settle_norm(checkpoint: Checkpoint, key: str, stated: bool | None, tensor: str) -> bool:
    """Whether the head has an optional norm; without a statement in the config, its tensor decides.

    Raises:
        CheckpointError: the tensor is there although the config denies it: one of the two is damaged.
    """
    there = tensor in checkpoint
    if stated is None and there:
        _LOG.info("%s: config.json has no %s, but %s is in the checkpoint and is applied", checkpoint.path, key, tensor)
    if stated is False and there:
        raise CheckpointError(checkpoint.key(tensor), f"no such tensor, as config.json says {key} = false", "this tensor")
    return bool(there or stated)


def eagle3_checkpoint(facts: Eagle3Facts) -> tuple[Checkpoint, Eagle3Facts]:
    """The tensors of a head, and its facts with all that the tensors settle.

    Raises:
        CheckpointError: another kind of checkpoint, or a norm that config and tensors disagree on.
    """
    # ModelOpt numbers several layers under midlayer. In those after the first, it, SGLang and TensorRT-LLM name the norm before the
    # attention hidden_norm.
    further: list[tuple[str, str]] = []
    for i in range(facts.decoder.num_layers):
        further.append((f"midlayer.{i}.", f"layers.{i}."))
        if i > 0:
            further += [(f"{prefix}.{i}.hidden_norm.", f"layers.{i}.input_layernorm.") for prefix in ("layers", "midlayer")]
    checkpoint = Checkpoint(facts.path, (*EAGLE3_LAYOUT.renamed, *further))
    has_fc = "fc.weight" in checkpoint
    missing = [] if has_fc or not facts.reads_taps else ["fc.weight"]
    missing += [name for name in ("layers.0.hidden_norm.weight",) if name not in checkpoint]
    if missing:
        expected = "an EAGLE-3 head, with fc.weight and layers.0.hidden_norm.weight (or midlayer.)"
        raise CheckpointError(f"{checkpoint.path}: {missing[0]}", expected, "no such tensor", f"this looks like {looks_like(checkpoint)}")
    if not has_fc and facts.feature_size != facts.decoder.hidden_size:
        expected = f"a projection to {facts.decoder.hidden_size} of the target's hidden state of {facts.feature_size}"
        raise CheckpointError(f"{checkpoint.path}: fc.weight", expected, "no such tensor")
    return checkpoint, replace(
        facts,
        decoder=settle_decoder(checkpoint, facts.decoder),
        has_fc=has_fc,
        norm_before_fc=_settle_norm(checkpoint, "norm_before_fc", facts.norm_before_fc, "input_norm.weight"),
        fc_norm=_settle_norm(checkpoint, "fc_norm", facts.fc_norm, "fc_norm.0.weight"),
        fc_bias=settle(checkpoint, "bias", facts.fc_bias, "fc.bias"),
    )


def load_head(
    network: Callable[..., Network], layout: Layout, facts: Eagle3Facts, target: Decoder, max_positions: int, dtype: torch.dtype,
    device: torch.device | str, progress: Progress | None = None,
) -> Network:  # fmt: skip
    """The head of a checkpoint as a ``network``, with the tensor names of ``layout``.

    The embedding is the target's unless the checkpoint has one. Where the checkpoint has no language-model head and the vocabulary is not
    reduced, the head is the embedding with ``tie_word_embeddings``, else the target's.

    Raises:
        CheckpointError: as :func:`load_target`; also another kind of checkpoint, a norm that config and tensors disagree on, or a bad
            vocabulary map (:func:`read_vocab_map`).
    """
    checkpoint, facts = eagle3_checkpoint(facts)
    decoder = facts.decoder
    full_vocabulary = facts.draft_vocab_size == decoder.vocab_size
    same_width = decoder.hidden_size == target.facts.hidden_size
    share_embedding = "embed_tokens.weight" not in checkpoint and same_width
    headless = "lm_head.weight" not in checkpoint and full_vocabulary
    tied = headless and decoder.tie_word_embeddings
    share_head = headless and not tied and same_width
    with torch.device("meta"):
        draft = network(
            facts,
            max_positions,
            embed_tokens=target.embed_tokens if share_embedding else None,
            lm_head=target.lm_head if share_head else None,
        )
    shared = {"embed_tokens.weight"} if share_embedding else set()
    shared |= {"lm_head.weight"} if share_head or tied else set()
    if facts.has_fc:
        checkpoint.check("fc.weight", (decoder.hidden_size, facts.feature_size))  # first: its shape distinguishes kinds of heads best
    token_Vd = read_vocab_map(checkpoint, decoder.vocab_size, facts.draft_vocab_size)
    fill_head(draft, checkpoint, layout, shared, dtype, device, progress)
    if tied:
        set_weight(draft.lm_head, draft.embed_tokens.weight, draft.embed_tokens.stored)
    draft.name_columns(token_Vd, device)
    return draft.eval()


load_eagle3 = partial(load_head, Eagle3Draft, EAGLE3_LAYOUT)
"""The EAGLE-3 head of a checkpoint."""

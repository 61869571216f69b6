"""EAGLE-3 heads of a checkpoint."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from ...errors import CheckpointError
from ...facts.layouts import Layout, TensorRule, decoder_rules
from ...models.checkpoint import Checkpoint, Progress
from ...models.decoder import Decoder
from ...models.vocabulary import set_weight
from .eagle3_network import Eagle3Draft
from .tensors import check_kind, fill_head, read_vocab_map, settle, settle_decoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from .eagle3_facts import Eagle3Facts

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
    needed = ("fc.weight",) * facts.reads_taps + ("layers.0.hidden_norm.weight",)
    check_kind(checkpoint, "an EAGLE-3 head, with fc.weight and layers.0.hidden_norm.weight (or midlayer.)", *needed)
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

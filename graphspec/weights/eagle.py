"""EAGLE heads of a checkpoint."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import CheckpointError, ConfigError
from ..layouts import EAGLE3_LAYOUT, EAGLE_LAYOUT, PREDICTION_HEADS
from ..models.llama import LlamaModel
from ..variants.eagle import EagleDraft
from ..variants.eagle3 import Eagle3Draft
from .checkpoint import INTEGERS, Checkpoint, Progress, fill

if TYPE_CHECKING:
    from ..facts import Eagle3Facts, EagleFacts, ModelFacts

_LOG = logging.getLogger(__name__)
EAGLE_NORMS = ("embed_layernorm", "hidden_layernorm", "lm_head_layernorm")


def looks_like(checkpoint: Checkpoint) -> str:
    """What kind of checkpoint the names of its tensors suggest, for messages."""
    names = checkpoint.names()
    if any("eh_proj." in name or name.startswith(PREDICTION_HEADS) for name in names):
        return "multi-token-prediction heads: variant=mtp"
    if any(name.startswith("mask_") for name in names):
        return "a parallel drafter (P-EAGLE), which is not supported"
    if any(name.endswith("hidden_norm.weight") for name in names) or "d2t" in names:
        return "an EAGLE-3 head: variant=eagle3"
    if "fc.weight" in names:
        return "an EAGLE-1/2 head: variant=eagle"
    if any(name.startswith("model.") for name in names):
        return "a whole language model: variant=standalone"
    return "another kind of checkpoint"


def read_vocab_map(checkpoint: Checkpoint, vocab_size: int, draft_vocab_size: int) -> Tensor | None:
    """Target id of each draft id, or None without a map; ``d2t`` holds offsets: target id = draft id + d2t[draft id].

    Raises:
        CheckpointError: a map that is missing though needed, leaves the vocabulary, holds ids, not offsets, or disagrees with ``t2d``.
    """
    if "d2t" not in checkpoint:
        if draft_vocab_size != vocab_size:
            expected = f"{draft_vocab_size} offsets into a vocabulary of {vocab_size}"
            raise CheckpointError(f"{checkpoint.path}: d2t", expected, "no such tensor")
        return None
    offset_Vd = checkpoint.read("d2t", (draft_vocab_size,), INTEGERS).long()
    token_Vd = torch.arange(draft_vocab_size) + offset_Vd
    mask_V = checkpoint.read("t2d", (vocab_size,), ("BOOL", "U8", *INTEGERS)).bool() if "t2d" in checkpoint else None

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


def _settle(checkpoint: Checkpoint, key: str, stated: bool | None, tensor: str) -> bool:
    """Whether the checkpoint has an optional part. Where config and tensors disagree, the tensors are what was trained."""
    there = tensor in checkpoint
    if stated is not None and stated != there:
        state = "is" if there else "is not"
        _LOG.warning("%s: config.json means %s = %s, but %s %s there; the tensors decide", checkpoint.path, key, stated, tensor, state)
    return there


def _settle_norm(checkpoint: Checkpoint, key: str, stated: bool | None, tensor: str) -> bool:
    """Whether there is an optional norm. A norm that the config denies or that is missing can't be settled: one of the two is damaged."""
    there = tensor in checkpoint
    if stated is None and there:
        _LOG.info("%s: config.json has no %s, but %s is in the checkpoint and is applied", checkpoint.path, key, tensor)
    if stated is False and there:
        raise CheckpointError(checkpoint.key(tensor), f"no such tensor, as config.json says {key} = false", "this tensor")
    return bool(there or stated)


def settle_decoder(checkpoint: Checkpoint, decoder: ModelFacts) -> ModelFacts:
    """Biases and query / key norms as the tensors of the first layer have them, whatever the config says; differences are logged."""
    first = "layers.0."
    return replace(
        decoder,
        attention_bias=_settle(checkpoint, "attention_bias", decoder.attention_bias, f"{first}self_attn.q_proj.bias"),
        output_bias=_settle(checkpoint, "a bias of o_proj", decoder.output_bias, f"{first}self_attn.o_proj.bias"),
        mlp_bias=_settle(checkpoint, "mlp_bias", decoder.mlp_bias, f"{first}mlp.gate_proj.bias"),
        qk_norm=_settle(checkpoint, "query and key norms", decoder.qk_norm, f"{first}self_attn.q_norm.weight"),
    )


def eagle3_checkpoint(facts: Eagle3Facts) -> tuple[Checkpoint, Eagle3Facts]:
    """The tensors of a head, and its facts with everything settled that the config leaves to them.

    Raises:
        CheckpointError: another kind of checkpoint, or a norm that config and tensors disagree on.
    """
    # layers behind the first may call the norm in front of their attention hidden_norm (SGLang, TensorRT-LLM)
    further = tuple((f"layers.{i}.hidden_norm.", f"layers.{i}.input_layernorm.") for i in range(1, facts.decoder.num_layers))
    checkpoint = Checkpoint(facts.path, EAGLE3_LAYOUT.renamed + further)
    missing = [name for name in ("fc.weight", "layers.0.hidden_norm.weight") if name not in checkpoint]
    if missing:
        expected = "an EAGLE-3 head, with fc.weight and layers.0.hidden_norm.weight (or midlayer.)"
        raise CheckpointError(f"{checkpoint.path}: {missing[0]}", expected, "no such tensor", f"this looks like {looks_like(checkpoint)}")
    return checkpoint, replace(
        facts,
        decoder=settle_decoder(checkpoint, facts.decoder),
        norm_before_fc=_settle_norm(checkpoint, "norm_before_fc", facts.norm_before_fc, "input_norm.weight"),
        fc_norm=_settle_norm(checkpoint, "fc_norm", facts.fc_norm, "fc_norm.0.weight"),
        fc_bias=_settle(checkpoint, "bias", facts.fc_bias, "fc.bias"),
    )


def eagle_checkpoint(facts: EagleFacts) -> tuple[Checkpoint, EagleFacts, tuple[str, ...]]:
    """The tensors of a head, its facts with everything settled that the config leaves to them, and the norms it has.

    Raises:
        CheckpointError: another kind of checkpoint, or norms that config and tensors disagree on.
    """
    checkpoint = Checkpoint(facts.path, EAGLE_LAYOUT.renamed)
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
    fc_bias = _settle(checkpoint, "bias", facts.fc_bias, "fc.bias")
    return checkpoint, replace(facts, decoder=settle_decoder(checkpoint, facts.decoder), fc_bias=fc_bias), norms


def _check_sharing(target: LlamaModel, dtype: torch.dtype, device: torch.device | str) -> None:
    theirs, place = target.embed_tokens.weight, torch.empty(0, device=device).device
    if (theirs.dtype, theirs.device) != (dtype, place):
        expected = f"{theirs.dtype} on {theirs.device}, as the target whose tensors are shared"
        raise ConfigError("dtype, device", expected, f"{dtype} on {place}")


def load_eagle(
    facts: EagleFacts,
    target: LlamaModel,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> EagleDraft:
    """The EAGLE-1/2 head of a checkpoint, in ``dtype`` on ``device``, with the target's embedding and head.

    Raises:
        CheckpointError: as :func:`load_target`; also another kind of checkpoint, or norms that config and tensors disagree on.
        ConfigError: ``dtype`` or ``device`` differ from the target's, whose embedding and head it shares.
    """
    checkpoint, facts, norms = eagle_checkpoint(facts)
    _check_sharing(target, dtype, device)
    size = facts.decoder.hidden_size
    checkpoint.read("fc.weight", (size, 2 * size))  # first, for its shape tells another kind of head best
    if "embed_tokens.weight" in checkpoint:
        checkpoint.read("embed_tokens.weight", (facts.decoder.vocab_size, size))
    with torch.device("meta"):
        draft = EagleDraft(facts, max_positions, target.embed_tokens, target.lm_head, norms)
    own = [name for name, _ in draft.named_parameters(remove_duplicate=False) if not name.startswith(("embed_tokens.", "lm_head."))]
    fill(draft, checkpoint, EAGLE_LAYOUT, own, set(), dtype, torch.device(device), progress)
    draft.rotary.to(device)  # not the whole module, which would move what it shares with the target
    return draft.eval()


def load_eagle3(
    facts: Eagle3Facts,
    target: LlamaModel,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> Eagle3Draft:
    """The EAGLE-3 head of a checkpoint, in ``dtype`` on ``device``.

    The embedding is the target's unless the checkpoint has one. A language-model head of a full vocabulary is, when the checkpoint has
    none, the embedding with ``tie_word_embeddings``, else the target's.

    Raises:
        CheckpointError: as :func:`load_target`; also another kind of checkpoint, a norm that config and tensors disagree on, or a
            vocabulary map that is missing, leaves the vocabulary, or holds ids, not offsets.
        ConfigError: ``dtype`` or ``device`` differ from the target's, whose embedding or head it shares.
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
        draft = Eagle3Draft(
            facts,
            max_positions,
            embed_tokens=target.embed_tokens if share_embedding else None,
            lm_head=target.lm_head if share_head else None,
        )
    shared = {"embed_tokens.weight"} if share_embedding else set()
    shared |= {"lm_head.weight"} if share_head or tied else set()
    if share_embedding or share_head:
        _check_sharing(target, dtype, device)
    own = [name for name, _ in draft.named_parameters(remove_duplicate=False) if name not in shared]
    checkpoint.read("fc.weight", (decoder.hidden_size, facts.feature_size))  # first, for its shape tells another kind of head best
    token_Vd = read_vocab_map(checkpoint, decoder.vocab_size, facts.draft_vocab_size)
    fill(draft, checkpoint, EAGLE3_LAYOUT, own, set(), dtype, torch.device(device), progress)
    if tied:
        draft.lm_head.weight, draft.lm_head.stored = draft.embed_tokens.weight, draft.embed_tokens.stored
    # buffers only: moving the whole module would move what it shares with the target
    draft.rotary.to(device)
    if token_Vd is not None and not full_vocabulary:  # a map of the full vocabulary is the identity
        draft.target_token_Vd = token_Vd.to(device)
    return draft.eval()

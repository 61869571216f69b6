"""Reads the keys of a draft's ``config.json`` that several kinds of drafts share. Standard library only."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from ...config.checks import LONG, brief
from ...errors import CheckpointError
from ...facts.families import DEEPSEEK_V3, LLAMA, QWEN3
from ...facts.family import Family
from ...facts.files import plain
from ...facts.keys import MAX_POSITIONS, Keys
from ...facts.layer_kinds import no_window, window_by_layer
from ...facts.model import ModelFacts, read_decoder
from ...facts.multipliers import NO_MULTIPLIERS
from ...facts.quantisation import read_quantisation

_LOG = logging.getLogger(__name__)
_HEAD_DIM, _KV_HEADS = 128, 8
"""Width of a head, and heads of keys and values, of an assumed layer where the target's attention is latent."""
_POSITIONS = 2048
"""``max_position_embeddings`` of transformers' Llama where a config states none."""
_FAMILIES = {family.name: family for family in (LLAMA, QWEN3)}

_OPTIONS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(
        (
            "parallel_drafting", "use_mtp_layernorm", "eh_proj_before_attn", "add_para_norm", "mask_token_id", "mask_token", "mask_hidden",
            "ptd_token_id", "pard_token", "dflash_config", "block_size", "lora_config", "peft_config", "logits_soft_cap",
            "final_logit_softcapping",
        ),
        (False,),
    ),
    "parallel_draft_heads_num_layers": (False, 0, 1),  # ModelOpt's default, of heads that a parallel_draft_step of 1 does without
    **dict.fromkeys(("is_causal", "use_input_layernorm_in_first_layer", "use_last_layernorm", "next_layer_regular"), (True,)),
    **dict.fromkeys(("parallel_draft_step", "logit_scale"), (1, 1.0)),
}  # fmt: skip
"""Published options that change the computation, and the values that don't."""


def refuse_options(*owners: Keys, options: Mapping[str, tuple[object, ...]] = _OPTIONS) -> None:
    """Refuse published options that change the computation and aren't supported.

    Raises:
        CheckpointError: an option of a value other than null and those of ``options``; names the first.
    """
    for keys in owners:
        for option, harmless in options.items():
            value = keys.values.get(option)
            if value is not None and not any(type(value) is type(other) and value == other for other in harmless):
                raise keys.error(option, f"absent, null or {str(harmless[0]).lower()}", "this option is not supported")


def refuse_unknown(keys: Keys, known: Collection[str], *ignored: str) -> None:
    """Refuse keys that are not read, since any may change the computation.

    Raises:
        CheckpointError: a key that is neither in ``known`` nor in ``ignored``, and is not null.
    """
    unknown = sorted(key for key in set(keys.values).difference(known, ignored) if keys.present(key))
    if unknown:
        expected, found = "one of " + ", ".join(sorted(known)), brief(keys.values[unknown[0]], LONG)
        raise CheckpointError(f"{keys.where}: {plain(unknown[0])}", expected, found, "this option is not supported")


def other_draft(keys: Keys, architecture: str) -> str:
    """The kind of checkpoint that a config seems to describe, for messages."""
    architecture = architecture.lower()
    if "assistant" in architecture:
        return "this looks like an assistant of Gemma 4: variant=assistant"
    if "peagle" in architecture:
        return "this looks like a P-EAGLE head: variant=p_eagle"
    if "dflash" in architecture or keys.present("dflash_config"):
        return "this looks like a block drafter: variant=dflash"
    if "eagle3" in architecture or keys.present("draft_vocab_size") or keys.present("eagle_config"):
        return "this looks like an EAGLE-3 head: variant=eagle3"
    if "eagle" in architecture:
        return "this looks like an EAGLE-1/2 head: variant=eagle"
    if "nextn" in architecture or "mtp" in architecture or keys.present("num_nextn_predict_layers"):
        return "this looks like a model with multi-token-prediction heads: variant=mtp"
    return "this looks like a whole language model: variant=standalone"


def nested_keys(keys: Keys, name: str) -> Keys:
    """The object under ``name``; empty if it is absent or null.

    Raises:
        CheckpointError: it is something else.
    """
    values = keys.values.get(name)
    if values is not None and not isinstance(values, dict):
        raise keys.error(name, "an object")
    return Keys(dict(values or {}), f"{keys.where}: {name}")


def check_speculator(keys: Keys, kind: str) -> None:
    """Check that a config in the layout of speculators is of that kind.

    Raises:
        CheckpointError: it is of another kind.
    """
    if keys.values.get("speculators_model_type") != kind:
        raise keys.error("speculators_model_type", repr(kind), "another kind of draft belongs to another variant, or is not supported")


def speculators_keys(keys: Keys, kind: str) -> tuple[Keys, Family]:
    """The nested layer configuration of a config in the layout of speculators, and the family of its layers.

    Raises:
        CheckpointError: another kind of speculator than ``kind``, no layer configuration, or layers of another family.
    """
    check_speculator(keys, kind)
    if not keys.present("transformer_layer_config"):
        raise keys.error("transformer_layer_config", "an object")
    layer = nested_keys(keys, "transformer_layer_config")
    kind_of_layer = layer.values.get("model_type", "llama")
    if not isinstance(kind_of_layer, str) or kind_of_layer not in _FAMILIES:
        raise layer.error("model_type", "one of " + ", ".join(_FAMILIES))
    return layer, _FAMILIES[kind_of_layer]


def _windows(keys: Keys, num_layers: int) -> tuple[int | None, ...]:
    """Sliding windows of a head's layers: those that ``layer_types`` marks, whatever ``use_sliding_window`` says; without such layers as
    in a whole model.
    """
    kinds = keys.values.get("layer_types")
    if isinstance(kinds, list) and "sliding_attention" in kinds:
        keys = Keys({**keys.values, "use_sliding_window": True}, keys.where)
    return window_by_layer(keys, num_layers)


def head_family(keys: Keys, architecture: str) -> Family:
    """The family of a head's layers by the name of its architecture: latent attention in DeepSeek's, keys and values in all others."""
    return DEEPSEEK_V3 if "deepseek" in architecture.lower() and keys.present("kv_lora_rank") else LLAMA


def head_decoder(keys: Keys, path: Path, architecture: str, family: Family = LLAMA) -> ModelFacts:
    """Facts of a draft's decoder layers from its config; its tensors settle biases and query / key norms (:func:`settle_decoder`).

    A head differs from a whole model: it may have one layer without saying so, any layer may have a sliding window, any part of a head may
    be rotated, no MLP is a mixture, and a context that is not stated does not limit it.

    Raises:
        CheckpointError: as :func:`graphspec.facts.model.read_decoder`.
    """
    latent = family.latent is not None
    family = replace(family, window=no_window if latent else _windows, partial_rotary=None if latent else 1.0, experts=None)
    if not keys.present("num_hidden_layers"):
        keys = Keys({**keys.values, "num_hidden_layers": 1}, keys.where)
    stated = keys.present("max_position_embeddings")
    if not stated:
        # Scaled RoPE may derive its parameters from it.
        keys = Keys({**keys.values, "max_position_embeddings": _POSITIONS}, keys.where)
        log_default(keys, "max_position_embeddings", "no limit", "a head drafts wherever its target has positions")
    read_quantisation(path)
    decoder = read_decoder(keys, path, architecture, family).rotated_alike(keys.where)
    if decoder.latent is not None:
        decoder = replace(decoder, latent=replace(decoder.latent, norm_eps=decoder.rms_norm_eps))
    return decoder if stated else replace(decoder, max_position_embeddings=MAX_POSITIONS)


def check_vocabulary(keys: Keys, decoder: ModelFacts, target: ModelFacts) -> None:
    """Check that head and target have vocabularies of one size.

    Raises:
        CheckpointError: they don't.
    """
    if decoder.vocab_size != target.vocab_size:
        raise keys.error("vocab_size", f"{target.vocab_size}, as in {target.path}", "head and target must share one vocabulary")


def log_default(keys: Keys, key: str, value: object, reason: str, level: int = logging.INFO) -> None:
    """Log the value that an absent key is taken to have."""
    _LOG.log(level, "%s: %s is absent and taken as %s: %s", keys.where, key, value, reason)


def one_layer(target: ModelFacts) -> ModelFacts:
    """A plain Llama layer of the target's width. Where the target's attention is latent, it has heads of 128, eight of keys and values."""
    heads, kv_heads, width = target.num_heads, target.num_kv_heads, target.head_dim
    if target.latent is not None:
        even = target.hidden_size % _HEAD_DIM == 0 and (target.hidden_size // _HEAD_DIM) % _KV_HEADS == 0
        heads = target.hidden_size // _HEAD_DIM if even else target.num_heads
        kv_heads, width = _KV_HEADS if even else heads, target.hidden_size // heads
    return replace(
        target, architecture="LlamaForCausalLM", family=LLAMA, num_layers=1, sliding_window=(None,), latent=None, experts=None,
        recurrent=None, mixers=None, multipliers=NO_MULTIPLIERS, qk_norm=False, attention_bias=False, output_bias=False, mlp_bias=False,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=width, layer_rope=(), layer_heads=(), kv_sources=(), shared_mlp_factor=1,
        layer_inputs=None,
    )  # fmt: skip

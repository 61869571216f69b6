"""EAGLE-3 heads, and P-EAGLE heads, from layout to layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...facts import ModelFacts
from ...facts.keys import read_config
from ..heads.eagle3_facts import DEFAULT_TAPS, TAP_KEY, Eagle3Facts, default_taps, eagle3_config
from ..heads.eagle3_loading import EAGLE3_WRITTEN, eagle3_checkpoint
from ..p_eagle.facts import PEagleFacts, p_eagle_config
from .head import Head, Kind, decoder_config, decoder_needs, refuse, speculators

_EXPRESSES: dict[str, set[str]] = {
    "safeailab": {"target_hidden_size", "embed_tokens"},
    "sglang": {
        "target_hidden_size", "embed_tokens", "num_hidden_layers", "norm_before_fc", "fc_norm", "norm_output", "fc bias", "no lm_head",
        "no taps", TAP_KEY,
    },
    "speculators": {
        "target_hidden_size", "embed_tokens", "num_hidden_layers", "norm_before_fc", "fc_norm", "norm_output", "norm_before_residual",
        "no lm_head", TAP_KEY, "attention_bias", "mlp_bias", "query and key norms", "sliding_window",
    },
    "modelopt": {"num_hidden_layers", "no lm_head", "no taps", TAP_KEY, "attention_bias", "mlp_bias"},
}  # fmt: skip


def _write(head: Head, layout: str, target: ModelFacts | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    facts, tensors = head.facts, dict(head.tensors)
    assert isinstance(facts, Eagle3Facts)
    decoder, taps = facts.decoder, facts.tap_layers
    if taps and layout == "safeailab" and target is not None and taps == default_taps(target.num_layers):
        taps = ()
    elif taps and layout == "safeailab":
        expected = "the default layers, the only ones that this layout can express"
        raise CheckpointError(f"{facts.path}: {TAP_KEY}", expected, f"layers {taps}", "target=FOLDER decides whether they are the default")
    own_head = "lm_head.weight" in tensors
    needs = {
        "num_hidden_layers": decoder.num_layers > 1,
        "target_hidden_size": facts.target_hidden_size != decoder.hidden_size,
        "norm_before_residual": facts.norm_before_residual,
        "norm_before_fc": bool(facts.norm_before_fc),
        "fc_norm": bool(facts.fc_norm),
        "norm_output": facts.norm_output,
        "fc bias": bool(facts.fc_bias),
        "no lm_head": not own_head,
        "embed_tokens": "embed_tokens.weight" in tensors,
        "no taps": not facts.reads_taps,
        TAP_KEY: bool(taps),
    }
    refuse(facts.path, layout, _EXPRESSES[layout], needs | decoder_needs(decoder))
    if layout == "modelopt":
        tensors.pop("t2d", None)
    elif "d2t" in tensors and "t2d" not in tensors:
        tensors["t2d"] = torch.zeros(decoder.vocab_size, dtype=torch.bool)
        tensors["t2d"][tensors["d2t"] + torch.arange(facts.draft_vocab_size)] = True
    config = decoder_config(head.config, decoder)
    sizes: dict[str, Any] = {"draft_vocab_size": facts.draft_vocab_size}
    if needs["target_hidden_size"]:
        sizes["target_hidden_size"] = facts.target_hidden_size
    outputs = [i - 1 for i in taps] or None  # ids of the layers whose output is tapped
    if layout == "safeailab":
        return config | sizes | {"architectures": ["LlamaForCausalLM"]}, tensors
    if layout == "speculators":
        flags = {key: bool(getattr(facts, key)) for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
        outer = speculators("eagle3", "Eagle3Speculator", target) | sizes | flags | {TAP_KEY: list(taps) or None}
        return outer | {"transformer_layer_config": config}, tensors
    flat = config | sizes | {"architectures": ["LlamaForCausalLMEagle3"]}
    if layout == "modelopt":
        eagle: dict[str, Any] = {
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": None,
        }
    else:
        eagle = {"norm_before_fc": True} if facts.norm_before_fc else {}
        flat |= {"fc_norm": bool(facts.fc_norm), "norm_output": facts.norm_output, "bias": bool(facts.fc_bias)}
        flat |= {"num_aux_hidden_states": len(taps) or DEFAULT_TAPS} if facts.reads_taps else {}
        if not own_head and not decoder.tie_word_embeddings:
            flat["draft_vocab_size"] = None  # the head is the target's
    return flat | {"eagle_config": {TAP_KEY: outputs, "use_aux_hidden_state": facts.reads_taps} | eagle}, tensors


def _write_masked(head: Head, layout: str, target: ModelFacts | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    assert isinstance(head.facts, PEagleFacts)
    config, tensors = _write(head, layout, target)
    config |= {"architectures": ["PeagleLlamaForCausalLM"], "mask_token_id": head.facts.mask_token_id}
    if layout == "speculators":
        config |= speculators("peagle", "PEagleDraftModel", target)
    return config, tensors


EAGLE3 = Kind("EAGLE-3 head", EAGLE3_WRITTEN, lambda path, _: eagle3_config(path, read_config(path)), eagle3_checkpoint, _write)
_MASKED = {name: EAGLE3_WRITTEN[name] for name in ("sglang", "speculators")}
P_EAGLE = Kind("P-EAGLE head", _MASKED, lambda path, _: p_eagle_config(path, read_config(path)), eagle3_checkpoint, _write_masked)

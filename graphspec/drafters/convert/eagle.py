"""EAGLE-1/2 heads from layout to layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ...facts import DraftFacts, ModelFacts
from ..eagle.facts import EagleFacts, read_eagle_config
from ..eagle.loading import EAGLE_NORMS, EAGLE_WRITTEN, eagle_checkpoint
from .head import Head, Kind, decoder_config, decoder_needs, plain_meaning, refuse, speculators

_EXPRESSES: dict[str, set[str]] = {
    "safeailab": {"q, k, v biases"},
    "hass": {"q, k, v biases", "layer norms"},
    "speculators-old": {"all three layer norms", "attention_bias", "mlp_bias"},
}


def _read(path: Path, target: ModelFacts | None) -> Head:
    del target
    facts, keys = read_eagle_config(path)
    checkpoint, facts, _ = eagle_checkpoint(facts)
    return Head(facts, keys.values, {name: checkpoint.raw(name) for name in checkpoint.names()})


def _meaning(head: Head) -> DraftFacts:
    """See :class:`Kind`; the tensors say which norms the head has."""
    assert isinstance(head.facts, EagleFacts)
    return plain_meaning(replace(head.facts, layout="", layernorms=None))


def _write(head: Head, layout: str, target: ModelFacts | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    facts, tensors = head.facts, dict(head.tensors)
    assert isinstance(facts, EagleFacts)
    decoder, norms = facts.decoder, [name for name in EAGLE_NORMS if f"{name}.weight" in head.tensors]
    can = _EXPRESSES[layout]
    together = len(norms) == len(EAGLE_NORMS) and "layer norms" not in can
    needs = {"all three layer norms": together, "layer norms": bool(norms) and not together}
    refuse(facts.path, layout, can, needs | decoder_needs(decoder))
    config = decoder_config(head.config, decoder)
    if layout == "speculators-old":
        tensors.pop("embed_tokens.weight", None)  # the target's copy, which this layout never stores
        outer = speculators("eagle", "EagleSpeculator", target)
        outer |= {"transformer_layer_architecture": "LlamaDecoderLayer", "layernorms": bool(norms), "fusion_bias": bool(facts.fc_bias)}
        return outer | {"transformer_layer_config": config}, tensors
    architecture = "Qwen2ForCausalLMEagle" if decoder.attention_bias else "LlamaForCausalLM"
    return config | {"architectures": [architecture], "bias": bool(facts.fc_bias)}, tensors


EAGLE = Kind("EAGLE-1/2 head", EAGLE_WRITTEN, _read, _write, _meaning)

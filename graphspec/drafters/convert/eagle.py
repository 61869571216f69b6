"""EAGLE-1/2 heads from layout to layout."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...facts import ModelFacts
from ...models.checkpoint import Checkpoint
from ..eagle.facts import EagleFacts, read_eagle_config
from ..eagle.loading import EAGLE_LAYOUT, EAGLE_NORMS, EAGLE_WRITTEN, eagle_checkpoint
from ..heads.tensors import TargetVocabulary
from .head import Head, Kind, decoder_config, decoder_needs, refuse, speculators

_EXPRESSES: dict[str, set[str]] = {
    "safeailab": {"q, k, v biases"},
    "hass": {"q, k, v biases", "layer norms"},
    "speculators-old": {"all three layer norms", "attention_bias", "mlp_bias"},
}


def _has_own_embedding(head: Head, target: ModelFacts | None) -> bool:
    """Whether the file has an embedding that is not known to be the target's."""
    if (name := "embed_tokens.weight") not in head.tensors:
        return False
    if target is None or not Checkpoint.is_there(target.path):
        return True
    checkpoint = Checkpoint(head.facts.path, EAGLE_LAYOUT.renamed)
    return TargetVocabulary(target, "meta").differs(checkpoint, name, "embed_tokens")


def _write(head: Head, layout: str, target: ModelFacts | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    facts, tensors = head.facts, dict(head.tensors)
    assert isinstance(facts, EagleFacts)
    decoder, norms = facts.decoder, [name for name in EAGLE_NORMS if f"{name}.weight" in head.tensors]
    can = _EXPRESSES[layout]
    together = len(norms) == len(EAGLE_NORMS) and "layer norms" not in can
    needs = {"all three layer norms": together, "layer norms": bool(norms) and not together}
    if layout == "speculators-old":  # it stores none
        needs["an embedding that is not known to be the target's (target=)"] = _has_own_embedding(head, target)
    refuse(facts.path, layout, can, needs | decoder_needs(decoder))
    config = decoder_config(head.config, decoder)
    if layout == "speculators-old":
        tensors.pop("embed_tokens.weight", None)
        outer = speculators("eagle", "EagleSpeculator", target)
        outer |= {"transformer_layer_architecture": "LlamaDecoderLayer", "layernorms": bool(norms), "fusion_bias": bool(facts.fc_bias)}
        return outer | {"transformer_layer_config": config}, tensors
    architecture = "Qwen2ForCausalLMEagle" if decoder.attention_bias else "LlamaForCausalLM"
    return config | {"architectures": [architecture], "bias": bool(facts.fc_bias)}, tensors


EAGLE = Kind("EAGLE-1/2 head", EAGLE_WRITTEN, lambda path, _: read_eagle_config(path), lambda facts: eagle_checkpoint(facts)[:2], _write)

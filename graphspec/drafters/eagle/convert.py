"""The layouts of EAGLE-1/2 heads."""

from __future__ import annotations

import re
from typing import Any

from ...facts import ModelFacts
from ...models.checkpoint import Checkpoint
from ..heads.tensors import TargetVocabulary
from ..heads.written import Fact, Head, Kind, Written, speculator
from .facts import EagleFacts, read_eagle_config
from .loading import EAGLE_LAYOUT, EAGLE_NORMS, eagle_checkpoint

_EMBEDDING = "embed_tokens.weight"
_FLAT = {"architectures": Fact("architectures"), "bias": Fact("fc_bias")}
_LAYOUTS = {
    "safeailab": Written({"q, k, v biases"}, _FLAT),
    "hass": Written({"q, k, v biases", "layer norms"}, _FLAT),
    "speculators-old": Written(
        {"all three layer norms", "attention_bias", "mlp_bias"},
        {
            **speculator("eagle", "EagleSpeculator"), "transformer_layer_architecture": "LlamaDecoderLayer", "layernorms": Fact("normed"),
            "fusion_bias": Fact("fc_bias"), "transformer_layer_config": Fact("layers"),
        },
        renamed=tuple((re.escape(ours), theirs) for theirs, ours in EAGLE_LAYOUT.renamed),
        dropped=(_EMBEDDING,),
    ),
}  # fmt: skip


def _has_own_embedding(head: Head, target: ModelFacts | None) -> bool:
    """Whether the file has an embedding that is not known to be the target's."""
    if _EMBEDDING not in head.tensors:
        return False
    if target is None or not Checkpoint.is_there(target.path):
        return True
    checkpoint = Checkpoint(head.facts.path, EAGLE_LAYOUT.renamed)
    return TargetVocabulary(target, "meta").differs(checkpoint, _EMBEDDING, "embed_tokens")


def _describe(head: Head, layout: str, target: ModelFacts | None) -> tuple[dict[str, bool], dict[str, Any]]:
    assert isinstance(head.facts, EagleFacts)
    row, norms = _LAYOUTS[layout], [name for name in EAGLE_NORMS if f"{name}.weight" in head.tensors]
    together = len(norms) == len(EAGLE_NORMS) and "layer norms" not in row.expresses
    needs = {
        "all three layer norms": together,
        "layer norms": bool(norms) and not together,
        "an embedding that is not known to be the target's (target=)": _EMBEDDING in row.dropped and _has_own_embedding(head, target),
    }
    architecture = "Qwen2ForCausalLMEagle" if head.facts.decoder.attention_bias else "LlamaForCausalLM"
    return needs, {"normed": bool(norms), "architectures": [architecture]}


EAGLE = Kind(
    name="EAGLE-1/2 head",
    marks=(r"fc\.weight|fusion_fc\.weight",),
    lacks=(r"(.+\.)?hidden_norm\.weight", "mask_hidden"),
    layouts=_LAYOUTS,
    config=lambda path, _: read_eagle_config(path),
    checkpoint=lambda facts: eagle_checkpoint(facts)[:2],
    describe=_describe,
)

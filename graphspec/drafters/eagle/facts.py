"""EAGLE-1/2 heads: what their ``config.json`` says, checked against the target. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...facts.draft import DraftFacts
from ...facts.families import LLAMA, find_family
from ...facts.keys import Keys, read_architecture, read_config
from ...facts.model import ModelFacts
from ..heads.config import check_vocabulary, head_decoder, nested_keys, one_layer, other_draft, refuse_options, speculators_keys

_PLAIN = ("llama", "qwen2", "mistral")
_NORMS = ("use_input_layernorm_in_first_layer", "use_last_layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleFacts(DraftFacts):
    """An EAGLE-1/2 head (arXiv 2401.15077, 2406.16858) that was checked against its target."""

    layout: str = "safeailab"
    """The checkpoint's tensor names and config keys: safeailab, speculators-old or modelopt."""
    fc_bias: bool | None = None
    """What the config states, None if it states nothing; the tensors decide."""
    layernorms: bool | None = None
    """Likewise: norms after the embedding, before the attention and before the head (HASS)."""


def read_eagle_config(path: str | Path) -> tuple[EagleFacts, Keys]:
    """Facts of a head from its config alone, and the keys of its decoder layer.

    Raises:
        CheckpointError: as :func:`read_eagle_facts`, except for what concerns the target.
    """
    path = Path(path)
    keys = read_config(path)
    expected = "an EAGLE-1/2 head (LlamaForCausalLMEagle, Qwen2ForCausalLMEagle, or LlamaForCausalLM with one layer)"
    eagle = nested_keys(keys, "eagle_config")
    # ModelOpt says there which norms a head has; the tensors do, too.
    refuse_options(keys, Keys({key: value for key, value in eagle.values.items() if key not in _NORMS}, eagle.where))
    if keys.present("speculators_model_type"):
        layer, family = speculators_keys(keys, "eagle")
        refuse_options(layer)
        style = keys.values.get("transformer_layer_architecture", "LlamaDecoderLayer")
        if style != "LlamaDecoderLayer":
            raise keys.error("transformer_layer_architecture", "LlamaDecoderLayer")
        layout, architecture, decoder_keys = "speculators-old", "EagleSpeculator", layer
        layernorms: bool | None = keys.flag("layernorms", False)
        fc_bias: bool | None = keys.flag("fusion_bias", False)
    else:
        architecture = read_architecture(keys, expected)
        like = find_family(architecture)
        plain = (
            like is not None
            and like.name in _PLAIN
            and not keys.present("draft_vocab_size")
            and keys.values.get("num_hidden_layers", 1) == 1
        )
        if not plain and not ("eagle" in architecture.lower() and "eagle3" not in architecture.lower()):
            raise keys.error("architectures", expected, other_draft(keys, architecture))
        if keys.present("draft_vocab_size") and keys.values["draft_vocab_size"] != keys.values.get("vocab_size"):
            raise keys.error("draft_vocab_size", "no such key, or vocab_size", other_draft(keys, architecture))
        layout, family, decoder_keys, layernorms = "modelopt" if any(map(eagle.present, _NORMS)) else "safeailab", LLAMA, keys, None
        fc_bias = keys.flag("bias", True) if keys.present("bias") else None
    decoder = head_decoder(decoder_keys, path, architecture, family)
    if decoder.num_layers != 1:
        raise decoder_keys.error("num_hidden_layers", "1", "a head with more layers has another layout")
    facts = EagleFacts(
        path=path,
        decoder=decoder,
        draft_vocab_size=decoder.vocab_size,
        target_hidden_size=decoder.hidden_size,
        feature_size=decoder.hidden_size,
        layout=layout,
        fc_bias=fc_bias,
        layernorms=layernorms,
    )
    return facts, decoder_keys


def read_eagle_facts(path: str | Path, target: ModelFacts) -> EagleFacts:
    """Facts of an EAGLE-1/2 head, checked against the target it drafts for.

    The architecture of a head has "Eagle" in its name, or is that of a plain model with one layer; its tensors then show that it is a head.
    RoPE parameters come from the head's config only. For a reduced vocabulary see :func:`graphspec.models.token_map.load_token_map`.

    Raises:
        CheckpointError: as :func:`read_model_facts`; also another kind of draft, hidden size or vocabulary than the target's, or an option
            that isn't supported.
    """
    facts, keys = read_eagle_config(path)
    check_vocabulary(keys, facts.decoder, target)
    if facts.decoder.hidden_size != target.hidden_size:
        hint = "an EAGLE-1/2 head reads the target's hidden state and shares its embedding and head"
        raise keys.error("hidden_size", f"{target.hidden_size}, as in {target.path}", hint)
    return facts


def assumed_facts(folder: Path, target: ModelFacts) -> tuple[EagleFacts, str]:
    """See :attr:`graphspec.config.catalog.Variant.assumed`."""
    facts = EagleFacts(
        path=folder,
        decoder=one_layer(target),
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        feature_size=target.hidden_size,
    )
    return facts, "one layer, the target's embedding and head"

"""Facts of a target in memory, and the keys of a decoder's ``config.json`` in a form that old and new readers accept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import ConfigError
from ..facts.families import find_family
from ..facts.keys import Keys
from ..facts.model import ModelFacts, read_decoder

RECURRENT = "linear_attention"
"""Name of a gated delta net in ``layer_types``."""
STEADY_ROPE = ("default", "linear", "llama3", "yarn")
"""RoPE types whose angles don't depend on the length of the text."""
_HYBRID_KEYS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias", "initializer_range", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "layer_types", "linear_conv_kernel_dim", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim", "rope_parameters",
)  # fmt: skip


def is_hybrid(config: PreTrainedConfig) -> bool:
    """Whether some layers are recurrent."""
    return RECURRENT in (getattr(config, "layer_types", None) or ())


def tapped_layers(named: Sequence[int] | None, default: Sequence[int], depth: int) -> tuple[int, ...]:
    """The layers of a target of ``depth`` whose inputs a draft reads: those of its settings, else ``default``.

    Raises:
        ConfigError: layers that the target doesn't have, which the default may be in a shallow one.
    """
    taps = tuple(named or default)
    if list(taps) != sorted(set(taps)) or not all(1 <= layer < depth for layer in taps):
        wanted = "" if named else f", named: the default of a target of {depth} layers collides"
        raise ConfigError("train.network.tap_layers", f"layers in 1..{depth - 1}{wanted}", list(taps))
    return taps


def target_facts(model: PreTrainedModel) -> ModelFacts:
    """Facts of a target that transformers has loaded.

    Raises:
        CheckpointError: an option that drafts are not trained for.
        ConfigError: RoPE whose angles depend on the length of the text.
    """
    architecture = type(model).__name__
    family = find_family(architecture)
    assert family is not None, "a target that was loaded"
    kind = model.model.rotary_emb.rope_type
    if kind not in STEADY_ROPE:
        raise ConfigError("model.path: rope_type", "one of " + ", ".join(STEADY_ROPE), kind)
    return read_decoder(Keys(model.config.to_dict(), "model.path"), Path(), architecture, family)


def decoder_facts(model: PreTrainedModel) -> dict[str, object]:
    """The decoder keys of ``model``, with RoPE as ``rope_theta`` and ``rope_scaling`` unless it has recurrent layers."""
    if is_hybrid(model.config):
        return {**{key: getattr(model.config, key) for key in _HYBRID_KEYS}, "attn_output_gate": True, "torch_dtype": "bfloat16"}
    config, layer = model.config, model.model.layers[0]
    rope = dict(config.rope_parameters)
    theta = float(rope.pop("rope_theta"))
    facts: dict[str, object] = {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": layer.self_attn.q_proj.out_features // config.num_attention_heads,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": layer.self_attn.q_proj.bias is not None,
        "mlp_bias": layer.mlp.gate_proj.bias is not None,
        "vocab_size": config.vocab_size,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "initializer_range": config.initializer_range,
        "torch_dtype": "bfloat16",
    }
    if hasattr(config, "sliding_window"):
        # Draft networks see their whole prefix; without this key, a family with sliding windows would use its default.
        facts["sliding_window"] = None
    return facts


def sized(decoder: ModelFacts, intermediate_size: int | None, layers: int = 1) -> ModelFacts:
    """Facts of this many layers, with MLPs of this width (None: as wide as they are). Every layer sees its whole prefix."""
    width = intermediate_size or decoder.intermediate_size
    return replace(decoder, intermediate_size=width, num_layers=layers, sliding_window=(None,) * layers)


def width_of(decoder: ModelFacts, target: ModelFacts) -> int | None:
    """The width that :func:`sized` takes for MLPs like these; None: the target's."""
    return None if decoder.intermediate_size == target.intermediate_size else decoder.intermediate_size


def plain_facts(target: PreTrainedModel, architecture: str, decoder: ModelFacts, **more: object) -> dict[str, object]:
    """``config.json`` of a draft of plain layers in the target's width: its sizes, no biases, and ``more``."""
    return decoder_facts(target) | {
        "architectures": [architecture],
        "model_type": "qwen3" if decoder.qk_norm else "llama",
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_layers,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **more,
    }

"""Hybrid targets in training: Qwen3.5's gated delta nets (Yang et al. 2024, arXiv 2412.06464), and gated attention in some layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedConfig, PreTrainedModel

if TYPE_CHECKING:
    from transformers.cache_utils import LinearAttentionLayer

    from ..config.train_options import TargetConfig

RECURRENT = "linear_attention"
"""Name of a gated delta net in ``layer_types``."""
ROTATED = 0.25
"""Share of an attention head that is rotated."""
_KEYS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias", "initializer_range", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "layer_types", "linear_conv_kernel_dim", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim", "rope_parameters",
)  # fmt: skip


def is_hybrid(config: PreTrainedConfig) -> bool:
    """Whether some layers are recurrent."""
    return RECURRENT in (getattr(config, "layer_types", None) or ())


def build_hybrid(config: TargetConfig) -> PreTrainedModel:
    """A new Qwen3.5 language model with dense MLPs, of transformers' class."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    every = config.full_attention_interval
    kinds = ["full_attention" if (layer + 1) % every == 0 else RECURRENT for layer in range(config.num_hidden_layers)]
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            layer_types=kinds,
            linear_num_key_heads=config.linear_num_key_heads,
            linear_num_value_heads=config.linear_num_value_heads,
            linear_key_head_dim=config.linear_key_head_dim,
            linear_value_head_dim=config.linear_value_head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": ROTATED},
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=True,
        )
    )


def hybrid_facts(model: PreTrainedModel) -> dict[str, object]:
    """The keys of a hybrid's ``config.json``, as published for Qwen3.5."""
    return {**{key: getattr(model.config, key) for key in _KEYS}, "attn_output_gate": True, "torch_dtype": "bfloat16"}


def recurrent_cache_layer() -> LinearAttentionLayer:
    """An empty cache layer of a gated delta net."""
    from transformers.cache_utils import LinearAttentionLayer

    return LinearAttentionLayer()

"""Small random hybrid targets, written by transformers, and prediction heads for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

from tests.support.checkpoints import VOCAB_SIZE

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN, LAYERS = 48, 4
EOS = VOCAB_SIZE - 1
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": {},
    "qwen3_next": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20},
}


def build_hybrid(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random transformers model: three gated delta nets of 2 key and 4 value heads, then gated attention of 3 heads over one."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "max_position_embeddings": 96,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        **FAMILIES[family],
        **overrides,
    }
    name = {"qwen3_5": "Qwen3_5Text", "qwen3_next": "Qwen3Next"}[family]
    config = getattr(transformers, f"{name}Config")(**values)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_drawn(key, noise))
    return model


def _drawn(name: str, noise: Tensor) -> Tensor:
    """Values at which leaving something out shows: decays of many lengths, weights of norms around their neutral value."""
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.2 * noise
    if "norm" in name:  # stored minus 1
        return 0.2 * noise
    if name.endswith(("A_log", "dt_bias")):
        return noise - 1
    return (0.6 if "conv1d" in name else 0.3 if "gate.weight" in name else 0.15) * noise

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
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
_DELTA = {
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
}
_NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "intermediate_size": 40,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 16,
    "layer_norm_epsilon": 1e-6,
}
_GRANITE = {
    "num_hidden_layers": LAYERS,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 0,
    "intermediate_size": 12,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 4,
    "mamba_d_head": 24,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
    "rms_norm_eps": 1e-6,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.5,
}
_BAMBA = {key: value for key, value in _GRANITE.items() if key.startswith("mamba") or key in ("num_hidden_layers", "rms_norm_eps")}
_BAMBA |= {"attn_layer_indices": [1, 3], "intermediate_size": 40}
_MOE = {"layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"], "n_routed_experts": 8}
_MOE |= {"moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 20, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
_FALCON = {key: value for key, value in _GRANITE.items() if key.startswith("mamba") or key in ("num_hidden_layers", "rms_norm_eps")}
_FALCON |= {"intermediate_size": 40, "mamba_d_ssm": 96, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "key_multiplier": 0.7}
_FALCON |= {"attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8, "mlp_multipliers": [0.6, 1.7], "ssm_in_multiplier": 1.3}
_FALCON |= {"ssm_multipliers": [0.7, 1.2, 0.8, 1.4, 0.6], "ssm_out_multiplier": 0.9}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _DELTA),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**_DELTA, **_EXPERTS}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**_DELTA, **_EXPERTS}),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM", _NEMOTRON),
    "nemotron_h_moe": ("NemotronHConfig", "NemotronHForCausalLM", {**_NEMOTRON, **_MOE, "routed_scaling_factor": 1.5}),
    "nemotron_h_latent": (
        "NemotronHConfig", "NemotronHForCausalLM", {**_NEMOTRON, **_MOE, "routed_scaling_factor": 1.5, "moe_latent_size": 20},
    ),
    "granite": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", _GRANITE),
    "bamba": ("BambaConfig", "BambaForCausalLM", _BAMBA),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", _FALCON),
    "granite_moe": (
        "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", {**_GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3},
    ),
}  # fmt: skip
_OFFSET = ("qwen3_5", "qwen3_next", "qwen3_5_moe")
"""Weights of norms are stored minus 1."""


def hybrid_of(family: str) -> str:
    """The class of transformers that :func:`build_hybrid` builds."""
    return FAMILIES[family][1]


def build_hybrid(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random transformers model: recurrent nets of 2 key and 4 value heads, and attention of 3 heads over one."""
    config_name, model_name, own = FAMILIES[family]
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 96,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        **own,
        **overrides,
    }
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**values)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not key.endswith(("inv_freq", "mup_vector")):
                tensor.copy_(_drawn(key, torch.randn(tensor.shape, generator=generator), offset=family in _OFFSET))
    return model


def _drawn(name: str, noise: Tensor, *, offset: bool) -> Tensor:
    """Set values that reveal omissions: decays of many lengths, weights of norms around their neutral value."""
    if name.endswith(("linear_attn.norm.weight", "mamba.norm.weight", "mixer.norm.weight")) or ("norm" in name and not offset):
        return 1 + 0.2 * noise
    if "norm" in name:
        return 0.2 * noise
    if name.endswith(("A_log", "dt_bias")):
        return noise - 1
    return (0.6 if "conv1d" in name else 0.3 if "gate.weight" in name else 0.15) * noise


def expert_head(family: str, *, stacked: bool, seed: int = 6, **overrides: Any) -> tuple[dict[str, Tensor], Any]:
    """A prediction head whose MLP is a mixture, under Qwen's names, and a transformers model of one layer that computes as it does.

    Args:
        family: ``qwen3_next`` or ``qwen3_5_moe``.
        stacked: all experts in one tensor, or each in its own.
        seed: of its weights.
        overrides: keys of the config.
    """
    model = build_hybrid(family, seed=seed, num_hidden_layers=1, layer_types=["full_attention"], **overrides)
    tensors: dict[str, Tensor] = {"mtp.norm.weight": model.model.norm.weight.detach().clone()}
    for name, tensor in model.model.layers[0].state_dict().items():
        stem = f"mtp.layers.0.{name}"
        if stacked or "mlp.experts." not in name:
            tensors[stem] = tensor.clone()
            continue
        for expert, matrix in enumerate(tensor):
            parts = {"down": matrix} if name.endswith("down_proj") else dict(zip(("gate", "up"), matrix.chunk(2), strict=True))
            tensors |= {f"mtp.layers.0.mlp.experts.{expert}.{part}_proj.weight": value.clone() for part, value in parts.items()}
    generator = torch.Generator().manual_seed(seed)
    tensors |= {f"mtp.pre_fc_norm_{part}.weight": 0.2 * torch.randn(HIDDEN, generator=generator) for part in ("embedding", "hidden")}
    tensors["mtp.fc.weight"] = 0.15 * torch.randn(HIDDEN, 2 * HIDDEN, generator=generator)
    return tensors, model


def mixer_head(
    family: str, kinds: tuple[str, ...] = ("full_attention", "moe"), *, seed: int = 6, **overrides: Any
) -> tuple[dict[str, Tensor], Any]:
    """A prediction head of Nemotron-H as published, and a transformers model of these layers that computes as it does.

    Args:
        family: ``nemotron_h_moe`` or ``nemotron_h_latent``.
        kinds: of the layers.
        seed: of its weights.
        overrides: keys of the config.
    """
    model = build_hybrid(family, seed=seed, layers_block_type=list(kinds), **overrides)
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"mtp.layers.0.{part}.weight": 1 + 0.2 * torch.randn(HIDDEN, generator=generator) for part in ("enorm", "hnorm")}
    tensors["mtp.layers.0.eh_proj.weight"] = 0.15 * torch.randn(HIDDEN, 2 * HIDDEN, generator=generator)
    tensors[f"mtp.layers.{len(kinds) - 1}.final_layernorm.weight"] = model.model.norm_f.weight.detach().clone()
    for name, tensor in model.model.layers.state_dict().items():
        before, experts, projection = name.partition("mixer.experts.")
        if not experts:
            tensors[f"mtp.layers.{name}"] = tensor.clone()
            continue
        for expert, matrix in enumerate(tensor):
            tensors[f"mtp.layers.{before}{experts}{expert}.{projection}.weight"] = matrix.clone()
    return tensors, model

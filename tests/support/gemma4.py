"""Small random Gemma-4 checkpoints of all three kinds, written by transformers."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from tests.support.checkpoints import VOCAB_SIZE

KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 36, "intermediate_size": 20, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": VOCAB_SIZE - 1, "pad_token_id": None, "sliding_window": 6, "layer_types": KINDS,
    "final_logit_softcapping": 4.0, "rope_parameters": ROPES, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCAB_SIZE,
    "attn_implementation": "eager", "experts_implementation": "eager",
}  # fmt: skip
DENSE: dict[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS: dict[str, Any] = {**DENSE, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 12}
INPUTS: dict[str, Any] = {
    "hidden_size_per_layer_input": 6, "num_hidden_layers": 7, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
    "layer_types": [*KINDS, "sliding_attention", "full_attention"],
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {"dense": DENSE, "experts": EXPERTS, "inputs": INPUTS}
"""As the 31B, the 26B-A4B and the E models."""


def randomise(model: Any, seed: int) -> Any:
    """Weights of which each has an effect: norms and scales around 1, of queries and keys around 1 / 2, since nothing else tames scores."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [*model.named_parameters(), *(pair for pair in model.named_buffers() if pair[0].endswith("layer_scalar"))]
    with torch.no_grad():
        for key, tensor in tensors:
            noise = torch.randn(tensor.shape, generator=generator)
            around_1 = "norm" in key or key.endswith(("scale", "layer_scalar"))
            tensor.copy_((1 + 0.2 * noise) * (0.5 if key.endswith(("q_norm.weight", "k_norm.weight")) else 1) if around_1 else 0.2 * noise)
    return model.eval()


def build_gemma4(kind: str = "dense", *, seed: int = 0, **overrides: Any) -> Any:
    """A random model of a kind of :data:`SHAPES`."""
    # transformers writes into what it is given.
    return randomise(Gemma4ForCausalLM(Gemma4TextConfig(**copy.deepcopy({**BASE, **SHAPES[kind], **overrides}))), seed)


def in_float64(model: Any) -> Any:
    """The same model with every matmul and norm in float64; transformers' own norm stays in float32 otherwise."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed * self.weight if self.with_scale else normed

    wide = copy.deepcopy(model).double()
    for module in wide.modules():
        if type(module).__name__ == "Gemma4RMSNorm":
            module.forward = types.MethodType(forward, module)
    return wide

"""Small random prediction heads under their published names, and an attention that records which layers ran."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import VOCAB_SIZE, DenseAttention, build_hf, edit_json, write_hf

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

HIDDEN, INNER, QUERY_HEADS, KV_HEADS, HEAD_DIM, LAYERS = 48, 40, 3, 1, 16, 2
NAMES: dict[str, tuple[str, str, str, str, str, str]] = {
    "deepseek": ("model.layers.{}.", "enorm", "hnorm", "eh_proj", "shared_head.norm", ""),
    "mimo": ("model.mtp_layers.{}.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", ""),
    "qwen": ("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0."),
}
"""Prefix of a head; names of its embedding norm, hidden norm, projection and last norm; prefix of the tensors of its layer."""


def head_tensors(layout: str, index: int = 0, *, family: str = "llama", copies: bool = False, seed: int = 1) -> dict[str, Tensor]:
    """One head as published: q, k and v biases for ``qwen2``, query / key norms for ``qwen3``, wide queries for Qwen3.5."""
    prefix, enorm, hnorm, projection, norm, layer = NAMES[layout]
    generator = torch.Generator().manual_seed(seed + 100 * index)
    gated = layout == "qwen"

    def normal(*shape: int) -> Tensor:
        return 0.15 * torch.randn(shape, generator=generator)

    def scale(size: int = HIDDEN) -> Tensor:
        return (0.0 if gated else 1.0) + 0.2 * torch.randn(size, generator=generator)

    query, key = QUERY_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    tensors = {
        f"{enorm}.weight": scale(),
        f"{hnorm}.weight": scale(),
        f"{projection}.weight": normal(HIDDEN, 2 * HIDDEN),
        f"{layer}input_layernorm.weight": scale(),
        f"{layer}self_attn.q_proj.weight": normal(2 * query if gated else query, HIDDEN),
        f"{layer}self_attn.k_proj.weight": normal(key, HIDDEN),
        f"{layer}self_attn.v_proj.weight": normal(key, HIDDEN),
        f"{layer}self_attn.o_proj.weight": normal(HIDDEN, query),
        f"{layer}post_attention_layernorm.weight": scale(),
        f"{layer}mlp.gate_proj.weight": normal(INNER, HIDDEN),
        f"{layer}mlp.up_proj.weight": normal(INNER, HIDDEN),
        f"{layer}mlp.down_proj.weight": normal(HIDDEN, INNER),
        f"{norm}.weight": scale(),
    }
    if family == "qwen2" or layout == "mimo":
        tensors |= {f"{layer}self_attn.{part}_proj.bias": normal(query if part == "q" else key) for part in "qkv"}
    if family == "qwen3" or gated:
        tensors |= {f"{layer}self_attn.{part}_norm.weight": scale(HEAD_DIM) for part in "qk"}
    if copies:
        tensors |= {name: normal(VOCAB_SIZE, HIDDEN) for name in ("embed_tokens.weight", "shared_head.head.weight")}
    return {prefix.format(index) + name: tensor for name, tensor in tensors.items()}


def write_target(path: Path, family: str = "llama", **overrides: Any) -> Path:
    """A target of two layers whose width is the heads'; family ``mimo`` has Qwen2's layout under its own name."""
    keys = {"num_hidden_layers": LAYERS, "num_key_value_heads": KV_HEADS, **overrides}
    if family not in ("qwen2", "mimo"):
        return write_hf(build_hf(family, **keys), path)
    write_hf(build_hf("qwen2", head_dim=None, **keys), path)
    if family == "mimo":
        edit_json(path / "config.json", architectures=["MiMoForCausalLM"], model_type="mimo", attention_bias=True, head_dim=HEAD_DIM)
    return path


def add_heads(path: Path, *heads: dict[str, Tensor], **config: Any) -> Path:
    """Put heads into the folder of a whole model."""
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for head in heads:
        tensors |= head
    save_file(tensors, file)
    edit_json(path / "config.json", **config)
    return path


def write_heads(path: Path, *heads: dict[str, Tensor], **config: Any) -> Path:
    """A folder with nothing but heads; ``config`` adds or overrides keys, None removes one."""
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "max_position_embeddings": 32,
        "torch_dtype": "float32",
        "num_nextn_predict_layers": len(heads),
        **config,
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    save_file({name: tensor.clone() for head in heads for name, tensor in head.items()}, path / "model.safetensors")
    return path


def qwen_config(**text: Any) -> dict[str, Any]:
    """The keys in which a Qwen3.5 checkpoint differs, language model nested as published; ``text`` overrides its keys."""
    nested: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 4,
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "attn_output_gate": True,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [1, 1, 0],
            "rope_type": "default",
            "rope_theta": 700.0,
            "partial_rotary_factor": 0.25,
        },
        **text,
    }
    kept = {key: value for key, value in nested.items() if value is not None}
    return {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": kept, "num_nextn_predict_layers": None}


@dataclass
class RecordingAttention(DenseAttention):
    """Records the layers that it was called for, in order."""

    layers: list[int] = field(default_factory=list)

    def __call__(self, layer: int, *args: Any) -> Tensor:
        self.layers.append(layer)
        return super().__call__(layer, *args)

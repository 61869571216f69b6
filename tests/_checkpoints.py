"""Small random checkpoints in published layouts, and a dense attention to run them with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

VOCAB_SIZE = 61
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def build_hf(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random transformers model of ``family``: 6 layers, 3 query heads of width 16 over 3 KV heads unless told otherwise."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 6,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": "eager",
        **overrides,
    }
    if values["head_dim"] is None:  # a key Qwen2's configuration doesn't have
        del values["head_dim"]
    name = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**values)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # norms around 1 and biases away from 0, so that leaving one out shows
            parameter.copy_(1 + 0.2 * noise if "norm" in key else 0.3 * noise if key.endswith("bias") else 0.15 * noise)
    return model


def write_hf(model: Any, path: Path, *, shard_size: str | None = None, **config: Any) -> Path:
    """Save with transformers itself; ``config`` then overrides keys of config.json (None writes null)."""
    model.save_pretrained(path, **({"max_shard_size": shard_size} if shard_size else {}))
    if config:
        edit_json(path / "config.json", **config)
    return path


def edit_json(file: Path, *removed: str, **changes: Any) -> None:
    """Change and remove top-level keys of a json file."""
    values = json.loads(file.read_text())
    values.update(changes)
    for key in removed:
        del values[key]
    file.write_text(json.dumps(values))


def edit_tensors(file: Path, *removed: str, **changes: Tensor) -> None:
    """Change, add and remove tensors of a safetensors file; ``__`` in a keyword stands for a dot."""
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    tensors.update({name.replace("__", "."): tensor for name, tensor in changes.items()})
    for name in removed:
        del tensors[name]
    save_file(tensors, file)


def eagle3_tensors(
    *,
    hidden_size: int = 48,
    target_hidden_size: int = 48,
    num_taps: int = 3,
    intermediate_size: int = 56,
    num_heads: int = 3,
    num_kv_heads: int = 1,
    head_dim: int = 16,
    vocab_size: int = VOCAB_SIZE,
    draft_vocab_size: int = 23,
    seed: int = 1,
) -> dict[str, Tensor]:
    """Tensors of an EAGLE-3 head under the names of the first published heads, with a vocabulary map."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return 0.15 * torch.randn(shape, generator=generator)

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(hidden_size, generator=generator)

    token_Vd = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
    mask_V = torch.zeros(vocab_size, dtype=torch.bool)
    mask_V[token_Vd] = True
    return {
        "fc.weight": normal(hidden_size, num_taps * target_hidden_size),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": normal(num_heads * head_dim, 2 * hidden_size),
        "midlayer.self_attn.k_proj.weight": normal(num_kv_heads * head_dim, 2 * hidden_size),
        "midlayer.self_attn.v_proj.weight": normal(num_kv_heads * head_dim, 2 * hidden_size),
        "midlayer.self_attn.o_proj.weight": normal(hidden_size, num_heads * head_dim),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.mlp.gate_proj.weight": normal(intermediate_size, hidden_size),
        "midlayer.mlp.up_proj.weight": normal(intermediate_size, hidden_size),
        "midlayer.mlp.down_proj.weight": normal(hidden_size, intermediate_size),
        "norm.weight": norm(),
        "lm_head.weight": normal(draft_vocab_size, hidden_size),
        "d2t": token_Vd - torch.arange(draft_vocab_size),
        "t2d": mask_V,
    }


def write_eagle3(path: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """An EAGLE-3 checkpoint; sizes follow the tensors, ``config`` adds or overrides keys."""
    prefix = "midlayer" if "midlayer.mlp.down_proj.weight" in tensors else "layers.0"
    hidden_size, intermediate_size = tensors[f"{prefix}.mlp.down_proj.weight"].shape
    head_dim = config.pop("head_dim", 16)
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": tensors["t2d"].shape[0] if "t2d" in tensors else VOCAB_SIZE,
        "draft_vocab_size": tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else None,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": tensors[f"{prefix}.self_attn.q_proj.weight"].shape[0] // head_dim,
        "num_key_value_heads": tensors[f"{prefix}.self_attn.k_proj.weight"].shape[0] // head_dim,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True},
        **config,
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(values))
    save_file(tensors, path / "model.safetensors")
    return path


@dataclass
class DenseAttention:
    """Causal attention by position over the tokens handed in; keeps nothing."""

    position_BT: Tensor
    rope_length_BT: Tensor
    valid_BT: Tensor

    @classmethod
    def prompt(cls, batch: int, length: int, device: str = "cpu") -> DenseAttention:
        """Whole prompts of one length, as a prefill sees them."""
        position_BT = torch.arange(length, device=device).expand(batch, length)
        return cls(position_BT, torch.full_like(position_BT, length), torch.ones_like(position_BT, dtype=torch.bool))

    def __call__(
        self, layer: int, query_BTQD: Tensor, key_BTGD: Tensor, value_BTGD: Tensor, scale: float, window_left: int | None
    ) -> Tensor:
        del layer
        repeat = query_BTQD.shape[2] // key_BTGD.shape[2]
        key_BTQD, value_BTQD = (x.repeat_interleave(repeat, dim=2) for x in (key_BTGD, value_BTGD))
        distance_BTU = self.position_BT[:, :, None] - self.position_BT[:, None, :]
        seen_BTU = (distance_BTU >= 0) & self.valid_BT[:, None, :]
        if window_left is not None:
            seen_BTU = seen_BTU & (distance_BTU < window_left)
        score_BQTU = torch.einsum("btqd,buqd->bqtu", query_BTQD, key_BTQD) * scale
        weight_BQTU = score_BQTU.masked_fill(~seen_BTU[:, None], float("-inf")).float().softmax(-1).to(query_BTQD.dtype)
        return torch.einsum("bqtu,buqd->btqd", weight_BQTU, value_BTQD)

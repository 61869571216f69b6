"""Small random checkpoints in published layouts, and a dense attention to run them with."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

from graphspec.kernels.formulas import apply_rope, rms_norm
from graphspec.models.attention import SOFTMAX, HeadTransform, LatentTransform, Weighing
from graphspec.models.recurrence import Recurrence

VOCAB_SIZE = 61
FAMILIES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "olmo2": "Olmo2", "phi3": "Phi3", "olmo3": "Olmo3",
    "smollm3": "SmolLM3", "exaone4": "Exaone4", "granite": "Granite", "seed_oss": "SeedOss",
    "gemma": "Gemma", "gemma2": "Gemma2", "gemma3": "Gemma3", "glm": "Glm", "glm4": "Glm4", "ernie4_5": "Ernie4_5",
    "ministral3": "Ministral3",
}  # fmt: skip
CONFIGS = {"gemma3": "Gemma3Text"}
"""Names of configurations that don't follow from those of the models."""


def architecture_of(family: str) -> str:
    """The class of transformers that :func:`build_hf` builds."""
    return f"{FAMILIES[family]}ForCausalLM"


def build_hf(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random transformers model of ``family``: 6 layers, 3 query heads of width 16 over 3 KV heads by default."""
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
        "pad_token_id": None,
        "attn_implementation": "eager",
        **overrides,
    }
    if values["head_dim"] is None:  # a key Qwen2's configuration doesn't have
        del values["head_dim"]
    config = getattr(transformers, f"{CONFIGS.get(family, FAMILIES[family])}Config")(**values)
    model = getattr(transformers, architecture_of(family))(config).eval()
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
    num_layers: int = 1,
    extras: tuple[str, ...] = (),
    seed: int = 1,
) -> dict[str, Tensor]:
    """Tensors of an EAGLE-3 head under the names of the first published heads, with a vocabulary map.

    ``extras``: any of fc_bias, fc_norm, input_norm, biases, qk_norm, embedding; further layers are ``layers.1.`` and so on.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return 0.15 * torch.randn(shape, generator=generator)

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(hidden_size, generator=generator)

    token_Vd = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
    mask_V = torch.zeros(vocab_size, dtype=torch.bool)
    mask_V[token_Vd] = True
    tensors = {
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
    for layer in range(1, num_layers):
        for name in [name for name in tensors if name.startswith("midlayer.") and "hidden_norm" not in name]:
            shape = tensors[name].shape[:1] if tensors[name].dim() == 1 else (tensors[name].shape[0], hidden_size)
            shape = tensors[name].shape if "o_proj" in name or "down_proj" in name else shape
            tensors[name.replace("midlayer.", f"layers.{layer}.")] = norm() if len(shape) == 1 else normal(*shape)
    if "fc_norm" in extras:
        for tap in range(num_taps):
            tensors[f"fc_norm.{tap}.weight"] = 1 + normal(target_hidden_size)
    if "input_norm" in extras:
        tensors["input_norm.weight"] = 1 + normal(num_taps * target_hidden_size)
    if "fc_bias" in extras:
        tensors["fc.bias"] = normal(hidden_size)
    if "embedding" in extras:
        tensors["embed_tokens.weight"] = normal(vocab_size, hidden_size)
    tensors |= _layer_extras(tensors, extras, head_dim, normal)
    return tensors


LATENT = {"kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5}
"""Config keys of the latent attention of :func:`latent_eagle3_tensors`."""


def latent_eagle3_tensors(*, query_rank: int | None = 10, num_heads: int = 4, **sizes: Any) -> dict[str, Tensor]:
    """:func:`eagle3_tensors` of one layer with multi-head latent attention, as SpecForge and ModelOpt write it for DeepSeek and Kimi.

    ``query_rank``: of compressed queries; None: they are projected directly.
    """
    tensors = {name: tensor for name, tensor in eagle3_tensors(**sizes).items() if "self_attn" not in name}
    hidden_size, generator = tensors["norm.weight"].shape[0], torch.Generator().manual_seed(7)
    rank, rope, nope, value = LATENT.values()
    shapes = {
        "kv_a_proj_with_mqa": (rank + rope, 2 * hidden_size),
        "kv_b_proj": (num_heads * (nope + value), rank),
        "o_proj": (hidden_size, num_heads * value),
    }
    if query_rank is None:
        shapes["q_proj"] = (num_heads * (nope + rope), 2 * hidden_size)
    else:
        shapes |= {"q_a_proj": (query_rank, 2 * hidden_size), "q_b_proj": (num_heads * (nope + rope), query_rank)}
        tensors["midlayer.self_attn.q_a_layernorm.weight"] = 1 + 0.2 * torch.randn(query_rank, generator=generator)
    tensors["midlayer.self_attn.kv_a_layernorm.weight"] = 1 + 0.2 * torch.randn(rank, generator=generator)
    for name, shape in shapes.items():
        tensors[f"midlayer.self_attn.{name}.weight"] = 0.3 * torch.randn(shape, generator=generator)
    return tensors


def _layer_extras(tensors: dict[str, Tensor], extras: tuple[str, ...], head_dim: int, normal: Any) -> dict[str, Tensor]:
    more = {}
    for name in tensors:
        if "biases" in extras and name.endswith("_proj.weight"):
            more[name.replace(".weight", ".bias")] = normal(tensors[name].shape[0])
        if "qkv_biases" in extras and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            more[name.replace(".weight", ".bias")] = normal(tensors[name].shape[0])
        if "qk_norm" in extras and name.endswith(("q_proj.weight", "k_proj.weight")):
            more[name.replace("_proj.", "_norm.")] = 1 + normal(head_dim)
    return more


def eagle_tensors(
    *, hidden_size: int = 48, num_heads: int = 3, num_kv_heads: int = 1, head_dim: int = 16, extras: tuple[str, ...] = (), seed: int = 1
) -> dict[str, Tensor]:
    """Tensors of an EAGLE-1/2 head under SafeAILab's names; ``extras``: any of fc_bias, norms, biases, qkv_biases, embedding."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return 0.15 * torch.randn(shape, generator=generator)

    tensors = {
        "fc.weight": normal(hidden_size, 2 * hidden_size),
        "layers.0.self_attn.q_proj.weight": normal(num_heads * head_dim, hidden_size),
        "layers.0.self_attn.k_proj.weight": normal(num_kv_heads * head_dim, hidden_size),
        "layers.0.self_attn.v_proj.weight": normal(num_kv_heads * head_dim, hidden_size),
        "layers.0.self_attn.o_proj.weight": normal(hidden_size, num_heads * head_dim),
        "layers.0.post_attention_layernorm.weight": 1 + normal(hidden_size),
        "layers.0.mlp.gate_proj.weight": normal(56, hidden_size),
        "layers.0.mlp.up_proj.weight": normal(56, hidden_size),
        "layers.0.mlp.down_proj.weight": normal(hidden_size, 56),
    }
    if "fc_bias" in extras:
        tensors["fc.bias"] = normal(hidden_size)
    if "norms" in extras:
        tensors |= {f"{name}_layernorm.weight": 1 + normal(hidden_size) for name in ("embed", "hidden", "lm_head")}
    if "embedding" in extras:
        tensors["embed_tokens.weight"] = normal(VOCAB_SIZE, hidden_size)
    return tensors | _layer_extras(tensors, extras, head_dim, normal)


def llama_config(tensors: dict[str, Tensor], prefix: str = "layers.0.", head_dim: int = 16, **config: Any) -> dict[str, Any]:
    """Config keys of one decoder layer, from its tensors; ``config`` has those of latent attention."""
    hidden_size, intermediate_size = tensors[f"{prefix}mlp.down_proj.weight"].shape
    heads: dict[str, Any] = {}
    if f"{prefix}self_attn.k_proj.weight" in tensors:
        heads = {
            "num_attention_heads": tensors[f"{prefix}self_attn.q_proj.weight"].shape[0] // head_dim,
            "num_key_value_heads": tensors[f"{prefix}self_attn.k_proj.weight"].shape[0] // head_dim,
            "head_dim": head_dim,
        }
    return {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 1,
        **heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32,
        "rope_theta": 500.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        **config,
    }


def write_folder(path: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """``config.json`` and ``model.safetensors``."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


MODELOPT = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": None,
}
TAPS = (1, 3, 5)


def publish_eagle3(
    path: Path,
    tensors: dict[str, Tensor],
    layout: str,
    taps: tuple[int, ...] | None = TAPS,
    layer: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """An EAGLE-3 head as ``layout`` publishes it.

    Args:
        path: the folder.
        tensors: from :func:`eagle3_tensors`.
        layout: safeailab, sglang, speculators, modelopt.
        taps: layers entered by the tapped streams; None: no key.
        layer: keys that override those of the decoder layers.
        config: keys at the top of config.json, in the spelling of the layout.
    """
    count = 1 + max([0, *(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))])
    keys = llama_config(tensors, "midlayer.", num_hidden_layers=count, **(layer or {}))
    top: dict[str, Any] = {"draft_vocab_size": tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else None}
    eagle: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in taps] if taps else None, "use_aux_hidden_state": True}
    if layout in ("speculators", "modelopt"):
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    if layout == "sglang":
        tensors = {
            name.replace("input_layernorm", "hidden_norm") if name.startswith("layers.") else name: tensor
            for name, tensor in tensors.items()
        }
    if layout == "modelopt":
        tensors = {name: tensor for name, tensor in tensors.items() if name != "t2d"}
    if layout == "speculators":
        top |= {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "norm_before_residual": False}
        top |= {"eagle_aux_hidden_state_layer_ids": list(taps) if taps else None, "speculators_version": "0.2.0"}
        return write_folder(path, tensors, {**top, "transformer_layer_config": keys, **config})
    if layout == "safeailab":
        return write_folder(path, tensors, {**keys, **top, "architectures": ["LlamaForCausalLM"], **config})
    eagle = {**eagle, **(MODELOPT if layout == "modelopt" else {}), **config.pop("eagle_config", {})}
    return write_folder(path, tensors, {**keys, **top, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": eagle, **config})


def publish_eagle(path: Path, tensors: dict[str, Tensor], layout: str, layer: dict[str, Any] | None = None, **config: Any) -> Path:
    """An EAGLE-1/2 head as ``layout`` (safeailab, hass, speculators-old) publishes it; arguments as :func:`publish_eagle3`."""
    keys = llama_config(tensors, **(layer or {}))
    if layout != "speculators-old":
        return write_folder(path, tensors, {**keys, "architectures": ["LlamaForCausalLM"], "bias": "fc.bias" in tensors, **config})
    spelling = {
        "fc.": "fusion_fc.",
        "layers.0.": "transformer.",
        "hidden_layernorm.": "transformer.input_layernorm.",
        "embed_layernorm.": "embedding_layernorm.",
        "lm_head_layernorm.": "pre_lm_head_layernorm.",
    }
    renamed = {}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in spelling if name.startswith(prefix)), "")
        renamed[spelling.get(prefix, "") + name.removeprefix(prefix)] = tensor
    top = {
        "speculators_model_type": "eagle",
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "fusion_bias": "fc.bias" in tensors,
        "layernorms": "embed_layernorm.weight" in tensors,
    }
    return write_folder(path, renamed, {**top, "transformer_layer_config": keys, **config})


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
    """Causal attention by position over the tokens of one call, without a KV cache."""

    position_BT: Tensor
    rope_length_BT: Tensor
    valid_BT: Tensor
    recurrence: Recurrence | None = None
    written: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values by layer."""

    @classmethod
    def prompt(cls, batch: int, length: int, device: str = "cpu") -> DenseAttention:
        """Whole prompts of one length, as a prefill sees them."""
        position_BT = torch.arange(length, device=device).expand(batch, length)
        return cls(position_BT, torch.full_like(position_BT, length), torch.ones_like(position_BT, dtype=torch.bool))

    def over(self, pool: int) -> DenseAttention:
        del pool
        return DenseAttention(self.position_BT, self.rope_length_BT, self.valid_BT, self.recurrence)

    def __call__(
        self,
        layer: int,
        query_BTQD: Tensor,
        key_BTGD: Tensor,
        value_BTGD: Tensor,
        heads: HeadTransform,
        scale: float,
        window_left: int | None,
        weighing: Weighing = SOFTMAX,
    ) -> Tensor:
        if heads.query_norm is not None and heads.key_norm is not None:
            query_BTQD = rms_norm(query_BTQD, heads.query_norm, heads.norm_eps, heads.norm_offset)
            key_BTGD = rms_norm(key_BTGD, heads.key_norm, heads.norm_eps, heads.norm_offset)
        query_BTQD, key_BTGD = (apply_rope(x, *heads.rotation.cos_sin(x.dtype)) for x in (query_BTQD, key_BTGD))
        self.written[layer] = (key_BTGD, value_BTGD)
        return self.read(layer, query_BTQD, scale, window_left, weighing)

    def read(self, layer: int, query_BTQD: Tensor, scale: float, window_left: int | None, weighing: Weighing = SOFTMAX) -> Tensor:
        key_BTGD, value_BTGD = self.written[layer]
        repeat = query_BTQD.shape[2] // key_BTGD.shape[2]
        key_BTQD, value_BTQD = (x.repeat_interleave(repeat, dim=2) for x in (key_BTGD, value_BTGD))
        score_BQTU = torch.einsum("btqd,buqd->bqtu", query_BTQD, key_BTQD) * scale
        if weighing.softcap:
            score_BQTU = weighing.softcap * torch.tanh(score_BQTU / weighing.softcap)
        weight_BQTU = self._weights(score_BQTU, window_left, weighing.sink_Q)
        return torch.einsum("bqtu,buqd->btqd", weight_BQTU, value_BTQD)

    def latent(
        self, layer: int, query_latent_BTQL: Tensor, query_rope_BTQR: Tensor, latent_BTE: Tensor, transform: LatentTransform, scale: float
    ) -> Tensor:
        del layer
        rank = query_latent_BTQL.shape[-1]

        def rotate(x_BTQR: Tensor) -> Tensor:
            if transform.interleaved:
                x_BTQR = x_BTQR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
            return apply_rope(x_BTQR, *transform.rotation.cos_sin(x_BTQR.dtype))

        row_BTL = rms_norm(latent_BTE[..., :rank], transform.norm_weight_L, transform.norm_eps)
        key_BTR = rotate(latent_BTE[:, :, None, rank:])[:, :, 0]
        score_BQTU = torch.einsum("btql,bul->bqtu", query_latent_BTQL, row_BTL)
        score_BQTU = score_BQTU + torch.einsum("btqr,bur->bqtu", rotate(query_rope_BTQR), key_BTR)
        return torch.einsum("bqtu,bul->btql", self._weights(score_BQTU * scale, None), row_BTL)

    def _weights(self, score_BQTU: Tensor, window_left: int | None, sink_Q: Tensor | None = None) -> Tensor:
        distance_BTU = self.position_BT[:, :, None] - self.position_BT[:, None, :]
        seen_BTU = (distance_BTU >= 0) & self.valid_BT[:, None, :]
        if window_left is not None:
            seen_BTU = seen_BTU & (distance_BTU < window_left)
        seen_BQTU = score_BQTU.masked_fill(~seen_BTU[:, None], float("-inf")).float()
        if sink_Q is not None:
            seen_BQTU = torch.cat((seen_BQTU, sink_Q[None, :, None, None].expand(*seen_BQTU.shape[:3], 1)), -1)
        return seen_BQTU.softmax(-1)[..., : score_BQTU.shape[-1]].to(score_BQTU.dtype)


@torch.inference_mode()
def assert_inert_rows(draft: Any) -> None:
    """Rows of a draft that are not valid change nothing, whatever their features."""
    token_BT, hidden_BTH = torch.tensor([[5, 6, -1, -1]]), torch.randn(1, 4, draft.facts.decoder.hidden_size)
    hidden_BTH[:, 2:] = float("nan")
    attention = DenseAttention.prompt(1, 4)
    attention.valid_BT = token_BT >= 0
    found = draft(token_BT, hidden_BTH, attention)
    assert found.isfinite().all()
    assert torch.equal(found, draft(token_BT, hidden_BTH.nan_to_num(0.0), attention))
    attention.valid_BT = torch.ones_like(attention.valid_BT)
    assert not draft(token_BT, hidden_BTH, attention).isfinite().all()

"""Small random checkpoints with mixtures of experts and latent attention, written by transformers, and prediction heads of DeepSeek."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpLayer

from graphspec.errors import CheckpointError
from graphspec.facts import read_model_facts
from graphspec.models.target import load_target
from tests.support.checkpoints import VOCAB_SIZE, edit_json, edit_tensors, write_hf

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

HIDDEN, LAYERS = 32, 3
EOS = VOCAB_SIZE - 1
MIXTURE = {"moe_intermediate_size": 12, "num_experts_per_tok": 3}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5, "n_routed_experts": 8,
    "first_k_dense_replace": 1, "n_shared_experts": 2,
}  # fmt: skip
GROUPED = {"head_dim": 8, "n_routed_experts": 8, "first_k_dense_replace": 1, "n_shared_experts": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 6, "norm_topk_prob": True}),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_key_value_heads": 2, "num_experts": 6, "shared_expert_intermediate_size": 20},
    ),
    "qwen2_moe, windows, one dense layer": (
        "Qwen2Moe",
        {
            "num_key_value_heads": 4,
            "num_experts": 6,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,
        },
    ),
    "olmoe": ("Olmoe", {"num_key_value_heads": 2, "num_experts": 6, "intermediate_size": 12}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"num_key_value_heads": 2, "moe_num_experts": 6, "moe_k": 3, "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
    ),
    "deepseek_v2": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "routed_scaling_factor": 1.5}),
    "dots1": ("Dots1", {**GROUPED, "num_key_value_heads": 2, "sliding_window": 7, "max_window_layers": 1, "norm_topk_prob": True}),
    "glm4_moe": ("Glm4Moe", {**GROUPED, "num_key_value_heads": 2, "attention_bias": True, "use_qk_norm": True, "n_group": 2}),
    "glm4_moe, plain": ("Glm4Moe", {**GROUPED, "num_key_value_heads": 4, "norm_topk_prob": False, "routed_scaling_factor": 2.5}),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {
            **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
            "q_lora_rank": 10,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 6, "intermediate_size": 12, "sliding_window": 7}),
    "minimax_m2": (
        "MiniMaxM2",
        {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 6, "intermediate_size": 12, "rotary_dim": 4},
    ),
    "mistral4": (
        "Mistral4",
        {
            **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
            "q_lora_rank": 10,
            "rope_parameters": {**YARN, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3},
        },
    ),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "q_lora_rank": 10, "n_group": 4, "topk_group": 2}),
    "gpt_oss": (
        "GptOss",
        {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_local_experts": 6,
            "sliding_window": 7,
            "swiglu_limit": 0.4,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
    ),
}


def mixture_of(family: str) -> str:
    """The class of transformers that :func:`build_mixture` builds."""
    return f"{FAMILIES[family][0]}ForCausalLM"


def build_mixture(family: str, *, seed: int = 0, easy: bool = False, **overrides: Any) -> Any:
    """A random transformers model: 4 heads, three layers, experts in all or all but the first.

    ``easy``: layers add little to the residual stream, so that the next token mostly follows from the last one.
    """
    name, keys = FAMILIES[family]
    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        **MIXTURE,
        **keys,
        **overrides,
    }
    if values.get("head_dim", 0) is None:  # a key the configuration of Qwen3-MoE need not have
        del values["head_dim"]
    model = getattr(transformers, mixture_of(family))(getattr(transformers, f"{name}Config")(**values)).eval()
    generator = torch.Generator().manual_seed(seed)
    small, large = ("o_proj.weight", "down_proj.weight", "experts.down_proj"), ("embed_tokens.weight", "lm_head.weight")
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if key.endswith("inv_freq"):
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            scale = 0.03 if easy and key.endswith(small) else 0.6 if easy and key.endswith(large) else 0.15
            # The router's correction moves experts past each other; its weights tell tokens apart.
            routes = "mlp.gate." in key or "mlp.router." in key
            scale = 0.3 if routes or (key.endswith("bias") and not (easy and "experts" in key)) else scale
            scale = 1.0 if key.endswith("sinks") else scale
            tensor.copy_(1 + 0.2 * noise if "norm" in key else scale * noise)
    return model


def write_mixture(path: Path, family: str, *, easy: bool = False, **overrides: Any) -> tuple[Path, Any]:
    """A model's folder, and the model."""
    model = build_mixture(family, easy=easy, **overrides)
    return write_hf(model, path), model


def head_tensors(
    family: str = "deepseek_v3", index: int = LAYERS, *, seed: int = 5, copies: bool = False, **overrides: Any
) -> dict[str, Tensor]:
    """One prediction head as published, in the place of layer ``index``. Its layer is one of ``family``, split as a checkpoint has it.

    It mostly reads the embedding, and its last norm is that of :func:`build_mixture`'s model of seed 0: over an easy one it is often right.
    """
    layer = build_mixture(family, easy=True, seed=seed, **{"num_hidden_layers": 1, "first_k_dense_replace": 0, **overrides}).model.layers[0]
    prefix, tensors = f"model.layers.{index}.", {}
    for name, tensor in layer.state_dict().items():
        if "mlp.experts." not in name:
            tensors[prefix + name] = tensor.clone()
            continue
        for expert, matrix in enumerate(tensor):
            parts = {"down": matrix} if name.endswith("down_proj") else dict(zip(("gate", "up"), matrix.chunk(2), strict=True))
            tensors |= {f"{prefix}mlp.experts.{expert}.{part}_proj.weight": value.clone() for part, value in parts.items()}
    generator = torch.Generator().manual_seed(seed)
    hidden = HIDDEN

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    projection = torch.cat((torch.eye(hidden), 0.05 * normal(hidden, hidden)), dim=1)
    named = {"enorm.weight": 1 + 0.1 * normal(hidden), "hnorm.weight": 1 + 0.1 * normal(hidden), "eh_proj.weight": projection}
    named["shared_head.norm.weight"] = build_mixture(family, easy=True).model.norm.weight.detach().clone()
    if copies:
        named |= {name: normal(VOCAB_SIZE, hidden) for name in ("embed_tokens.weight", "shared_head.head.weight")}
    return tensors | {prefix + name: tensor for name, tensor in named.items()}


def add_heads(path: Path, *heads: dict[str, Tensor]) -> Path:
    """Put prediction heads into the folder of a whole model."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path / "model.safetensors").items()}
    for head in heads:
        tensors |= head
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit_json(path / "config.json", num_nextn_predict_layers=len(heads))
    return path


class HeadOfTransformers:
    """A prediction head as transformers computes it, over a model whose RoPE it shares, and embedding and head unless it has its own."""

    def __init__(self, model: Any, head: dict[str, Tensor]) -> None:
        self.model = model
        layer_type, norm_type = type(model.model.layers[-1]), type(model.model.norm)
        config = copy.deepcopy(model.config)
        if listed := getattr(config, "mlp_layer_types", None):  # which names no head
            config.mlp_layer_types = [*listed, *["sparse"] * LAYERS]
        self.layer = MtpLayer(config, layer_type, norm_type, LAYERS).eval()
        own: dict[str, Tensor] = {}
        self.embedding_VH, self.head_VH = model.model.embed_tokens.weight, model.lm_head.weight
        for name, tensor in head.items():
            name = re.sub(r"^model\.layers\.\d+\.", "", name)
            if name == "embed_tokens.weight":
                self.embedding_VH = tensor
            elif name == "shared_head.head.weight":
                self.head_VH = tensor
            else:
                outer = name.startswith(("enorm", "hnorm", "eh_proj"))
                own["post_norm.weight" if name == "shared_head.norm.weight" else name if outer else f"mtp_block.{name}"] = tensor
        experts = model.config.n_routed_experts

        def stacked(part: str) -> Tensor:
            return torch.stack([own.pop(f"mtp_block.mlp.experts.{expert}.{part}_proj.weight") for expert in range(experts)])

        own["mtp_block.mlp.experts.gate_up_proj"] = torch.cat((stacked("gate"), stacked("up")), dim=1)
        own["mtp_block.mlp.experts.down_proj"] = stacked("down")
        self.layer.load_state_dict(own)

    @torch.no_grad()
    def __call__(self, tokens: list[int], hidden_1TH: Tensor) -> Tensor:
        """Hidden states ``[1, T, H]`` of tokens, each with the hidden state of the token before it."""
        length = len(tokens)
        position_1T = torch.arange(length)[None]
        embedding_1TH = self.embedding_VH[torch.tensor([tokens])]
        rope = self.model.model.rotary_emb(embedding_1TH, position_ids=position_1T)
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        return self.layer(embedding_1TH, hidden_1TH, rope, mask, position_1T, None)

    @torch.no_grad()
    def features(self, tokens: list[int]) -> Tensor:
        """``[1, T, H]``: the model's hidden states after its final norm."""
        return self.model.model(torch.tensor([tokens])).last_hidden_state

    @torch.no_grad()
    def log_probs(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.head_VH.T).log_softmax(-1)


def greedy(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """What ``generate(do_sample=False)`` of transformers emits; remembered on the model."""
    known, key = model.__dict__.setdefault("greedy_outputs", {}), (*prompt, max_tokens)
    if key not in known:
        token_BT = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(
                token_BT, attention_mask=torch.ones_like(token_BT), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
            )
        known[key] = out[0, len(prompt) :].tolist()
    return known[key]


def assert_refused(path: Path, tensor: str, shape: tuple[int, ...] | None, message: str) -> None:
    """A target with this tensor of layer 1 in another shape, or without it, is refused."""
    tensor = f"model.layers.1.{tensor}"
    removed, changes = ([tensor], {}) if shape is None else ([], {tensor.replace(".", "__"): torch.zeros(shape)})
    edit_tensors(path / "model.safetensors", *removed, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_target(read_model_facts(path), (), 8, torch.float32, "cpu")

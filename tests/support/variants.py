"""A target, and for every variant a draft that is usually right, in published layouts."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from graphspec.api.llm import LLM
from tests.support.checkpoints import VOCAB_SIZE, build_hf, write_hf
from tests.support.engines import SMALL, Pair

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

HIDDEN, INNER, HEADS, HEAD_DIM = 48, 40, 3, 16
EOS = VOCAB_SIZE - 1


@dataclass
class Family:
    """A target whose next token mostly follows from the last one, so that simple drafts are often right, and its drafts by name."""

    pair: Pair
    drafts: dict[str, tuple[str, Path | None]]
    """Variant and draft folder of each draft."""
    plain: dict[Any, list[list[int]]] = field(default_factory=dict)

    def llm(self, name: str, **overrides: Any) -> LLM:
        variant, draft = self.drafts[name]
        return LLM(self.pair.target, variant=variant, draft=draft, **{**SMALL, **overrides})


def build_family(path: Path, *, noise: float = 0.25) -> Family:
    """Drafts read the token's embedding alone; the target adds small attention and MLP terms, and the drafts ``noise`` of their own."""
    model = build_hf("llama", num_hidden_layers=2, num_key_value_heads=1, eos_token_id=EOS, max_position_embeddings=96)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.2)
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                parameter.mul_(4.0)
    target = write_hf(model, path / "target")
    norm = model.model.norm.weight.detach().clone()
    drafts: dict[str, tuple[str, Path | None]] = {"none": ("none", None), "ngram": ("ngram", None), "ngram_trie": ("ngram_trie", None)}
    drafts["eagle"] = ("eagle", _write(path / "eagle", _eagle(norm, noise), architectures=["LlamaForCausalLMEagle"], bias=False))
    for count in (1, 3):
        tensors = {}
        for head in range(count):
            tensors |= {f"model.layers.{2 + head}.{name}": tensor for name, tensor in _mtp(norm, noise, head).items()}
        keys = {"architectures": ["LlamaForCausalLMNextN"], "num_nextn_predict_layers": count, "num_hidden_layers": 2}
        drafts[f"mtp-{count}"] = ("mtp", _write(path / f"mtp-{count}", tensors, **keys))
    small = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in small.model.layers.parameters():
            parameter.add_(0.15 * noise * torch.randn(parameter.shape, generator=generator))
    drafts["standalone"] = ("standalone", write_hf(small, path / "standalone"))
    return Family(Pair(target, drafts["eagle"][1] or target, model), drafts)


def _layer(prefix: str, generator: torch.Generator, noise: float) -> dict[str, Tensor]:
    """A decoder layer that adds little to the residual stream, but something to every part of it."""

    def normal(*shape: int, scale: float = 0.15) -> Tensor:
        return scale * torch.randn(shape, generator=generator)

    return {
        f"{prefix}self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}self_attn.k_proj.weight": normal(HEAD_DIM, HIDDEN),
        f"{prefix}self_attn.v_proj.weight": normal(HEAD_DIM, HIDDEN),
        f"{prefix}self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM, scale=0.3 * noise),
        f"{prefix}mlp.gate_proj.weight": normal(INNER, HIDDEN),
        f"{prefix}mlp.up_proj.weight": normal(INNER, HIDDEN),
        f"{prefix}mlp.down_proj.weight": normal(HIDDEN, INNER, scale=0.3 * noise),
        f"{prefix}post_attention_layernorm.weight": 1 + normal(HIDDEN),
    }


def _eagle(norm: Tensor, noise: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    mix = torch.cat((torch.diag(norm), torch.zeros(HIDDEN, HIDDEN)), 1)
    mix[:, HIDDEN:] += 0.05 * noise * torch.randn(HIDDEN, HIDDEN, generator=generator)
    return {"fc.weight": mix, **_layer("layers.0.", generator, noise)}


def _mtp(norm: Tensor, noise: float, head: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(20 + head)
    mix = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), 1)
    mix[:, HIDDEN:] += 0.2 * noise * torch.randn(HIDDEN, HIDDEN, generator=generator)
    ones = {name: torch.ones(HIDDEN) for name in ("enorm.weight", "hnorm.weight", "input_layernorm.weight")}
    return {**ones, "eh_proj.weight": mix, "shared_head.norm.weight": norm.clone(), **_layer("", generator, noise)}


def _write(path: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors")
    keys = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 96,
        "hidden_act": "silu",
        **config,
    }
    (path / "config.json").write_text(json.dumps(keys))
    return path

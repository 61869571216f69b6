"""EAGLE heads written out from the published equations over the tensors of a checkpoint. Imports nothing of the package."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-5


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def rotate(x: Tensor, first_position: int, theta: float) -> Tensor:
    """``[T, heads, D]`` at consecutive positions."""
    half = x.shape[-1] // 2
    frequency = 1.0 / theta ** (torch.arange(half, dtype=x.dtype) / half)
    angle = (first_position + torch.arange(x.shape[0], dtype=x.dtype))[:, None, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def project(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    out = x @ w[f"{name}.weight"].T
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def layer(w: dict[str, Tensor], prefix: str, residual: Tensor, x: Tensor, first_position: int, theta: float, head_dim: int = 16) -> Tensor:
    """A decoder layer whose attention reads ``x``; causal over the rows."""
    q, k, v = (project(w, f"{prefix}self_attn.{name}_proj", x).unflatten(-1, (-1, head_dim)) for name in "qkv")
    if f"{prefix}self_attn.q_norm.weight" in w:
        q, k = rms(q, w[f"{prefix}self_attn.q_norm.weight"]), rms(k, w[f"{prefix}self_attn.k_norm.weight"])
    q, k = rotate(q, first_position, theta), rotate(k, first_position, theta)
    group = q.shape[1] // k.shape[1]
    heads = []
    for head in range(q.shape[1]):
        score = q[:, head] @ k[:, head // group].T / head_dim**0.5
        score = score.masked_fill(torch.ones_like(score).triu(1).bool(), float("-inf"))
        heads.append(score.softmax(-1) @ v[:, head // group])
    residual = residual + project(w, f"{prefix}self_attn.o_proj", torch.cat(heads, -1))
    y = rms(residual, w[f"{prefix}post_attention_layernorm.weight"])
    gate = project(w, f"{prefix}mlp.gate_proj", y)
    return residual + project(w, f"{prefix}mlp.down_proj", gate * torch.sigmoid(gate) * project(w, f"{prefix}mlp.up_proj", y))


def eagle3_fuse(w: dict[str, Tensor], feature: Tensor, width: int) -> Tensor:
    if "input_norm.weight" in w:
        feature = rms(feature, w["input_norm.weight"])
    if "fc_norm.0.weight" in w:
        feature = torch.cat([rms(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(feature.split(width, -1))], -1)
    return project(w, "fc", feature)


def eagle3_step(
    w: dict[str, Tensor],
    embedding: Tensor,
    hidden: Tensor,
    first_position: int,
    *,
    theta: float = 500.0,
    norm_before_residual: bool = False,
    norm_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """Inputs of the next step and of the language-model head; the first layer is ``midlayer`` in ``w``."""
    normed = rms(hidden, w["midlayer.hidden_norm.weight"])
    x = torch.cat((rms(embedding, w["midlayer.input_layernorm.weight"]), normed), -1)
    out = layer(w, "midlayer.", normed if norm_before_residual else hidden, x, first_position, theta)
    index = 1
    while f"layers.{index}.mlp.down_proj.weight" in w:
        out = layer(w, f"layers.{index}.", out, rms(out, w[f"layers.{index}.input_layernorm.weight"]), first_position, theta)
        index += 1
    last = rms(out, w["norm.weight"])
    return (last if norm_output else out), last


def eagle_step(
    w: dict[str, Tensor], embedding: Tensor, hidden: Tensor, first_position: int, *, theta: float = 500.0
) -> tuple[Tensor, Tensor]:
    """Inputs of the next step and of the language-model head."""
    if "embed_layernorm.weight" in w:
        embedding = rms(embedding, w["embed_layernorm.weight"])
    residual = project(w, "fc", torch.cat((embedding, hidden), -1))
    x = rms(residual, w["hidden_layernorm.weight"]) if "hidden_layernorm.weight" in w else residual
    out = layer(w, "layers.0.", residual, x, first_position, theta)
    return out, rms(out, w["lm_head_layernorm.weight"]) if "lm_head_layernorm.weight" in w else out

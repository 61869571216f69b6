"""EAGLE heads written out from the published equations over the tensors of a checkpoint. Imports nothing of the package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-5


def rms(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotate(x: Tensor, first_position: int, theta: float, part: int | None = None) -> Tensor:
    """``[T, heads, D]`` at consecutive positions; ``part``: elements that turn, from the first on; None: all."""
    turning, still = x.split((part or x.shape[-1], x.shape[-1] - (part or x.shape[-1])), -1)
    half = turning.shape[-1] // 2
    frequency = 1.0 / theta ** (torch.arange(half, dtype=x.dtype) / half)
    angle = (first_position + torch.arange(x.shape[0], dtype=x.dtype))[:, None, None] * frequency
    a, b = turning[..., :half], turning[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), still), -1)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Causal attention ``[T, heads * D]``; ``window``: positions that a query sees, its own included."""
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    hidden = (distance < 0) | (distance >= (window or len(q)))
    group, heads = q.shape[1] // k.shape[1], []
    for head in range(q.shape[1]):
        score = q[:, head] @ k[:, head // group].T / q.shape[-1] ** 0.5
        heads.append(score.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, head // group])
    return torch.cat(heads, -1)


def latent_attention(w: dict[str, Tensor], at: str, x: Tensor, first_position: int, theta: float, sizes: dict[str, int]) -> Tensor:
    """Multi-head latent attention up to its last projection, with keys and values of every head built. RoPE turns pairs of neighbours."""
    nope, rope, value = (sizes[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))

    def neighbours(part: Tensor) -> Tensor:
        """Turned in pairs of neighbours; their order afterwards changes no score."""
        return rotate(torch.cat((part[..., ::2], part[..., 1::2]), -1), first_position, theta)

    q = project(w, f"{at}q_proj", x) if f"{at}q_proj.weight" in w else None
    if q is None:
        q = project(w, f"{at}q_b_proj", rms(project(w, f"{at}q_a_proj", x), w[f"{at}q_a_layernorm.weight"]))
    q = q.unflatten(-1, (-1, nope + rope))
    row, key = project(w, f"{at}kv_a_proj_with_mqa", x).split((sizes["kv_lora_rank"], rope), -1)
    both = project(w, f"{at}kv_b_proj", rms(row, w[f"{at}kv_a_layernorm.weight"])).unflatten(-1, (-1, nope + value))
    turned = neighbours(key[:, None]).expand(-1, both.shape[1], -1)
    query = torch.cat((q[..., :nope], neighbours(q[..., nope:])), -1)
    return attend(query, torch.cat((both[..., :nope], turned), -1), both[..., nope:])


def project(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    out = x @ w[f"{name}.weight"].T
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def layer(
    w: dict[str, Tensor],
    prefix: str,
    residual: Tensor,
    x: Tensor,
    first_position: int,
    theta: float,
    head_dim: int = 16,
    *,
    window: int | None = None,
    rotary: int | None = None,
    latent: dict[str, int] | None = None,
    gated: bool = False,
    eps: float = EPS,
) -> Tensor:
    """A decoder layer whose attention reads ``x``; causal over the rows. ``gated``: a gate for each head lies next to its query."""
    at = f"{prefix}self_attn."
    if latent is not None:
        mixed = latent_attention(w, at, x, first_position, theta, latent)
    else:
        q, k, v = (project(w, f"{at}{name}_proj", x) for name in "qkv")
        q, gates = q.unflatten(-1, (-1, 2, head_dim)).unbind(-2) if gated else (q.unflatten(-1, (-1, head_dim)), None)
        k, v = (part.unflatten(-1, (-1, head_dim)) for part in (k, v))
        if f"{at}q_norm.weight" in w:
            q, k = rms(q, w[f"{at}q_norm.weight"], eps), rms(k, w[f"{at}k_norm.weight"], eps)
        q, k = rotate(q, first_position, theta, rotary), rotate(k, first_position, theta, rotary)
        mixed = attend(q, k, v, window)
        mixed = mixed if gates is None else mixed * torch.sigmoid(gates.flatten(-2))
    residual = residual + project(w, f"{at}o_proj", mixed)
    y = rms(residual, w[f"{prefix}post_attention_layernorm.weight"], eps)
    gate = project(w, f"{prefix}mlp.gate_proj", y)
    return residual + project(w, f"{prefix}mlp.down_proj", gate * torch.sigmoid(gate) * project(w, f"{prefix}mlp.up_proj", y))


def eagle3_fuse(w: dict[str, Tensor], feature: Tensor, width: int) -> Tensor:
    if "input_norm.weight" in w:
        feature = rms(feature, w["input_norm.weight"])
    if "fc_norm.0.weight" in w:
        feature = torch.cat([rms(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(feature.split(width, -1))], -1)
    return project(w, "fc", feature) if "fc.weight" in w else feature


def eagle3_step(
    w: dict[str, Tensor],
    embedding: Tensor,
    hidden: Tensor,
    first_position: int,
    *,
    theta: float = 500.0,
    norm_before_residual: bool = False,
    norm_output: bool = False,
    windows: tuple[int | None, ...] = (),
    eps: float = EPS,
    **attention: Any,
) -> tuple[Tensor, Tensor]:
    """Inputs of the next step and of the language-model head; the first layer is ``midlayer`` in ``w``.

    ``windows``: of the layers, none of those left out; ``attention``: further options of :func:`layer`.
    """
    windows += (None,) * len(w)
    normed = rms(hidden, w["midlayer.hidden_norm.weight"], eps)
    x = torch.cat((rms(embedding, w["midlayer.input_layernorm.weight"], eps), normed), -1)
    out = layer(
        w, "midlayer.", normed if norm_before_residual else hidden, x, first_position, theta, window=windows[0], eps=eps, **attention
    )
    index = 1
    while f"layers.{index}.mlp.down_proj.weight" in w:
        x = rms(out, w[f"layers.{index}.input_layernorm.weight"], eps)
        out = layer(w, f"layers.{index}.", out, x, first_position, theta, window=windows[index], eps=eps, **attention)
        index += 1
    last = rms(out, w["norm.weight"], eps)
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

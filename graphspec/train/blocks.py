"""Parts of decoder layers for draft networks in training. Attention is a function of the caller, which decides what a row may see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import ConfigError

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``(layer, query [B, G, Q/G, T, D], key [B, G, T, D], value [B, G, T, D]) -> [B, T, Q * D]``; query and key are rotated."""

STEADY_ROPE = ("default", "linear", "llama3", "yarn")
"""RoPE types whose angles don't depend on the length of the text."""


@dataclass(frozen=True)
class LayerShape:
    """Dimensions of one decoder layer."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    dim: int
    eps: float
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over the dimension of each query and key head before the rotation (Qwen3)."""
    gate: bool = False
    """The query projection has a gate after each head's query; its sigmoid scales the head's output (Qwen3.5)."""

    @classmethod
    def of(cls, target: PreTrainedModel) -> LayerShape:
        """The shape of the target's layers, read from the first that attends.

        Raises:
            ConfigError: an activation other than SiLU.
        """
        config, layer = target.config, next(layer for layer in target.model.layers if hasattr(layer, "self_attn"))
        if config.hidden_act not in ("silu", "swish"):
            raise ConfigError("model.path: hidden_act", "silu", config.hidden_act)
        attention = layer.self_attn
        return cls(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            dim=attention.o_proj.in_features // config.num_attention_heads,
            eps=config.rms_norm_eps,
            qkv_bias=attention.q_proj.bias is not None,
            output_bias=attention.o_proj.bias is not None,
            mlp_bias=layer.mlp.gate_proj.bias is not None,
            qk_norm=hasattr(attention, "q_norm"),
            gate=attention.q_proj.out_features == 2 * attention.o_proj.in_features,
        )

    def plain(self, intermediate: int | None, *, qk_norm: bool = False) -> LayerShape:
        """A Llama layer without biases of the same sizes; with ``qk_norm``, a Qwen3 layer.

        ``intermediate`` None keeps the width of the MLP.
        """
        width = intermediate or self.intermediate
        return replace(self, intermediate=width, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=qk_norm, gate=False)


def rotate(x: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate ``[.., T, D]`` by Llama's rotary angles, which pair the two halves of a head.

    Dimensions beyond the width of the angles are not rotated.
    """
    width = cos_TD.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], cos_TD, sin_TD), x[..., width:]), -1)
    low, high = x.chunk(2, -1)
    return x * cos_TD + torch.cat((-high, low), -1) * sin_TD


class Rope(nn.Module):
    """Angles of a rotary embedding, which checkpoints do not store."""

    frequencies: Tensor

    def __init__(self, frequencies: Tensor, scaling: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies.detach().float().clone(), persistent=False)
        self.scaling = scaling

    @classmethod
    def of(cls, target: PreTrainedModel) -> Rope:
        """The target's own angles.

        Raises:
            ConfigError: a RoPE type whose angles depend on the length of the text.
        """
        rotary = target.model.rotary_emb
        if rotary.rope_type not in STEADY_ROPE:
            raise ConfigError("model.path: rope_type", "one of " + ", ".join(STEADY_ROPE), rotary.rope_type)
        return cls(rotary.inv_freq, float(rotary.attention_scaling))

    @classmethod
    def plain(cls, dim: int, theta: float) -> Rope:
        """Llama's unscaled angles for heads of ``dim``."""
        return cls(theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim))

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """``(cos, sin)``, each fp32 ``[T, D]``, D the rotated part of a head."""
        angle = positions_T.float()[:, None] * self.frequencies
        angle = torch.cat((angle, angle), -1)
        return angle.cos() * self.scaling, angle.sin() * self.scaling


class SelfAttention(nn.Module):
    """Projections of one attention layer; ``inputs`` is the width of its input."""

    def __init__(self, shape: LayerShape, inputs: int) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(inputs, shape.heads * shape.dim * (2 if shape.gate else 1), bias=shape.qkv_bias)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * shape.dim, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * shape.dim, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(shape.heads * shape.dim, shape.hidden, bias=shape.output_bias)
        if shape.qk_norm:
            self.q_norm = nn.RMSNorm(shape.dim, shape.eps)
            self.k_norm = nn.RMSNorm(shape.dim, shape.eps)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend, layer: int = 0) -> Tensor:
        """``[B, T, inputs]`` to ``[B, T, H]``; ``layer`` is passed on to ``attend``."""
        q, gate = self.q_proj(x).unflatten(-1, (self.shape.heads, -1)), None
        if self.shape.gate:
            q, gate = q.chunk(2, -1)
        if self.shape.qk_norm:
            q = self.q_norm(q)
        q = rotate(q.transpose(1, 2), *angles).unflatten(1, (self.shape.kv_heads, -1))
        out = attend(layer, q, *self.keys_and_values(x, *angles))
        if gate is not None:
            out = out * gate.flatten(2).sigmoid()
        projected: Tensor = self.o_proj(out)
        return projected

    def keys_and_values(self, x: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, T, inputs]`` to rotated keys and values ``[B, G, T, D]``."""
        k = self.k_proj(x).unflatten(-1, (self.shape.kv_heads, self.shape.dim))
        v = self.v_proj(x).unflatten(-1, (self.shape.kv_heads, self.shape.dim)).transpose(1, 2)
        if self.shape.qk_norm:
            k = self.k_norm(k)
        return rotate(k.transpose(1, 2), cos_TD, sin_TD), v


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """A pre-norm Llama layer; with ``input_norm`` False, without the norm before attention (EAGLE-1/2)."""

    def __init__(self, shape: LayerShape, input_norm: bool = True) -> None:
        super().__init__()
        self.self_attn = SelfAttention(shape, shape.hidden)
        self.mlp = FeedForward(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps) if input_norm else None
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend, layer: int = 0) -> Tensor:
        """``[B, T, H]`` to ``[B, T, H]``; ``layer`` is passed on to ``attend``."""
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        x = x + self.self_attn(normed, angles, attend, layer)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def start_small(module: nn.Module, std: float = 0.02) -> None:
    """Initialise the linear layers: normal weights of standard deviation ``std``, zero biases."""
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=std)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)


def attend_rows(
    q: Tensor, prefix_k: Tensor, prefix_v: Tensor, visible_TR: Tensor, own_k: Tensor | None = None, own_v: Tensor | None = None
) -> Tensor:
    """Attention of each row over a shared prefix and over the keys of its own branch.

    Args:
        q: ``[B, G, Q/G, T, D]``.
        prefix_k, prefix_v: ``[B, G, R, D]``.
        visible_TR: ``[T, R]`` bool, the prefix rows a query may see.
        own_k, own_v: ``[B, G, T, J, D]`` or None, all visible to their row.

    Returns:
        ``[B, T, Q * D]``.
    """
    scale = q.shape[-1] ** -0.5
    scores = torch.einsum("bghtd,bgrd->bghtr", q * scale, prefix_k).masked_fill(~visible_TR, float("-inf"))
    if own_k is None or own_v is None:
        out = torch.einsum("bghtr,bgrd->bghtd", scores.softmax(-1), prefix_v)
    else:
        own = torch.einsum("bghtd,bgtjd->bghtj", q * scale, own_k)
        weights = torch.cat((scores, own), -1).softmax(-1)
        prefix_w, own_w = weights.split((prefix_k.shape[2], own_k.shape[3]), -1)
        out = torch.einsum("bghtr,bgrd->bghtd", prefix_w, prefix_v) + torch.einsum("bghtj,bgtjd->bghtd", own_w, own_v)
    return out.flatten(1, 2).transpose(1, 2).flatten(2)


def attend_blocks(
    q: Tensor, prefix_k: Tensor, prefix_v: Tensor, visible_AR: Tensor, own_k: Tensor, own_v: Tensor, *, causal: bool
) -> Tensor:
    """Attention of A blocks of M rows over the visible part of a shared prefix, and over the rows of the same block.

    Args:
        q: ``[B, G, Q/G, A * M, D]``.
        prefix_k, prefix_v: ``[B, G, R, D]``.
        visible_AR: ``[A, R]`` bool, the prefix rows that a block may see.
        own_k, own_v: ``[B, G, A * M, D]``.
        causal: a row sees the rows of its block up to itself; otherwise all of them.

    Returns:
        ``[B, A * M, Q * D]``.
    """
    blocks, rows = len(visible_AR), q.shape[3] // len(visible_AR)
    query = q.unflatten(3, (blocks, rows)) * q.shape[-1] ** -0.5
    keys, values = (x.unflatten(2, (blocks, rows)) for x in (own_k, own_v))
    scores = torch.einsum("bghamd,bgrd->bghamr", query, prefix_k).masked_fill(~visible_AR[:, None], float("-inf"))
    own = torch.einsum("bghamd,bgand->bghamn", query, keys)
    if causal:
        own = own.masked_fill(~torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril(), float("-inf"))
    prefix_w, own_w = torch.cat((scores, own), -1).softmax(-1).split((prefix_k.shape[2], rows), -1)
    out = torch.einsum("bghamr,bgrd->bghamd", prefix_w, prefix_v) + torch.einsum("bghamn,bgand->bghamd", own_w, values)
    return out.flatten(3, 4).flatten(1, 2).transpose(1, 2).flatten(2)

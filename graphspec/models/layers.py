"""Building blocks shared by targets and drafters. Parameters are left uninitialised: a checkpoint always follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .rope import apply_rope

if TYPE_CHECKING:
    from ..attention import Attention
    from ..facts import ModelFacts


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class Linear(nn.Module):
    """``x @ weight.T + bias``; ``parts`` are the output rows of the projections fused into it, in order."""

    def __init__(self, in_features: int, *parts: int, bias: bool = False) -> None:
        super().__init__()
        self.parts = parts
        self.weight: nn.Parameter | None = _parameter(sum(parts), in_features)
        self.bias = _parameter(sum(parts)) if bias else None
        self.packed: Tensor | None = None

    def pack(self) -> None:
        """Replace the weight by its packed form; from now on the native kernel multiplies. float32 on the CPU only."""
        if self.weight is None:
            return
        from ..kernels import native

        self.packed, self._multiply = native.pack_linear(self.weight), native.packed_linear
        self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        if self.packed is not None:
            out = self._multiply(x, self.packed, sum(self.parts))
            return out if self.bias is None else out + self.bias
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Token embedding in which an invalid or out-of-range token is the zero vector."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.weight = _parameter(vocab_size, hidden_size)

    def forward(self, token_BT: Tensor, valid_BT: Tensor) -> Tensor:
        """``[B, T, H]`` in the dtype of the weights, from int64 tokens and a bool mask."""
        known_BT = valid_BT & (token_BT >= 0) & (token_BT < self.vocab_size)
        hidden_BTH = F.embedding(torch.where(known_BT, token_BT, 0), self.weight)
        return torch.where(known_BT[..., None], hidden_BTH, 0.0)


class RMSNorm(nn.Module):
    """RMSNorm (arXiv 1910.07467): statistics in float32, scaled after the cast back, as transformers does.

    Args:
        size: of the last dimension.
        eps: added to the mean square.
        offset: the weight is stored minus 1; it scales before the cast back (Gemma, Qwen3.5).
    """

    def __init__(self, size: int, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = _parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; dtype and shape stay."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (wide * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)


class SelfAttention(nn.Module):
    """Projections, optional query / key norm, RoPE and optional output gate around an :class:`~graphspec.attention.Attention`.

    Args:
        facts: sizes and biases.
        layer: index of this layer, for its sliding window and its KV.
        input_size: width of the input where it isn't the hidden size.
    """

    def __init__(self, facts: ModelFacts, layer: int, input_size: int | None = None) -> None:
        super().__init__()
        query, key = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
        self.layer, self.head_dim = layer, facts.head_dim
        self.scale = facts.head_dim**-0.5
        self.window_left = facts.sliding_window[layer]
        self.gated = facts.attention_gate
        fused = (2 * query if facts.attention_gate else query, key, key)
        self.qkv_proj = Linear(input_size or facts.hidden_size, *fused, bias=facts.attention_bias)
        self.o_proj = Linear(query, facts.hidden_size, bias=facts.output_bias)
        self.q_norm = RMSNorm(facts.head_dim, facts.rms_norm_eps, facts.norm_offset) if facts.qk_norm else None
        self.k_norm = RMSNorm(facts.head_dim, facts.rms_norm_eps, facts.norm_offset) if facts.qk_norm else None

    def forward(self, x_BTH: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, attention: Attention) -> Tensor:
        """``[B, T, H]``; cos and sin are ``[B, T, D / 2]``."""
        query_BTE, *kv = self.qkv_proj(x_BTH).split(self.qkv_proj.parts, dim=-1)
        key_BTGD, value_BTGD = (part.unflatten(-1, (-1, self.head_dim)) for part in kv)
        gate_BTQD: Tensor | None = None
        if self.gated:
            query_BTQD, gate_BTQD = query_BTE.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        else:
            query_BTQD = query_BTE.unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            query_BTQD, key_BTGD = self.q_norm(query_BTQD), self.k_norm(key_BTGD)
        query_BTQD, key_BTGD = apply_rope(query_BTQD, cos_BTD, sin_BTD), apply_rope(key_BTGD, cos_BTD, sin_BTD)
        out_BTQD = attention(self.layer, query_BTQD, key_BTGD, value_BTGD, self.scale, self.window_left)
        if gate_BTQD is not None:
            out_BTQD = out_BTQD * torch.sigmoid(gate_BTQD)
        out_BTH: Tensor = self.o_proj(out_BTQD.flatten(2))
        return out_BTH


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.gate_up_proj = Linear(facts.hidden_size, facts.intermediate_size, facts.intermediate_size, bias=facts.mlp_bias)
        self.down_proj = Linear(facts.intermediate_size, facts.hidden_size, bias=facts.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., H]``."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out

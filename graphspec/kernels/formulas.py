"""Formulas that references and modules share: RMSNorm, the SwiGLU gate, rotation."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: bool = False, mean_square: Tensor | None = None) -> Tensor:
    """RMSNorm over the last dimension (arXiv 1910.07467): statistics in float32, scaled after the cast back, as transformers does.

    Args:
        x: floating point.
        weight: ``[x.shape[-1]]``; None: the norm doesn't scale.
        eps: added to the mean square.
        offset: the weight is stored minus 1; it scales before the cast back (Gemma, Qwen3.5).
        mean_square: ``[..., 1]``, float32, where ``x`` is a part of what is normed; None: it is all of it.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt((wide.pow(2).mean(-1, keepdim=True) if mean_square is None else mean_square) + eps)
    if weight is None:
        return wide.to(x.dtype)
    if offset:
        return (wide * (1.0 + weight.to(wide.dtype))).to(x.dtype)
    return weight * wide.to(x.dtype)


def silu_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[..., 2F]``, gate first (SwiGLU, arXiv 2002.05202): ``[..., F]``."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_mul(x: Tensor) -> Tensor:
    """``gelu(gate) * up`` of ``[..., 2F]``, gate first: GeGLU with the tanh approximation of GELU (arXiv 1606.08415)."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def grown(position_BT: Tensor, beta: float, context: int) -> Tensor:
    """Factor of the queries of each token, ``[B, T, 1, 1]`` float32: it grows with each ``context`` positions (Llama 4's scaling)."""
    return (1 + beta * torch.log(1 + torch.floor(position_BT / context)))[..., None, None]


class Rotation(NamedTuple):
    """A table of angles and each token's row of it. Ops look the row up themselves, which saves a launch for gathering."""

    table_LD: Tensor
    """float32 ``[L, 2d]``: d cosines, then d sines."""
    row_BT: Tensor
    """int64; clamped into the table. Only tokens whose result is unused have a row outside it."""

    def shifted(self, rows: int) -> Rotation:
        """The same positions by the table that begins ``rows`` further."""
        return self if rows == 0 else Rotation(self.table_LD, self.row_BT + rows)

    def cos_sin(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``(cos, sin)``, each ``[B, T, d]``."""
        row_BTD = self.table_LD[self.row_BT.clamp(0, self.table_LD.shape[0] - 1)].to(dtype)
        cos_BTD, sin_BTD = row_BTD.chunk(2, dim=-1)
        return cos_BTD, sin_BTD


def apply_rope(x_BTQD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + D/2)`` of every head; cos and sin are ``[B, T, D / 2]``. Channels beyond D are unchanged."""
    half = cos_BTD.shape[-1]
    first, second, rest = x_BTQD.split((half, half, x_BTQD.shape[-1] - 2 * half), dim=-1)
    cos, sin = cos_BTD[:, :, None], sin_BTD[:, :, None]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*rotated, rest) if rest.shape[-1] else rotated, dim=-1)

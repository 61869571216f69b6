"""The experts of a mixture, applied to few tokens: bound by reading weights, like every matrix product of a decode cycle."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..formulas import gelu_mul, silu_mul
from ..op import Int64, kernel_op

Weights = Callable[[Tensor | None], Tensor]
"""Matrices of experts ``[..., N, K]``: those of an index, or of None all of them in order."""


@kernel_op(native="native.experts", exact=False)
def moe_mlp(
    x_TH: Tensor,
    index_TK: Int64,
    weight_TK: Tensor,
    gate_up_EFH: Tensor,
    down_EHF: Tensor,
    gate_up_bias_EF: Tensor | None = None,
    down_bias_EH: Tensor | None = None,
    alpha: float = 1.0,
    limit: float = 0.0,
    gelu: bool = False,
) -> Tensor:
    """``sum over k of weight[t, k] * down[e](silu(gate[e] x[t]) * (up[e] x[t]))`` with ``e = index[t, k]``, in order of k.

    SwiGLU experts (arXiv 2002.05202) after ``moe_route``. Products accumulate in float32, and so does
    the sum over experts; the activation is rounded to the dtype of ``x`` before the second product. Experts without a gate compute
    ``down[e](relu(up[e] x[t]) ** 2)`` (arXiv 2109.08668). With a ``limit``, SwiGLU is clamped as in gpt-oss: with
    ``g = min(gate, limit)`` and ``u = clip(up, -limit, limit)`` it is ``g * sigmoid(alpha * g) * (u + 1)``. With ``gelu`` the
    activation is GeGLU, with the tanh approximation of GELU (arXiv 1606.08415), as in Gemma 4.

    Args:
        x_TH: floating point, any number of tokens.
        index_TK: int64 in [0, E), distinct in a row, or -1: no expert, nothing is added.
        weight_TK: float32.
        gate_up_EFH: ``[E, 2F, H]``: F rows of the gate, then F of the up projection; contiguous, dtype of ``x``. Without a gate
            ``[E, F, H]``.
        down_EHF: ``[E, H, F]``, likewise.
        gate_up_bias_EF: ``[E, 2F]``, in the order of the rows; contiguous, dtype of ``x``. Added before the activation.
        down_bias_EH: ``[E, H]``, likewise. Added before the weight of the expert applies.
        alpha, limit: static; of clamped SwiGLU. A limit of 0: plain SwiGLU.
        gelu: static; GeGLU. Only with a gate and without a limit.

    Returns:
        ``[T, H]`` in the dtype of ``x``; 0 for a token without an expert.
    """

    def gate_up(index: Tensor | None) -> Tensor:
        return gate_up_EFH if index is None else gate_up_EFH[index]

    def down(index: Tensor | None) -> Tensor:
        return down_EHF if index is None else down_EHF[index]

    experts, width = gate_up_EFH.shape[0], down_EHF.shape[2]
    return mixture(
        x_TH, index_TK, weight_TK, experts, gate_up, down, gate_up_bias_EF, down_bias_EH, width, gate_up_EFH.shape[1] // width,
        alpha, limit, gelu,
    )  # fmt: skip


def mixture(
    x_TH: Tensor,
    index_TK: Tensor,
    weight_TK: Tensor,
    experts: int,
    gate_up: Weights,
    down: Weights,
    gate_up_bias_EF: Tensor | None,
    down_bias_EH: Tensor | None,
    width: int,
    parts: int,
    alpha: float,
    limit: float,
    gelu: bool,
) -> Tensor:
    """:func:`moe_mlp` of matrices that are made when asked for.

    Args:
        x_TH, index_TK, weight_TK, gate_up_bias_EF, down_bias_EH, alpha, limit, gelu: as there.
        experts: E.
        gate_up, down: matrices of experts.
        width: F.
        parts: 2 with a gate, else 1.
    """
    tokens, topk = index_TK.shape
    wide = torch.float64 if x_TH.dtype == torch.float64 else torch.float32
    chosen_TK1 = (index_TK >= 0)[..., None]
    weight_TK1 = torch.where(chosen_TK1, weight_TK[..., None], 0.0).to(wide)
    known_TK = index_TK.clamp(min=0)

    def activate(hidden: Tensor) -> Tensor:
        assert hidden.shape[-1] == parts * width, "the rows that the down projection reads"
        if parts == 1:
            return torch.relu(hidden).square()
        if limit == 0:
            return (gelu_mul if gelu else silu_mul)(hidden)
        gate, up = hidden.chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)

    if tokens * topk <= experts:
        # Gathering reads T * K experts, a loop over all of them E.
        hidden_TKF = torch.einsum("th,tkfh->tkf", x_TH, gate_up(known_TK)).to(wide)
        if gate_up_bias_EF is not None:
            hidden_TKF = hidden_TKF + gate_up_bias_EF[known_TK].to(wide)
        active_TKF = activate(hidden_TKF).to(x_TH.dtype)
        out_TKH = torch.einsum("tkf,tkhf->tkh", active_TKF, down(known_TK)).to(wide)
    else:
        hidden_ETF = torch.matmul(x_TH, gate_up(None).transpose(1, 2)).to(wide)
        if gate_up_bias_EF is not None:
            hidden_ETF = hidden_ETF + gate_up_bias_EF[:, None].to(wide)
        active_ETF = activate(hidden_ETF).to(x_TH.dtype)
        out_ETH = torch.matmul(active_ETF, down(None).transpose(1, 2)).to(wide)
        out_TKH = out_ETH[known_TK, torch.arange(tokens, device=x_TH.device)[:, None]]
    if down_bias_EH is not None:
        out_TKH = out_TKH + down_bias_EH[known_TK].to(wide)
    return torch.where(chosen_TK1, out_TKH * weight_TK1, 0.0).sum(1).to(x_TH.dtype)

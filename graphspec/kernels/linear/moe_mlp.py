"""The experts of a mixture, applied to few tokens: bound by reading weights, like every matrix product of a decode cycle."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formulas import silu_mul
from ..op import Int64, kernel_op


@kernel_op(exact=False)
def moe_mlp(x_TH: Tensor, index_TK: Int64, weight_TK: Tensor, gate_up_EFH: Tensor, down_EHF: Tensor) -> Tensor:
    """``sum over k of weight[t, k] * down[e](silu(gate[e] x[t]) * (up[e] x[t]))`` with ``e = index[t, k]``, in order of k.

    SwiGLU experts (arXiv 2002.05202) after ``moe_route``. Products accumulate in float32, and so does
    the sum over experts; the activation is rounded to the dtype of ``x`` before the second product. Experts without a gate compute
    ``down[e](relu(up[e] x[t]) ** 2)`` (arXiv 2109.08668).

    Args:
        x_TH: floating point, any number of tokens.
        index_TK: int64 in [0, E), distinct in a row, or -1: no expert, nothing is added.
        weight_TK: float32.
        gate_up_EFH: ``[E, 2F, H]``: F rows of the gate, then F of the up projection; contiguous, dtype of ``x``. Without a gate
            ``[E, F, H]``.
        down_EHF: ``[E, H, F]``, likewise.

    Returns:
        ``[T, H]`` in the dtype of ``x``; 0 for a token without an expert.
    """
    tokens, topk = index_TK.shape
    experts = gate_up_EFH.shape[0]
    activate = silu_mul if gate_up_EFH.shape[1] == 2 * down_EHF.shape[2] else _squared_relu
    wide = torch.float64 if x_TH.dtype == torch.float64 else torch.float32
    chosen_TK1 = (index_TK >= 0)[..., None]
    weight_TK1 = torch.where(chosen_TK1, weight_TK[..., None], 0.0).to(wide)
    if tokens * topk <= experts:
        # Gathering reads T * K experts, a loop over all of them E.
        index_TK = index_TK.clamp(min=0)
        hidden_TKF = torch.einsum("th,tkfh->tkf", x_TH, gate_up_EFH[index_TK]).to(wide)
        active_TKF = activate(hidden_TKF).to(x_TH.dtype)
        out_TKH = torch.einsum("tkf,tkhf->tkh", active_TKF, down_EHF[index_TK])
    else:
        hidden_ETF = torch.matmul(x_TH, gate_up_EFH.transpose(1, 2)).to(wide)
        active_ETF = activate(hidden_ETF).to(x_TH.dtype)
        out_ETH = torch.matmul(active_ETF, down_EHF.transpose(1, 2))
        out_TKH = out_ETH[index_TK.clamp(min=0), torch.arange(tokens, device=x_TH.device)[:, None]]
    return torch.where(chosen_TK1, out_TKH.to(wide) * weight_TK1, 0.0).sum(1).to(x_TH.dtype)


def _squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x).square()

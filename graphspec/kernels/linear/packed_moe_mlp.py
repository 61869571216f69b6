"""Experts of a mixture whose weights have low precision."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Int64, kernel_op
from .moe_mlp import mixture
from .packed import Packed, dequantise, effective_scales, take_rows


@kernel_op(native="native.experts", exact=False)
def packed_moe_mlp(
    x_TH: Tensor,
    index_TK: Int64,
    weight_TK: Tensor,
    gate_up: Packed,
    down: Packed,
    gate_up_bias_EF: Tensor | None = None,
    down_bias_EH: Tensor | None = None,
    alpha: float = 1.0,
    limit: float = 0.0,
    gelu: bool = False,
) -> Tensor:
    """:func:`~graphspec.kernels.linear.moe_mlp.moe_mlp` of the weights that :func:`~graphspec.kernels.linear.packed.dequantise` gives.

    An implementation converts codes where it uses them and computes exactly what its own kernel on the dequantised weights does, bit for
    bit.

    Args:
        x_TH, index_TK, weight_TK, gate_up_bias_EF, down_bias_EH, alpha, limit, gelu: as of ``moe_mlp``.
        gate_up: ``[E * 2F, H]``, or ``[E * F, H]`` without a gate: the rows of one expert after those of another.
        down: ``[E * H, F]``, likewise.

    Returns:
        As ``moe_mlp``.
    """
    hidden, width = x_TH.shape[1], down.shape[1]
    experts = down.shape[0] // hidden
    entering = gate_up.shape[0] // experts

    def numbers(weight: Packed, rows: int, index: Tensor | None) -> Tensor:
        if index is None:
            return dequantise(weight, x_TH.dtype).unflatten(0, (experts, rows))
        if weight.scales.dtype == torch.float8_e8m0fnu:
            # Inductor can't take rows of them.
            weight = weight._replace(scales=effective_scales(weight), super_scales=None)
        row = index.flatten()[:, None] * rows + torch.arange(rows, device=index.device)
        return dequantise(take_rows(weight, row.flatten()), x_TH.dtype).view(*index.shape, rows, -1)

    return mixture(
        x_TH, index_TK, weight_TK, experts, lambda index: numbers(gate_up, entering, index), lambda index: numbers(down, hidden, index),
        gate_up_bias_EF, down_bias_EH, width, entering // width, alpha, limit, gelu,
    )  # fmt: skip

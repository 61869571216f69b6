"""Launcher of :func:`graphspec.kernels.linear.linear.sum_squares`: a program per row, whose order of summation follows from the width."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ...fused.launch import launch, register
from ._linear import _row_squares

BLOCK = 4096
"""Most channels that are added at a time."""


def launch_row_squares(x_ATH: Tensor, squares: Tensor) -> None:
    """Sums of squares of the rows of ``[A, T, H]``, any strides but with dense channels, into float32 ``[A * T]``."""
    inner, channels = x_ATH.shape[1:]
    block = min(triton.next_power_of_2(channels), BLOCK)
    launch(_row_squares, (squares.numel(),), x_ATH, squares, channels, inner, *x_ATH.stride()[:2], BLOCK=block, num_warps=4)


def sum_squares(x: Tensor) -> Tensor:
    out = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    if out.numel():
        dense = x if x.stride(-1) == 1 else x.contiguous()
        # A view wherever two strides are enough, as for heads of a projection.
        launch_row_squares(dense.reshape(-1, *dense.shape[-2:]) if dense.dim() > 1 else dense[None, None], out)
    return out


OP = register(sum_squares)

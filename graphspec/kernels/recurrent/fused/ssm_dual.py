"""Triton kernel of :mod:`graphspec.kernels.recurrent.ssm_dual`."""

from __future__ import annotations

from torch import Tensor

from ...fused.launch import register
from ._tree_states import block_nodes


def ssm_dual(
    mixed_BTE: Tensor, gate_BTG: Tensor, skip_H: Tensor, matrix_RUHKV: Tensor, layer: int, lane_row_B: Tensor, ancestors_BTX: Tensor
) -> Tensor:
    return block_nodes(mixed_BTE, gate_BTG, skip_H, matrix_RUHKV, layer, lane_row_B, ancestors_BTX)


OP = register(ssm_dual)

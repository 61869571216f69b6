"""Triton kernel of :mod:`graphspec.kernels.recurrent.delta_walk`."""

from __future__ import annotations

from torch import Tensor

from ...fused.launch import register
from ._tree_states import walk_nodes


def delta_walk(mixed_BTE: Tensor, gate_BTG: Tensor, matrix_RUHKV: Tensor, layer: int, lane_row_B: Tensor, ancestors_BTX: Tensor) -> Tensor:
    return walk_nodes(mixed_BTE, gate_BTG, None, matrix_RUHKV, layer, lane_row_B, ancestors_BTX)


OP = register(delta_walk)

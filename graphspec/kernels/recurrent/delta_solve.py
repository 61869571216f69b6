"""Gated delta rule over a tree, all nodes at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Int64, kernel_op
from .delta_rule import delta_solve_block, delta_tokens
from .state_tokens import ancestor_matrix, rows_of


@kernel_op(native="native.recurrent", exact=False)
def delta_solve(mixed_BTE: Tensor, gate_BTG: Tensor, matrix_RUHKV: Tensor, layer: int, lane_row_B: Int64, ancestors_BTX: Int64) -> Tensor:
    """What ``delta_walk`` computes, by matrix products and one triangular system per head and lane.

    Nodes are ordered, ancestors first, so the system is lower triangular; decays sum along each node's path, and pairs that share none are
    masked by a choice, never by a product. The work is that of T tokens, not of T paths, and the state is read once. Results differ from
    those of the walk by rounding, and depend on T in their last bits.

    Args:
        mixed_BTE, gate_BTG, matrix_RUHKV, layer, lane_row_B, ancestors_BTX: as there.

    Returns:
        ``[B, T, H, V]`` in the dtype of ``mixed``; 0 at unused nodes.
    """
    heads, key_dim, value_dim = matrix_RUHKV.shape[2:]
    before_BTT = ancestor_matrix(ancestors_BTX)
    used_BT = before_BTT.diagonal(dim1=1, dim2=2)
    tokens = delta_tokens(mixed_BTE, gate_BTG, heads, key_dim, value_dim).masked(used_BT)
    read_BTHV = delta_solve_block(rows_of(matrix_RUHKV, layer, lane_row_B, None), tokens, before_BTT)[0]
    return torch.where(used_BT[..., None, None], read_BTHV, 0.0).to(mixed_BTE.dtype)

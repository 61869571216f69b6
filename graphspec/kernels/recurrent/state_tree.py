"""Recurrent layers over a tree, all nodes at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Int64, kernel_op
from .state_runs import block_of, tokens_of
from .state_tokens import ancestor_matrix, rows_of


@kernel_op(native="native.recurrent", fused="state_walk:TREE_OP", exact=False)
def state_tree(
    mixed_BTE: Tensor, gate_BTG: Tensor, skip_H: Tensor | None, matrix_RUHKV: Tensor, layer: int, lane_row_B: Int64, ancestors_BTX: Int64
) -> Tensor:
    """What ``state_walk`` computes, by matrix products with decays masked by ancestors.

    Nodes are ordered, ancestors first. Decays sum along each node's path, and pairs that share none are masked by a choice, never by a
    product. The gated delta rule also solves one lower triangular system per head and lane; for the selective state space this is the dual
    form of arXiv 2405.21060, section 3. The work is that of T tokens, not of T paths, and the state is read once. Results differ from
    those of the walk by rounding, and depend on T in their last bits.

    Args:
        mixed_BTE, gate_BTG, skip_H, matrix_RUHKV, layer, lane_row_B, ancestors_BTX: as there.

    Returns:
        ``[B, T, H, V]`` in the dtype of ``mixed``; 0 at unused nodes.
    """
    before_BTT = ancestor_matrix(ancestors_BTX)
    used_BT = before_BTT.diagonal(dim1=1, dim2=2)
    tokens = tokens_of(skip_H, mixed_BTE, gate_BTG, matrix_RUHKV).masked(used_BT)
    read_BTHV = block_of(skip_H)(rows_of(matrix_RUHKV, layer, lane_row_B, None), tokens, before_BTT)[0]
    return torch.where(used_BT[..., None, None], read_BTHV, 0.0).to(mixed_BTE.dtype)

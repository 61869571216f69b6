"""Selective state space over a tree, all nodes at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Int64, kernel_op
from .ssm_rule import ssm_block, ssm_tokens
from .state_tokens import ancestor_matrix, rows_of


@kernel_op(native="native.recurrent", exact=False)
def ssm_dual(
    mixed_BTE: Tensor, gate_BTG: Tensor, skip_H: Tensor, matrix_RUHKV: Tensor, layer: int, lane_row_B: Int64, ancestors_BTX: Int64
) -> Tensor:
    """What :func:`~graphspec.kernels.recurrent.ssm_walk.ssm_walk` computes, by matrix products with decays masked by ancestors.

    The dual form of arXiv 2405.21060, section 3: decays sum along each node's path, and pairs that share none are masked by a choice, never
    by a product. The work is that of T tokens, not of T paths, and the state is read once. Results differ from those of the walk by
    rounding, and depend on T in their last bits.

    Args:
        mixed_BTE, gate_BTG, skip_H, matrix_RUHKV, layer, lane_row_B, ancestors_BTX: as there.

    Returns:
        ``[B, T, H, V]`` in the dtype of ``mixed``; 0 where a node is unused.
    """
    before_BTT = ancestor_matrix(ancestors_BTX)
    used_BT = before_BTT.diagonal(dim1=1, dim2=2)
    tokens = ssm_tokens(mixed_BTE, gate_BTG, *matrix_RUHKV.shape[2:]).masked(used_BT)
    read_BTHV = ssm_block(skip_H, rows_of(matrix_RUHKV, layer, lane_row_B, None), tokens, before_BTT)[0]
    return torch.where(used_BT[..., None, None], read_BTHV, 0.0).to(mixed_BTE.dtype)

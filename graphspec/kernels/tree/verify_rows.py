"""The target's inputs for every verify node: token, slot, position and visibility."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Int64, kernel_op
from .draft_window import LIVE


@kernel_op(native="native.state")
def verify_rows(
    lane_row_B: Int64, status_R: Int64, seq_len_R: Int64, node_token_BN: Int64, node_depth_BN: Int64, node_ancestors_BNX: Int64
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The nodes of a tree as rows of one forward pass. A node is valid if its lane is live and it has a token.

    Its KV goes to slot ``seq_len + n`` at RoPE position ``seq_len + depth``; it sees the prefix up to ``seq_len`` and its ancestors.

    Args:
        lane_row_B: int64, the row of each lane.
        status_R, seq_len_R: int64.
        node_token_BN, node_depth_BN, node_ancestors_BNX: int64, as :func:`~graphspec.kernels.tree.tree_build.tree_build` leaves them.

    Returns:
        token ``[B, N]`` int64, -1 where not valid; valid ``[B, N]`` bool; slot and position ``[B, N]`` int64; begin ``[B, N]`` int64, 0:
        the first slot a node may see; end ``[B]`` int64, that of the prefix; ancestors ``[B, N, X]`` int64, 0 where not valid.
    """
    node_N = torch.arange(node_token_BN.shape[1], device=lane_row_B.device)
    seq_B = seq_len_R[lane_row_B]
    valid_BN = (status_R[lane_row_B] == LIVE)[:, None] & (node_token_BN >= 0)
    token_BN = torch.where(valid_BN, node_token_BN, -1)
    slot_BN, position_BN = seq_B[:, None] + node_N, seq_B[:, None] + node_depth_BN
    begin_BN, ancestors_BNX = torch.zeros_like(node_token_BN), node_ancestors_BNX.masked_fill(~valid_BN[..., None], 0)
    return token_BN, valid_BN, slot_BN, position_BN, begin_BN, seq_B, ancestors_BNX

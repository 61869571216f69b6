"""The last committed tokens of each row, which bad words may begin with."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Int64, Written, kernel_op


@kernel_op(native="native.cycle", fused=None)
def node_contexts(recent_token_RBt: Int64, lane_row_B: Int64, node_token_BN: Int64, node_parent_BN: Int64) -> Tensor:
    """The last tokens up to and with each node of a tree, newest last, so that every branch is a text of its own.

    The root is the newest of its row's recent tokens; the path from it to a node comes after them. What an unused node gets has no meaning.

    Args:
        recent_token_RBt: int64, the last Bt tokens of each row, newest last; -1 before the first.
        lane_row_B: int64 row of each lane.
        node_token_BN: int64; that of node 0, the root, is not read.
        node_parent_BN: int64, below the node's own number; negative, as that of the root, counts as the root.

    Returns:
        int64 ``[B, N, Bt - 1]``.
    """
    recent_BBt = recent_token_RBt[lane_row_B]
    width, count = recent_BBt.shape[1], node_token_BN.shape[1]
    token_BM = torch.cat((recent_BBt, node_token_BN[:, 1:]), 1)
    # The token before each, the first before itself. Inductor for CUDA can't order the bounds of a clamp here, once cat has shifted them.
    place_Bt = torch.arange(width, device=token_BM.device)
    before_Bt = torch.where(place_Bt > 0, place_Bt - 1, 0).expand_as(recent_BBt)
    above_BM = torch.cat((before_Bt, node_parent_BN[:, 1:].clamp(min=0) + width - 1), 1)
    at_BN = torch.arange(width - 1, width - 1 + count, device=token_BM.device).expand_as(node_token_BN)
    found = []
    for _ in range(width - 1):
        found.append(token_BM.gather(1, at_BN))
        at_BN = above_BM.gather(1, at_BN)
    return torch.stack(found[::-1], -1) if found else token_BM.new_empty(*node_token_BN.shape, 0)


@kernel_op(native="native.cycle", fused=None)
def note_tokens(token_BN: Int64, path_BA: Int64 | None, count_B: Int64, lane_row_B: Int64, recent_token_RBt: Written[Int64]) -> None:
    """Append tokens to the recent ones of each lane's row, which keeps the last Bt, in place.

    Args:
        token_BN: int64.
        path_BA: int64, which of them follow each other: token ``path[b, i]`` is the i-th; None: all, in order.
        count_B: int64, how many are appended, at most A.
        lane_row_B: int64 row of each lane; lanes of one row agree.
        recent_token_RBt: int64, newest last; written.
    """
    token_BA = token_BN if path_BA is None else token_BN.gather(1, path_BA)
    recent_BBt = recent_token_RBt[lane_row_B]
    place_Bt = torch.arange(recent_BBt.shape[1], device=token_BN.device)
    recent_token_RBt.index_put_((lane_row_B,), torch.cat((recent_BBt, token_BA), 1).gather(1, count_B[:, None] + place_Bt))

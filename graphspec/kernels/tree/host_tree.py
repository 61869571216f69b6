"""The trees of a message, where the host drafts, as a pool of candidates."""

from __future__ import annotations

import torch

from ..groups import LIVE, Candidates
from ..op import Int64, Written, kernel_op


@kernel_op(native="native.cycle", fused=None)
def host_tree(mail: Int64, trees_at: int, capacity: int, lane_row_B: Int64, status_R: Int64, candidates: Written[Candidates]) -> None:
    """Copy the trees that the host proposed from a vector of int64 words into the pool, in place.

    The words of a lane, from ``trees_at + 2 * capacity * lane`` on, are the tokens of its nodes and then their parents; a pool reads the
    first M of each. A token below 0 is no node. A node has score 0, so that the host's order decides. What is no node, and all entries of
    a lane whose row is not live, have score -inf, token -1 and parent -1.

    Args:
        mail: int64 words.
        trees_at, capacity: static: offset of the trees, and nodes of a lane there, at least M.
        lane_row_B, status_R: int64.
        candidates: float32, int64, int64, ``[B, M]``; written.
    """
    score_BM, token_BM, parent_BM = candidates
    lanes, nodes = token_BM.shape
    node_BM, above_BM = mail[trees_at : trees_at + lanes * 2 * capacity].view(lanes, 2, capacity)[:, :, :nodes].unbind(1)
    used_BM = (status_R[lane_row_B] == LIVE)[:, None] & (node_BM >= 0)
    score_BM.copy_(torch.where(used_BM, 0.0, float("-inf")))
    token_BM.copy_(torch.where(used_BM, node_BM, -1))
    parent_BM.copy_(torch.where(used_BM, above_BM, -1))

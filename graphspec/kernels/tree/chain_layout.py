"""Verify nodes of a chain: the candidates are the nodes, in path order."""

from __future__ import annotations

import torch
from torch import Tensor

from ..groups import Nodes
from ..op import Int64, Written, kernel_op
from .tree_build import causal_words, window_root


@kernel_op(native="native.state")
def chain_layout(
    score_BM: Tensor | None,
    token_BM: Int64 | None,
    lane_row_B: Int64,
    window_token_RAc: Int64,
    window_len_R: Int64,
    nodes: Written[Nodes],
) -> None:
    """Write the root, then one candidate per level, into the slots of the nodes. Every element is written, dead lanes included.

    Node n is at depth n, its parent is node n - 1, and it sees nodes 0..n. Its token is that of candidate n - 1, or -1 where the score of
    the candidate is -inf or NaN. Node 0 is the root: ``window_token[row, max(window_len - 1, 0)]`` of row ``lane_row[b]``, parent -1. Plain
    decoding is the chain of one node.

    Args:
        score_BM, token_BM: float32 and int64, ``M = N - 1``; None where N is 1.
        lane_row_B: int64, the row of each lane.
        window_token_RAc, window_len_R: int64, ``window_len <= A``.
        nodes: int64, written.
    """
    node_token_BN, node_parent_BN, node_depth_BN, node_ancestors_BNX = nodes
    count, words = node_ancestors_BNX.shape[1:]
    node_N = torch.arange(count, device=lane_row_B.device)
    node_token_BN[:, 0] = window_root(lane_row_B, window_token_RAc, window_len_R)
    if score_BM is not None and token_BM is not None:
        node_token_BN[:, 1:] = torch.where(score_BM > -torch.inf, token_BM, -1)
    node_parent_BN.copy_((node_N - 1).expand_as(node_parent_BN))
    node_depth_BN.copy_(node_N.expand_as(node_depth_BN))
    node_ancestors_BNX.copy_(causal_words(count, words, lane_row_B.device).expand_as(node_ancestors_BNX))

"""The verify nodes: the best N-1 draft candidates as a tree, or a chain's in order, with parents, depths, ancestor words and rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..groups import LIVE, Nodes
from ..op import Int64, Written, kernel_op
from ..sampling.topk import stable_topk


def bit_words(node: Tensor, num_words: int) -> Tensor:
    """Words ``[..., num_words]`` with the bit of one node set: bit ``node % 64`` of word ``node // 64``."""
    word_X = torch.arange(num_words, device=node.device)
    return torch.where((node >> 6)[..., None] == word_X, (torch.ones_like(node) << (node & 63))[..., None], 0)


def causal_words(length: int, num_words: int, device: torch.device) -> Tensor:
    """Words ``[length, X]``: entry j sees entries 0..j."""
    entry_L1, word_X = torch.arange(length, device=device)[:, None], torch.arange(num_words, device=device)
    upto_L1 = ~(torch.full_like(entry_L1, -2) << (entry_L1 & 63))
    return torch.where(word_X < entry_L1 >> 6, -1, torch.where(word_X == entry_L1 >> 6, upto_L1, 0))


def tree_build(
    score_BM: Tensor, token_BM: Tensor, parent_BM: Tensor, root_B: Tensor, num_nodes: int, num_words: int, max_depth: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Select the N-1 best candidates and arrange them as a tree below the root (EAGLE-2, arXiv 2406.16858, section 4.2).

    The N-1 best scores, ties by pool index and NaN as -inf, become nodes 1..N-1 in the order of their pool index. The pool is in level
    order, so parents come before children. Node 0 is the root. A node is *unused* if its score is -inf, its token negative, its parent not
    a used node (not selected, unused, out of range, or not before it), or its depth greater than ``max_depth``.

    Args:
        score_BM: float32, sum of log-probabilities along the candidate's path.
        token_BM: int64 target ids, negative for no candidate.
        parent_BM: int64, pool index of the parent candidate; -1: child of the root.
        root_B: int64 token of the root.
        num_nodes: N, static, root included, ``N - 1 <= M``.
        num_words: X, static, ``64 * X >= N``.
        max_depth: S, static.

    Returns:
        token, parent, depth ``[B, N]`` and ancestors ``[B, N, X]``, all int64. Root: its token, -1, 0, bit 0. A used node: its ancestors'
        bits, root and itself included. An unused one: -1, -1, 0, its own bit only.
    """
    lanes = score_BM.shape[0]
    node_N = torch.arange(num_nodes, device=score_BM.device)
    own_NX = bit_words(node_N, num_words)
    _, pool_Bn = stable_topk(score_BM, num_nodes - 1)
    pool_Bn = pool_Bn.sort(-1).values
    candidate_parent_Bn = parent_BM.gather(1, pool_Bn)
    token_Bn = token_BM.gather(1, pool_Bn)
    # Two nodes never share a pool index, so the sum over this match is the one selected parent, or 0.
    is_parent_Bnn = candidate_parent_Bn[:, :, None] == pool_Bn[:, None, :]
    is_parent_Bnn = is_parent_Bnn & (node_N[1:, None] > node_N[None, 1:])
    parent_Bn = torch.where(is_parent_Bnn, node_N[1:], 0).sum(-1)
    linked_Bn = (candidate_parent_Bn == -1) | (parent_Bn > 0)
    usable_Bn = linked_Bn & (token_Bn >= 0) & (score_BM.gather(1, pool_Bn) > -torch.inf)

    # Unusable nodes point to themselves, so only paths of usable nodes reach the root, which points to itself too.
    up_BN = torch.cat((torch.zeros_like(root_B)[:, None], torch.where(usable_Bn, parent_Bn, node_N[1:])), 1)
    at_BN = node_N.expand(lanes, num_nodes)
    ancestors_BNX = bit_words(at_BN, num_words)
    depth_BN = torch.zeros_like(at_BN)
    for _ in range(max_depth):
        depth_BN = depth_BN + (at_BN > 0)
        at_BN = up_BN.gather(1, at_BN)
        ancestors_BNX = ancestors_BNX | bit_words(at_BN, num_words)
    used_BN = at_BN == 0
    nothing = -1
    token_BN = torch.where(used_BN, torch.cat((root_B[:, None], token_Bn), 1), nothing)
    parent_BN = torch.where(used_BN & (node_N > 0), up_BN, nothing)
    return token_BN, parent_BN, torch.where(used_BN, depth_BN, 0), torch.where(used_BN[..., None], ancestors_BNX, own_NX)


@kernel_op(name="tree_build", native="native.cycle")
def tree_build_into(
    score_BM: Tensor,
    token_BM: Int64,
    parent_BM: Int64,
    lane_row_B: Int64,
    window_token_RAc: Int64,
    window_len_R: Int64,
    nodes: Written[Nodes],
    max_depth: int,
) -> None:
    """:func:`tree_build` below each lane's root, into the slots of the nodes. Every element is written, dead lanes included.

    The root of lane b is the last entry of row ``lane_row[b]``'s window, ``window_token[row, max(window_len - 1, 0)]``: the token whose
    target KV does not exist yet.

    Args:
        score_BM, token_BM, parent_BM: float32, int64, int64; the candidate pool.
        lane_row_B: int64, the row of each lane.
        window_token_RAc, window_len_R: int64, ``window_len <= A``.
        nodes: int64, written. N and X follow from their shapes: ``N - 1 <= M``, ``64 * X >= N``.
        max_depth: S, static.
    """
    count, words = nodes.node_ancestors_BNX.shape[1:]
    root_B = window_root(lane_row_B, window_token_RAc, window_len_R)
    tree = tree_build(score_BM, token_BM, parent_BM, root_B, count, words, max_depth)
    for slot, value in zip(nodes, tree, strict=True):
        slot.copy_(value)


def window_root(lane_row_B: Tensor, window_token_RAc: Tensor, window_len_R: Tensor) -> Tensor:
    """The last entry of each lane's window, int64 ``[B]``."""
    last_B1 = (window_len_R[lane_row_B] - 1).clamp(min=0)[:, None]
    return window_token_RAc[lane_row_B].gather(1, last_B1).squeeze(1)


@kernel_op(native="native.cycle")
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


@kernel_op(native="native.cycle")
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

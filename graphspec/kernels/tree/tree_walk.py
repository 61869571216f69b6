"""Acceptance: matches sampled tokens with the tree, and cuts the run at a stop id or at the budget."""

from __future__ import annotations

import torch
from torch import Tensor

from ..groups import Limits, Nodes, Run
from ..op import Bool, Int64, Written, kernel_op
from .tree_build import bit_words

LIVE, STOPPED, OUT_OF_BUDGET = 0, 1, 2
"""Reasons for the end of a run, see :func:`tree_walk`."""
ROW_LIVE, ROW_FAILED = 1, 4
"""Row states (:class:`graphspec.plan.buffers.Status`). A live row's next state is ``ROW_LIVE`` plus the reason above."""


def tree_walk(
    token_BN: Tensor,
    parent_BN: Tensor,
    depth_BN: Tensor,
    ancestors_BNX: Tensor,
    sample_BN: Tensor,
    depth_cap_B: Tensor,
    budget_B: Tensor,
    stop_BE: Tensor,
    accept_width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample, then match: the path of nodes that agree with the target's samples, and the number of new tokens.

    Node ``n >= 1`` matches when its token is not negative, equals ``sample[parent_n]``, and its depth is within ``depth_cap`` and
    ``accept_width - 1``. It is accepted when all of its ancestors (root excluded) match. Siblings are distinct, so the accepted nodes are
    one path, of depth a; the new tokens are ``sample[path[d]]`` for d = 0..a, the last of which is the next root. They are cut after the
    first stop id and at the budget.

    Args:
        token_BN, parent_BN, depth_BN, ancestors_BNX: int64, as :func:`~graphspec.kernels.tree.tree_build.tree_build` returns them.
        sample_BN: int64, the token that the target sampled at each node.
        depth_cap_B: int64, deepest node that may be accepted; <= 0: none.
        budget_B: int64, tokens the row may still emit.
        stop_BE: int64 stop ids per lane, padded with -1.
        accept_width: A, static.

    Returns:
        path ``[B, A]``: ``path[d]`` is the accepted node of depth d; ``path[0]`` is the root, entries past the last accepted node are 0.
        It is not shortened by a stop id or the budget.
        accept_len ``[B]``: new tokens emitted, which is also the KV rows to commit (root included), in ``1..a+1``, or 0 when the budget
        was used up before.
        reason ``[B]``: 0 live, 1 stop id, 2 budget used up; a stop id wins when both fall on the same token. All int64.
    """
    device = token_BN.device
    node_N = torch.arange(token_BN.shape[1], device=device)
    is_root_N = node_N == 0
    drawn_BN = sample_BN.gather(1, parent_BN.clamp(min=0))
    cap_B1 = depth_cap_B.clamp(max=accept_width - 1)[:, None]
    match_BN = (token_BN >= 0) & (parent_BN >= 0) & (token_BN == drawn_BN) & (depth_BN <= cap_B1)
    match_BN = match_BN | is_root_N
    # Bits are distinct, so their sum is their union.
    missing_BX = torch.where(match_BN[..., None], 0, bit_words(node_N, ancestors_BNX.shape[-1])).sum(1)
    accepted_BN = match_BN & ((ancestors_BNX & missing_BX[:, None]) == 0).all(-1)

    step_A = torch.arange(accept_width, device=device)
    on_path_BAN = accepted_BN[:, None] & (depth_BN[:, None] == step_A[:, None])
    path_BA = torch.where(on_path_BAN, node_N, 0).amax(-1)
    new_B = accepted_BN.sum(-1)

    emitted_BA = sample_BN.gather(1, path_BA)
    is_stop_BA = ((emitted_BA[..., None] == stop_BE[:, None]) & (stop_BE >= 0)[:, None]).any(-1)
    stop_len_B = torch.where(is_stop_BA & (step_A < new_B[:, None]), step_A + 1, accept_width + 1).amin(-1)
    accept_len_B = torch.minimum(torch.minimum(new_B, stop_len_B), budget_B.clamp(min=0))
    reason_B = torch.where(stop_len_B == accept_len_B, STOPPED, torch.where(budget_B <= accept_len_B, OUT_OF_BUDGET, LIVE))
    return path_BA, accept_len_B, reason_B


@kernel_op(name="tree_walk", native="native.cycle")
def tree_walk_into(
    nodes: Nodes,
    drawn_BN: Int64,
    finite_BN: Bool,
    depth_cap_B: Int64 | None,
    lane_row_B: Int64,
    limits: Limits,
    draft_context: int,
    run: Written[Run],
) -> None:
    """:func:`tree_walk` of every lane within its row's limits, and the row's next status. Writes every element of four slots.

    Nodes may be accepted down to depth ``min(draft_len, draft_context - seq_len, depth_cap)``. The run ends before the first node on the
    path whose logits are not finite; if that shortens it, the row fails. Lanes of rows that are not live (``status != 1``) have an empty
    run and keep their row's status, whatever the values of their nodes and row.

    Args:
        nodes: int64, as :func:`~graphspec.kernels.tree.tree_build.tree_build_into` leaves them; ``parent < N``.
        drawn_BN: int64, the token sampled at each node.
        finite_BN: bool, the node's logits are all finite.
        depth_cap_B: int64, a further limit of the depth; None: there is none.
        lane_row_B: int64, the row of each lane.
        limits: int64, stop ids padded with -1.
        draft_context: static, positions that the drafter supports.
        run: int64, written.
            sample_BN: ``drawn``.
            path_BA: accepted node of each depth, 0 past the last; not shortened by a stop id, the budget or a failure.
            accept_len_B: tokens emitted, ``0..A``.
            outcome_B: the row's next status: 1 live, 2 stop id, 3 budget used up, 4 logits not finite, or its old status.
    """
    status_R, seq_len_R, draft_len_R, budget_R, stop_id_RE = limits
    sample_BN, path_BA, accept_len_B, outcome_B = run
    status_B, seq_B = status_R[lane_row_B], seq_len_R[lane_row_B]
    live_B = status_B == ROW_LIVE
    cap_B = torch.minimum(draft_len_R[lane_row_B], (draft_context - seq_B).clamp(min=0))
    cap_B = cap_B if depth_cap_B is None else torch.minimum(cap_B, depth_cap_B)
    accept_width = path_BA.shape[1]
    found_BA, length_B, reason_B = tree_walk(
        *nodes, drawn_BN, cap_B, budget_R[lane_row_B], stop_id_RE[lane_row_B], accept_width,
    )  # fmt: skip
    entry_A = torch.arange(accept_width, device=path_BA.device)
    sound_B = torch.where(finite_BN.gather(1, found_BA), accept_width, entry_A).amin(-1)
    failed_B = live_B & (sound_B < length_B)
    sample_BN.copy_(drawn_BN)
    path_BA.copy_(torch.where(live_B[:, None], found_BA, 0))
    accept_len_B.copy_(torch.where(live_B, torch.minimum(length_B, sound_B), 0))
    outcome_B.copy_(torch.where(failed_B, ROW_FAILED, torch.where(live_B, reason_B + ROW_LIVE, status_B)))

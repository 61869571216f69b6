"""The candidate pool of a drafter that gives every depth one distribution, the same under every parent: all levels at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..groups import LIVE, Candidates
from ..op import Int64, Written, kernel_op
from ..sampling.topk import stable_topk


@kernel_op(native="native.cycle")
def marginal_pool(increment_BSK: Tensor, next_BSK: Int64, lane_row_B: Int64, status_R: Int64, candidates: Written[Candidates]) -> None:
    """Fill the pool level by level from the K best tokens of every depth; no network runs between the levels.

    Level 1 holds the K tokens of the first depth. Level l holds K children of each of the K best candidates of level l - 1, ties by index:
    the tokens of depth l, each scored by its parent's score plus its increment, in float32. A score is -inf in a lane that is not live,
    below a parent of score -inf, and instead of NaN. If no level of the optimum is wider than K, the N - 1 best entries are the N - 1
    best prefixes under the product of the marginals, which other engines find with a heap on the host (DDTree, JetSpec).

    The pool has the layout of ``draft_level``: level 1 in entries 0..K-1, level l in the K*K entries
    from ``K + (l-2)*K*K`` on, parents as pool indices, -1: the root.

    Args:
        increment_BSK: float32 log-probabilities, one row per depth.
        next_BSK: int64 target ids.
        lane_row_B: int64 row of each lane.
        status_R: int64.
        candidates: written; float32, int64, int64. Contiguous, ``M = K + (S-1)*K*K``.
    """
    score_BM, token_BM, parent_BM = candidates
    lanes, steps, topk = increment_BSK.shape
    live_B1 = (status_R[lane_row_B] == LIVE)[:, None]
    # The root alone, where the lane is live.
    beam_BE = torch.where(live_B1, 0.0, -torch.inf)
    above_BE = torch.full_like(next_BSK[:, 0, :1], -1)
    begin = 0
    for level in range(steps):
        rows = beam_BE.shape[1]
        end = begin + rows * topk
        child_BEK = torch.where(beam_BE[..., None] > -torch.inf, beam_BE[..., None] + increment_BSK[:, level, None], -torch.inf)
        child_BC = child_BEK.flatten(1)
        child_BC = torch.where(child_BC.isnan(), -torch.inf, child_BC)
        score_BM[:, begin:end] = child_BC
        token_BM[:, begin:end] = next_BSK[:, level, None].expand(lanes, rows, topk).flatten(1)
        parent_BM[:, begin:end] = above_BE[..., None].expand(lanes, rows, topk).flatten(1)
        if level + 1 < steps:
            beam_BE, chosen_BE = stable_topk(child_BC, topk)
            above_BE = begin + chosen_BE
        begin = end

"""The candidate pool of a drafter that gives every depth one distribution, the same under every parent: all levels at once."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from ..groups import Candidates
from ..op import WRITTEN, Case, KernelOp
from ..sampling.topk import stable_topk
from .draft_window import LIVE


def marginal_pool(
    increment_BSK: Tensor, next_BSK: Tensor, lane_row_B: Tensor, status_R: Tensor, candidates: Annotated[Candidates, WRITTEN]
) -> None:
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


def _cases(generator: torch.Generator) -> list[Case]:
    def case(lanes: int, steps: int, topk: int) -> Case:
        increment = -torch.randint(0, 6, (lanes, steps, topk), generator=generator).sort(-1).values / 2
        increment[-1, -1, topk // 2 :] = -torch.inf
        increment[0, steps // 2, -1] = torch.nan
        status = torch.randint(0, 2, (lanes + 1,), generator=generator)
        status[0] = LIVE
        pool = topk + (steps - 1) * topk**2
        return {
            "increment_BSK": increment,
            "next_BSK": torch.randint(0, 50, (lanes, steps, topk), generator=generator),
            "lane_row_B": torch.randperm(lanes + 1, generator=generator)[:lanes],
            "status_R": status,
            "candidate_score_BM": torch.full((lanes, pool), torch.nan),
            "candidate_token_BM": torch.full((lanes, pool), -7_777),
            "candidate_parent_BM": torch.full((lanes, pool), -7_777),
        }

    return [case(1, 1, 1), case(3, 4, 3), case(2, 1, 8), case(4, 5, 1), case(2, 20, 7), case(1, 3, 33), case(3, 6, 8)]


OP = KernelOp(marginal_pool, _cases, native="native.cycle")

"""Draft candidates from the request's history: continuations of earlier occurrences of its last tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..groups import LIVE, Candidates
from ..op import Int64, Written, kernel_op

PATH_COST = 4
"""Number of tokens of depth that cost as much as a change to the next best path."""


def _suffix_match(history_BT: Tensor, last_B: Tensor, max_match: int) -> Tensor:
    """Length ``[B, T]`` of the common suffix of ``history[:t + 1]`` and ``history[:last + 1]``, up to ``max_match``; for t < last only."""
    lanes, width = history_BT.shape
    matched_BT = torch.zeros_like(history_BT)
    running_BT = torch.ones_like(history_BT, dtype=torch.bool)
    for back in range(min(max_match, width)):
        wanted_B1 = history_BT.gather(1, (last_B - back)[:, None].clamp(0, width - 1))
        equal_BT = history_BT[:, : width - back] == wanted_B1
        before_start = torch.zeros(lanes, back, dtype=torch.bool, device=history_BT.device)
        running_BT = running_BT & torch.cat((before_start, equal_BT), 1)
        matched_BT = matched_BT + running_BT
    return matched_BT


@kernel_op(native="native.cycle")
def ngram_match(
    history_RL: Int64,
    lane_row_B: Int64,
    status_R: Int64,
    seq_len_R: Int64,
    candidates: Written[Candidates],
    num_paths: int,
    depth: int,
    min_match: int,
    max_match: int,
) -> None:
    """Up to K continuations of earlier occurrences of the last tokens, merged into a candidate pool for ``tree_build`` (prompt lookup).

    An *occurrence* is a position t before the root at which at least the ``min_match`` last tokens equal those of the root. Its
    *continuation* is the tokens after it, up to S and up to the root. Occurrences are ranked by the number of matching tokens, up to
    ``max_match``, then the most recent first. Path k starts as the continuation of the best occurrence that is not a prefix of an earlier
    path; it is then extended to the longest continuation that begins with it (ties by rank), because in repetitive text the root cuts the
    most recent occurrence short. So no path is a prefix of another, and a loop fills one path instead of many.

    Paths are merged: an entry whose tokens from the root on equal those of an earlier path is dropped, and that path's entry becomes the
    parent of its children. Scores are ``-((d - 1) + 4 * k)``, not probabilities: each is below its parent's, below those of shallower
    entries of its path and below those of earlier paths at its depth.

    Cost: ``O(B * T * (max_match + K * S))`` compares and ``O(B * T * S)`` bytes if nothing is fused; T is the context limit here, and a
    row's length in implementations that read no more. Nothing is read on the host, so this drafter is a stage of the cycle like any other;
    the host trie (:mod:`graphspec.drafters.ngram_trie`) needs each cycle's tokens first.

    Args:
        history_RL: int64 token ids of every row, not negative up to the row's length; arbitrary after it. L is static, the context limit.
        lane_row_B: int64 row of each lane.
        status_R, seq_len_R: int64. A live row has ``seq_len + 1 <= L`` tokens, the last of which is the root; others have none.
        candidates: float32, int64, int64, ``[B, K * S]``, written whole: entry ``(d - 1) * K + k`` is depth d of path k, so that parents
            come before children. Parent is a pool index, -1: the root. An entry that is not used has score -inf, token -1 and parent -1.
        num_paths: K, static.
        depth: S, static.
        min_match, max_match: static, ``1 <= min_match <= max_match``.
    """
    length_B = torch.where(status_R[lane_row_B] == LIVE, seq_len_R[lane_row_B] + 1, 0)
    pool = match_rows(history_RL[lane_row_B], length_B, num_paths, depth, min_match, max_match)
    for slot, value in zip(candidates, pool, strict=True):
        slot.copy_(value)


def match_rows(
    history_BT: Tensor, length_B: Tensor, num_paths: int, depth: int, min_match: int, max_match: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Score, token and parent ``[B, K * S]`` of :func:`ngram_match` for lanes with the first ``length`` tokens of ``history``."""
    assert 1 <= min_match <= max_match
    width, device = history_BT.shape[1], history_BT.device
    last_B1 = length_B[:, None] - 1
    place_T, step_S = torch.arange(width, device=device), torch.arange(depth, device=device)
    matched_BT = _suffix_match(history_BT, length_B - 1, max_match)
    usable_BT = (matched_BT >= min_match) & (place_T < last_B1)
    count_BT = (last_B1 - place_T).clamp(0, depth)
    rank_BT = matched_BT * width + place_T
    longest_BT = count_BT * ((max_match + 1) * width) + rank_BT
    padded = torch.cat((history_BT, history_BT.new_zeros(history_BT.shape[0], depth)), 1)
    follow_BTS = padded[:, 1:].unfold(1, depth, 1)
    beyond_BTS = step_S >= count_BT[..., None]

    open_BT, paths = usable_BT, []
    for _ in range(num_paths):
        start_B1 = torch.where(open_BT, rank_BT, -1).amax(1, keepdim=True)
        place_B1 = start_B1.clamp(min=0) % width
        seed_BS = padded.gather(1, place_B1 + 1 + step_S)
        seed_count_B1 = count_BT.gather(1, place_B1)
        begins_BT = ((follow_BTS == seed_BS[:, None]) | (step_S >= seed_count_B1)[:, None]).all(-1) & (count_BT >= seed_count_B1)
        place_B1 = torch.where(usable_BT & begins_BT, longest_BT, 0).amax(1, keepdim=True) % width
        path_BS, path_count_B1 = padded.gather(1, place_B1 + 1 + step_S), count_BT.gather(1, place_B1)
        # No longer continuation begins with this path, so one that equals it up to its own end is a prefix of the path.
        open_BT = open_BT & ~((follow_BTS == path_BS[:, None]) | beyond_BTS).all(-1)
        paths.append(torch.where((start_B1 >= 0) & (step_S < path_count_B1), path_BS, -1))

    path_BKS = torch.stack(paths, 1)
    known_BKS = path_BKS >= 0
    # same[k, j, d]: paths k and j share their first d + 1 tokens. The entry of the first such j is the one that is kept.
    same_BKKS = ((path_BKS[:, :, None] == path_BKS[:, None]) & known_BKS[:, :, None]).to(torch.int32).cumprod(-1)
    keeper_BKS = same_BKKS.argmax(2)
    path_K1 = torch.arange(num_paths, device=device)[:, None]
    used_BKS = known_BKS & (keeper_BKS == path_K1)
    above_BKS = torch.cat((torch.full_like(keeper_BKS[..., :1], -1), keeper_BKS[..., :-1] + num_paths * step_S[:-1]), -1)
    score_BKS = torch.where(used_BKS, -(step_S + PATH_COST * path_K1).to(torch.float32), -torch.inf)
    token_BKS, parent_BKS = torch.where(used_BKS, path_BKS, -1), torch.where(used_BKS, above_BKS, -1)
    score_BM, token_BM, parent_BM = (x.transpose(1, 2).flatten(1) for x in (score_BKS, token_BKS, parent_BKS))
    return score_BM, token_BM, parent_BM

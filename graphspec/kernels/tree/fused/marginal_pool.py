"""Triton kernel of :mod:`graphspec.kernels.tree.marginal_pool`: one launch for all levels, one program per lane."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register
from ...groups import LIVE, Candidates
from ...sampling.fused._vocabulary import pack, packed_index, packed_value


@triton.jit
def _marginal_pool(
    increment, next_token, lane_row, status, score, token, parent, steps, pool,
    K: tl.constexpr, K_PAD: tl.constexpr, C_PAD: tl.constexpr, LIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per lane. Beams stay in registers: no level reads what another has stored."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.program_id(0).to(tl.int64)
    live = tl.load(status + tl.load(lane_row + lane)) == LIVE
    place = tl.arange(0, C_PAD)
    source, rank = place // K, place % K
    # Before level 1 there is one beam, the root.
    beam = tl.arange(0, K_PAD)
    base = tl.where(live & (beam == 0), 0.0, float("-inf"))
    above = tl.full([K_PAD], -1, tl.int32)
    begin = 0
    count = K
    for level in range(steps):
        inside = place < count
        row = (lane * steps + level) * K
        at = tl.where(inside, source, 0)
        out = lane * pool + begin + place
        # Tokens and parents first, scores last: fewer registers are live at a time.
        tl.store(token + out, tl.load(next_token + row + rank, mask=inside, other=-1), mask=inside)
        tl.store(parent + out, tl.gather(above, at, 0).to(tl.int64), mask=inside)
        before = tl.gather(base, at, 0)
        added = tl.load(increment + row + rank, mask=inside, other=float("-inf"))
        total = tl.where(inside & (before > float("-inf")), before + added, float("-inf"))
        total = tl.where(total == total, total, float("-inf"))
        tl.store(score + out, total, mask=inside)
        # Padding loses even against -inf inside the level, since ties go to the lower index.
        key = pack(total, place)
        best = key
        if K_PAD < C_PAD:
            best = tl.topk(key, K_PAD)
        elif C_PAD > 1:
            best = tl.sort(key, descending=True)
        kept = beam < K
        base = tl.where(kept, packed_value(best), float("-inf"))
        above = tl.where(kept, begin + packed_index(best), -1).to(tl.int32)
        begin += count
        count = K * K


def marginal_pool(increment_BSK: Tensor, next_BSK: Tensor, lane_row_B: Tensor, status_R: Tensor, candidates: Candidates) -> None:
    lanes, steps, topk = increment_BSK.shape
    padded = triton.next_power_of_2(topk * topk)
    launch(
        _marginal_pool, (lanes,),
        increment_BSK.contiguous(), next_BSK.contiguous(), lane_row_B, status_R, *candidates, steps, candidates.candidate_score_BM.shape[1],
        K=topk, K_PAD=triton.next_power_of_2(topk), C_PAD=padded, LIVE=LIVE, num_warps=1 if padded <= 128 else 4 if padded <= 1024 else 8,
    )  # fmt: skip


OP = register(marginal_pool)

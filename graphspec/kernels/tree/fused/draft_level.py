"""Triton kernel of :mod:`graphspec.kernels.tree.draft_level`: one launch, one program per lane."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register
from ...groups import LIVE, Beams, Candidates

MINUS_INFINITY = tl.constexpr(-0x7F800001)
"""``_ordered(-inf)``."""


@triton.jit
def _ordered(score):
    """An int32 with the order of the float32, which is neither NaN nor -0.0."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _draft_level(
    increment, next_token, lane_row, status, seq_len, score, token, parent,
    beam_token, beam_index, beam_source, beam_path, beam_ancestors, beam_valid, beam_slot, beam_position, beam_end, next_position,
    level, shift, pool, steps, K: tl.constexpr, X: tl.constexpr,
    K_PAD: tl.constexpr, C_PAD: tl.constexpr, S_PAD: tl.constexpr, X_PAD: tl.constexpr,
    FIRST: tl.constexpr, BEAMS: tl.constexpr, LIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.program_id(0).to(tl.int64)
    row = tl.load(lane_row + lane)
    live = tl.load(status + row) == LIVE
    candidates: tl.constexpr = K if FIRST else K * K
    begin = 0 if FIRST else K + (level - 2) * K * K
    place = tl.arange(0, C_PAD)
    inside = place < candidates
    added = tl.load(increment + lane * candidates + place, mask=inside, other=float("-inf"))
    drawn = tl.load(next_token + lane * candidates + place, mask=inside, other=-1)
    if FIRST:
        above = tl.full([C_PAD], -1, tl.int64)
        total = tl.where(live, added, float("-inf"))
    else:
        above = tl.load(beam_index + lane * K + place // K, mask=inside, other=0)
        base = tl.load(score + lane * pool + above, mask=inside, other=float("-inf"))
        total = tl.where(live & (base > float("-inf")), base + added, float("-inf"))
    total = tl.where(total == total, total, float("-inf"))
    at = lane * pool + begin + place
    tl.store(score + at, total, mask=inside)
    tl.store(token + at, drawn, mask=inside)
    tl.store(parent + at, above, mask=inside)
    if BEAMS:
        # One word per candidate: score in the high half, complement of the index in the low half, so that ties go to the lower index.
        key = _ordered(tl.where(total == 0.0, 0.0, total)).to(tl.int64) << 32 | (C_PAD - 1 - place)
        key = tl.where(inside, key, -0x7FFFFFFFFFFFFFFF)
        best = key
        if K_PAD < C_PAD:
            best = tl.topk(key, K_PAD)
        elif C_PAD > 1:
            best = tl.sort(key, descending=True)
        beam = tl.arange(0, K_PAD)
        kept = beam < K
        chosen = tl.where(kept, C_PAD - 1 - (best & 0xFFFFFFFF), 0)
        valid = kept & live & ((best >> 32) > MINUS_INFINITY)
        source = chosen // K
        own = tl.load(next_token + lane * candidates + chosen, mask=kept)
        sequence = tl.load(seq_len + row)
        bit = (level - 1) * K + beam
        word, step = tl.arange(0, X_PAD), tl.arange(0, S_PAD)
        words = tl.where((bit // 64)[:, None] == word[None, :], tl.full([K_PAD, X_PAD], 1, tl.int64) << (bit % 64)[:, None].to(tl.int64), 0)
        at_word = (lane * K + beam)[:, None] * X + word[None, :]
        at_step = (lane * K + beam)[:, None] * steps + step[None, :]
        held = kept[:, None] & (word < X)[None, :]
        older = kept[:, None] & (step < level - 1)[None, :]
        if not FIRST:
            words |= tl.load(beam_ancestors + (lane * K + source)[:, None] * X + word[None, :], mask=held, other=0)
            path = tl.load(beam_path + (lane * K + source)[:, None] * steps + step[None, :], mask=older, other=-1)
            # All beams are read before any is overwritten.
            tl.debug_barrier()
            tl.store(beam_path + at_step, path, mask=older)
        tl.store(beam_ancestors + at_word, tl.where(valid[:, None], words, 0), mask=held)
        at = lane * K + beam
        tl.store(beam_path + at * steps + level - 1, own, mask=kept)
        tl.store(beam_token + at, tl.where(valid, own, -1), mask=kept)
        tl.store(beam_index + at, begin + chosen, mask=kept)
        tl.store(beam_source + at, source, mask=kept)
        tl.store(beam_valid + at, valid, mask=kept)
        tl.store(beam_slot + at, sequence + 1 + bit, mask=kept)
        tl.store(beam_position + at, sequence + level - shift + tl.zeros([K_PAD], tl.int64), mask=kept)
        tl.store(beam_end + lane, sequence + 1)
        tl.store(next_position + lane, sequence + 1 + level)


def draft_level(
    increment_BEK: Tensor,
    next_BEK: Tensor,
    level: int,
    beams: bool,
    shift: int,
    lane_row_B: Tensor,
    status_R: Tensor,
    seq_len_R: Tensor,
    candidates: Candidates,
    carried: Beams,
) -> None:
    lanes, rows, topk = increment_BEK.shape
    steps, num_words = carried.beam_path_BKS.shape[2], carried.beam_ancestors_BKX.shape[2]
    padded = triton.next_power_of_2(rows * topk)
    launch(
        _draft_level, (lanes,),
        increment_BEK, next_BEK, lane_row_B, status_R, seq_len_R, *candidates, *carried,
        level, shift, candidates.candidate_score_BM.shape[1], steps,
        K=topk, X=num_words, K_PAD=triton.next_power_of_2(topk), C_PAD=padded, S_PAD=triton.next_power_of_2(steps),
        X_PAD=triton.next_power_of_2(num_words), FIRST=level == 1, BEAMS=beams, LIVE=LIVE,
        num_warps=1 if padded <= 128 else 4 if padded <= 1024 else 8,
    )  # fmt: skip


OP = register(draft_level)

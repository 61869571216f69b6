"""Triton kernel of :mod:`graphspec.kernels.tree.draft_level` and of :mod:`graphspec.kernels.tree.shard_topk`: one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register, semaphores
from ...fused.work import works
from ...sampling.fused._vocabulary import (  # fmt: skip
    LOWEST,
    arrive,
    exp_exact,
    hash_words,
    is_finite,
    log_exact,
    pack,
    packed_index,
    packed_value,
    perturb,
    vocabulary_work,
)

CHUNK = 1024
"""Columns per program. Sums of exponentials are added chunk by chunk, so it must not depend on the batch."""
MERGE = 4096
"""Chunk winners compared at once; more are processed in several steps."""


@works(vocabulary_work)
@triton.jit
def _draft_topk(
    logits, target_token, seed, position, temperature, part_best, part_peak, part_total, part_fault, counters, score, token, total, sound,
    vocab, parts, rows_per_lane, topk,
    MAPPED: tl.constexpr, NOISY: tl.constexpr, SHARD: tl.constexpr, PARTS: tl.constexpr, MERGE: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each program finds the top K of a chunk and its sum of exponentials; the last program of a row merges the chunks in order.

    Keys are packed with their index, so the next best is the largest word below the last one, and nothing has to be removed. With
    ``SHARD`` the columns are those of one rank: keys are returned unnormalised along with sum and soundness, and columns whose token is
    -1 are ignored.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = part * CHUNK + tl.arange(0, CHUNK)
    inside = column < vocab
    x = tl.load(logits + row * vocab + column, mask=inside, other=float("-inf"))
    key = tl.where(is_finite(x), x, float("-inf"))
    if SHARD:
        there = tl.load(target_token + column, mask=inside, other=-1) >= 0
        key = tl.where(there, key, float("-inf"))
        tl.store(part_fault + row * parts + part, tl.max((there & ~is_finite(x)).to(tl.int32)))
    if NOISY:
        lane = row // rows_per_lane
        row_temperature = tl.load(temperature + lane)
        a, b = hash_words(tl.load(seed + lane), tl.load(position + (row if SHARD else lane)))
        target = tl.load(target_token + column, mask=inside, other=0) if MAPPED else column
        key = perturb(key, row_temperature, a, b, target)
    words = tl.where(inside, pack(key, column), LOWEST)
    best = tl.max(words)
    peak = tl.where(best == LOWEST, float("-inf"), packed_value(best))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(part_peak + row * parts + part, base)
    tl.store(part_total + row * parts + part, tl.sum(exp_exact(key - base)))
    out = part_best + (row * parts + part) * topk
    tl.store(out, best)
    rank = 1
    while rank < topk:
        best = tl.max(tl.where(words < best, words, LOWEST))
        tl.store(out + rank, best)
        rank += 1

    if arrive(counters + row, parts):
        winners = part_best + row * parts * topk
        winner_count = parts * topk
        place = tl.arange(0, MERGE)
        first_winners = tl.load(winners + place, mask=place < winner_count, other=LOWEST)
        best = tl.max(first_winners)
        begin = MERGE
        while begin < winner_count:
            next_winners = tl.load(winners + begin + place, mask=begin + place < winner_count, other=LOWEST)
            best = tl.maximum(best, tl.max(next_winners))
            begin += MERGE
        peak = packed_value(best)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        slot = tl.arange(0, PARTS)
        totals = tl.load(part_total + row * parts + slot, mask=slot < parts, other=0.0)
        bases = tl.load(part_peak + row * parts + slot, mask=slot < parts, other=0.0)
        # A chunk without a finite key has total 0 and base 0, which may be far above the peak.
        scale = exp_exact(tl.where(totals > 0, bases - base, 0.0))
        whole = tl.sum(totals * scale)
        log_total = log_exact(tl.maximum(whole, 1e-30))
        if SHARD:
            tl.store(total + row, whole)
            faults = tl.load(part_fault + row * parts + slot, mask=slot < parts, other=0)
            tl.store(sound + row, tl.max(faults) == 0)
        rank = 0
        while rank < topk:
            index = packed_index(best)
            value = packed_value(best)
            share = value
            if not SHARD:
                share = tl.where(value == float("-inf"), float("-inf"), value - base - log_total)
            tl.store(score + row * topk + rank, share)
            if MAPPED:
                tl.store(token + row * topk + rank, tl.load(target_token + index))
            else:
                tl.store(token + row * topk + rank, index)
            last = best
            best = tl.max(tl.where(first_winners < last, first_winners, LOWEST))
            begin = MERGE
            while begin < winner_count:
                next_winners = tl.load(winners + begin + place, mask=begin + place < winner_count, other=LOWEST)
                best = tl.maximum(best, tl.max(tl.where(next_winners < last, next_winners, LOWEST)))
                begin += MERGE
            rank += 1


def _ranked(
    logits: Tensor, topk: int, target_token: Tensor | None, seed_B: Tensor | None, position: Tensor | None, temperature_B: Tensor | None,
    shard: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    logits = logits.contiguous()
    lanes, rows_per_lane, vocab = logits.shape
    rows, parts, device = lanes * rows_per_lane, triton.cdiv(vocab, CHUNK), logits.device
    if position is not None:
        position = position.contiguous()
    score_BTK = torch.empty(lanes, rows_per_lane, topk, dtype=torch.float32, device=device)
    token_BTK = torch.empty(lanes, rows_per_lane, topk, dtype=torch.int64, device=device)
    part_best = torch.empty(rows, parts, topk, dtype=torch.int64, device=device)
    part_peak, part_total = (torch.empty(rows, parts, dtype=torch.float32, device=device) for _ in range(2))
    further: tuple[Tensor, ...] = ()
    part_fault = None
    if shard:
        part_fault = torch.empty(rows, parts, dtype=torch.int32, device=device)
        further = tuple(torch.empty(lanes, rows_per_lane, dtype=dtype, device=device) for dtype in (torch.float32, torch.bool))
    launch(
        _draft_topk, (parts, rows), logits, target_token, seed_B, position, temperature_B, part_best, part_peak, part_total, part_fault,
        semaphores(device, rows), score_BTK, token_BTK, *(further or (None, None)), vocab, parts, rows_per_lane, topk,
        MAPPED=target_token is not None, NOISY=seed_B is not None, SHARD=shard, PARTS=triton.next_power_of_2(parts),
        MERGE=min(MERGE, triton.next_power_of_2(parts * topk)), CHUNK=CHUNK,
    )  # fmt: skip
    return score_BTK, token_BTK, *further


def draft_topk(
    logits_BTVd: Tensor, topk: int, target_token_Vd: Tensor | None, seed_B: Tensor | None, position_B: Tensor | None,
    temperature_B: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    logprob_BTK, token_BTK = _ranked(logits_BTVd, topk, target_token_Vd, seed_B, position_B, temperature_B, False)
    return logprob_BTK, token_BTK


def shard_topk(
    logits_BTVr: Tensor, topk: int, token_Vr: Tensor, temperature_B: Tensor | None, seed_B: Tensor | None, position_BT: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    key_BTK, token_BTK, total_BT, sound_BT = _ranked(logits_BTVr, topk, token_Vr, seed_B, position_BT, temperature_B, True)
    return key_BTK, token_BTK, total_BT, sound_BT


OP, SHARD_OP = register(draft_topk), register(shard_topk)

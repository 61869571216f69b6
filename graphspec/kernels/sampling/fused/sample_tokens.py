"""Triton kernel of :mod:`graphspec.kernels.sampling.sample_tokens`: one launch, preceded by four if rows may be filtered."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register, semaphores
from ...fused.work import works
from ._thresholds import BLOCK, Split, thresholds
from ._vocabulary import LOWEST, arrive, hash_words, is_finite, pack, packed_index, packed_value, perturb, vocabulary_work


@works(vocabulary_work)
@triton.jit
def _sample_tokens(
    logits, temperature, seed, position, threshold, part_best, part_flag, counters, token, sound, vocab, parts, rows_per_lane,
    NOISY: tl.constexpr, FILTERED: tl.constexpr, STRICT: tl.constexpr,
    STEPS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program finds the best key of a part of a row; the last program of a row compares the parts."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    best = tl.full([BLOCK], LOWEST, tl.int64)
    flag = tl.zeros([BLOCK], tl.int32)
    row_temperature = tl.zeros([], tl.float32)
    if NOISY:
        row_temperature = tl.load(temperature + row // rows_per_lane)
        a, b = hash_words(tl.load(seed + row // rows_per_lane), tl.load(position + row))
    if FILTERED:
        row_threshold = tl.load(threshold + row, mask=row_temperature > 0, other=float("-inf"))
    for step in tl.static_range(STEPS):
        column = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + column, mask=column < vocab, other=0.0)
        finite = is_finite(x)
        key = tl.where(finite, x, float("-inf"))
        if FILTERED:
            key = tl.where(x >= row_threshold, key, float("-inf"))
        else:
            flag = tl.maximum(flag, tl.where(finite, 0, tl.where(x == float("-inf"), 1, 2)))
        if NOISY:
            key = perturb(key, row_temperature, a, b, column)
        best = tl.maximum(best, tl.where(column < vocab, pack(key, column), LOWEST))
    tl.store(part_best + row * parts + part, tl.max(best))
    if not FILTERED:
        tl.store(part_flag + row * parts + part, tl.max(flag))
    if arrive(counters + row, parts):
        slot = tl.arange(0, PARTS)
        top = tl.max(tl.load(part_best + row * parts + slot, mask=slot < parts, other=LOWEST))
        tl.store(token + row, packed_index(top))
        if not FILTERED:
            worst = tl.max(tl.load(part_flag + row * parts + slot, mask=slot < parts, other=0))
            if STRICT:
                tl.store(sound + row, worst == 0)
            else:
                tl.store(sound + row, (worst < 2) & (packed_value(top) > float("-inf")))


def sample_tokens(
    logits_BTV: Tensor, temperature_B: Tensor | None, seed_B: Tensor | None, position_BT: Tensor | None, top_k_B: Tensor | None,
    top_p_B: Tensor | None, min_p_B: Tensor | None, strict: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    logits_BTV = logits_BTV.contiguous()
    lanes, rows_per_lane, vocab = logits_BTV.shape
    rows, device = lanes * rows_per_lane, logits_BTV.device
    split, threshold_BT = Split.of(rows, vocab), None
    if top_k_B is not None:
        assert temperature_B is not None and top_p_B is not None and min_p_B is not None
        threshold_BT, sound_BT = thresholds(logits_BTV, temperature_B, top_k_B, top_p_B, min_p_B, strict)
    else:
        sound_BT = torch.empty(lanes, rows_per_lane, dtype=torch.bool, device=device)
    if position_BT is not None:
        position_BT = position_BT.contiguous()
    token_BT = torch.empty(lanes, rows_per_lane, dtype=torch.int64, device=device)
    part_best = torch.empty(rows, split.parts, dtype=torch.int64, device=device)
    part_flag = torch.empty(rows, split.parts, dtype=torch.int32, device=device)
    launch(
        _sample_tokens, (split.parts, rows), logits_BTV, temperature_B, seed_B, position_BT, threshold_BT, part_best, part_flag,
        semaphores(device, rows), token_BT, sound_BT, vocab, split.parts, rows_per_lane,
        NOISY=temperature_B is not None, FILTERED=top_k_B is not None, STRICT=strict,
        STEPS=split.steps, PARTS=triton.next_power_of_2(split.parts), BLOCK=BLOCK,
    )  # fmt: skip
    return token_BT, sound_BT


OP = register(sample_tokens)

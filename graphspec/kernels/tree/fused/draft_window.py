"""Triton kernel of :mod:`graphspec.kernels.tree.draft_window`: one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register
from ...groups import LIVE, Window

BLOCK = 2048


@triton.jit
def _draft_window(
    lane_row, status, seq_len, window_len, window_token, window_feature, lookback_token, lookback_feature,
    out_token, out_valid, out_slot, out_position, out_begin, out_words, out_known, out_next, out_feature,
    width, capacity, lookback, features, shift,
    X: tl.constexpr, U_PAD: tl.constexpr, X_PAD: tl.constexpr, LIVE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (b, 0) writes everything but features; program (b, 1 + u * chunks + c) copies chunk c of the features of entry u."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.program_id(0).to(tl.int64)
    width += lookback
    row = tl.load(lane_row + lane)
    live = tl.load(status + row) == LIVE
    sequence = tl.load(seq_len + row)
    length = tl.where(live, tl.load(window_len + row), 0)
    begin = sequence - length + 1 - lookback
    skip = tl.minimum(tl.maximum(shift - begin, 0), lookback)
    begin += skip
    known = tl.where(live, lookback + length - skip, 0)
    if tl.program_id(1) == 0:
        entry = tl.arange(0, U_PAD)
        inside = entry < width
        valid = inside & (entry < known)
        index = tl.minimum(entry + skip, width - 1)
        token = tl.load(window_token + row * capacity + index - lookback, mask=valid & (index >= lookback), other=-1)
        if lookback_token is not None:
            before = tl.load(lookback_token + row * lookback + index, mask=valid & (index < lookback), other=-1)
            token = tl.where(index < lookback, before, token)
        at = lane * width + entry
        tl.store(out_token + at, token, mask=inside)
        tl.store(out_valid + at, valid, mask=inside)
        tl.store(out_slot + at, begin + entry, mask=inside)
        tl.store(out_position + at, begin + entry - shift, mask=inside)
        word = tl.arange(0, X_PAD)
        # Word x of entry u has its lowest u + 1 - 64 x bits set.
        bits = (entry[:, None] + 1 - 64 * word[None, :]).to(tl.int64)
        partial = (tl.full([U_PAD, X_PAD], 1, tl.int64) << tl.minimum(tl.maximum(bits, 0), 63)) - 1
        words = tl.where(valid[:, None], tl.where(bits >= 64, -1, partial), 0)
        tl.store(out_words + at[:, None] * X + word[None, :], words, mask=inside[:, None] & (word < X)[None, :])
        tl.store(out_begin + lane, begin)
        tl.store(out_known + lane, known)
        tl.store(out_next + lane, sequence + 1)
    elif window_feature is not None:
        chunks = tl.cdiv(features, BLOCK)
        piece = tl.program_id(1) - 1
        place = piece // chunks
        channel = (piece % chunks) * BLOCK + tl.arange(0, BLOCK)
        within = channel < features
        held = place < known
        origin = tl.minimum(place + skip, width - 1)
        newer = window_feature + (row * capacity + origin - lookback) * features + channel
        copied = tl.load(newer, mask=within & held & (origin >= lookback), other=0.0)
        if lookback_feature is not None:
            earlier = lookback_feature + (row * lookback + origin) * features + channel
            copied = tl.where(origin < lookback, tl.load(earlier, mask=within & held & (origin < lookback), other=0.0), copied)
        tl.store(out_feature + (lane * width + place) * features + channel, copied, mask=within)


def draft_window(
    lane_row_B: Tensor,
    status_R: Tensor,
    seq_len_R: Tensor,
    window: Window,
    shift: int,
    width: int,
    num_words: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    lanes, features, dtype = lane_row_B.shape[0], 0, torch.float32
    entries = width + (0 if window.lookback_token_RY is None else window.lookback_token_RY.shape[1])
    if window.window_feature_RAcF is not None:
        features, dtype = window.window_feature_RAcF.shape[2], window.window_feature_RAcF.dtype
    token, slot, position = (lane_row_B.new_empty(lanes, entries) for _ in range(3))
    begin, known, following = (lane_row_B.new_empty(lanes) for _ in range(3))
    valid, words = lane_row_B.new_empty(lanes, entries, dtype=torch.bool), lane_row_B.new_empty(lanes, entries, num_words)
    results = token, valid, slot, position, begin, words, known, following, lane_row_B.new_empty(lanes, entries, features, dtype=dtype)
    launch(
        _draft_window, (lanes, 1 + entries * triton.cdiv(features, BLOCK)), lane_row_B, status_R, seq_len_R, *window,
        *results, width, window.window_token_RAc.shape[1], entries - width, features, shift,
        X=num_words, U_PAD=triton.next_power_of_2(entries), X_PAD=triton.next_power_of_2(num_words), LIVE=LIVE, BLOCK=BLOCK,
    )  # fmt: skip
    return results


OP = register(draft_window)

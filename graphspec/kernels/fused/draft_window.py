"""Triton kernel of :mod:`graphspec.kernels.draft_window`: one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..draft_window import LIVE
from .launch import AotCase, launch, register

BLOCK = 2048


@triton.jit
def _draft_window(
    lane_row, status, seq_len, window_len, window_token, window_feature, lookback_token, lookback_feature,
    out_token, out_valid, out_slot, out_position, out_begin, out_words, out_known, out_next, out_feature,
    width, capacity, lookback, features, shift,
    X: tl.constexpr, U_PAD: tl.constexpr, X_PAD: tl.constexpr, LIVE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (b, 0) writes what is small; program (b, 1 + u * chunks + c) copies one chunk of entry u's features."""
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


def _results(
    lane_row_B: Tensor, window_feature_RAcF: Tensor | None, lookback_token_RY: Tensor | None, width: int, num_words: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    lanes = lane_row_B.shape[0]
    width += 0 if lookback_token_RY is None else lookback_token_RY.shape[1]
    token, slot, position = (lane_row_B.new_empty(lanes, width) for _ in range(3))
    begin, known, following = (lane_row_B.new_empty(lanes) for _ in range(3))
    valid = lane_row_B.new_empty(lanes, width, dtype=torch.bool)
    words = lane_row_B.new_empty(lanes, width, num_words)
    features, dtype = (0, torch.float32) if window_feature_RAcF is None else (window_feature_RAcF.shape[2], window_feature_RAcF.dtype)
    feature = lane_row_B.new_empty(lanes, width, features, dtype=dtype)
    return token, valid, slot, position, begin, words, known, following, feature


def draft_window(
    lane_row_B: Tensor,
    status_R: Tensor,
    seq_len_R: Tensor,
    window_len_R: Tensor,
    window_token_RAc: Tensor,
    window_feature_RAcF: Tensor | None,
    lookback_token_RY: Tensor | None,
    lookback_feature_RYF: Tensor | None,
    shift: int,
    width: int,
    num_words: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    results = _results(lane_row_B, window_feature_RAcF, lookback_token_RY, width, num_words)
    lanes, entries = results[0].shape
    features = results[-1].shape[2]
    launch(
        _draft_window, (lanes, 1 + entries * triton.cdiv(features, BLOCK)),
        lane_row_B, status_R, seq_len_R, window_len_R, window_token_RAc, window_feature_RAcF, lookback_token_RY, lookback_feature_RYF,
        *results, width, window_token_RAc.shape[1], entries - width, features, shift,
        X=num_words, U_PAD=triton.next_power_of_2(entries), X_PAD=triton.next_power_of_2(num_words), LIVE=LIVE, BLOCK=BLOCK,
    )  # fmt: skip
    return results


def _fake(
    lane_row_B: Tensor,
    status_R: Tensor,
    seq_len_R: Tensor,
    window_len_R: Tensor,
    window_token_RAc: Tensor,
    window_feature_RAcF: Tensor | None,
    lookback_token_RY: Tensor | None,
    lookback_feature_RYF: Tensor | None,
    shift: int,
    width: int,
    num_words: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _results(lane_row_B, window_feature_RAcF, lookback_token_RY, width, num_words)


OP = register("draft_window", draft_window, _fake)


def _call(lanes: int, width: int, features: int, lookback: int = 0, num_words: int = 1, capacity: int = 0) -> dict[str, Any]:
    meta, rows = torch.device("meta"), 9
    words = {name: torch.empty(rows, dtype=torch.int64, device=meta) for name in ("status_R", "seq_len_R", "window_len_R")}
    return {
        "lane_row_B": torch.empty(lanes, dtype=torch.int64, device=meta),
        **words,
        "window_token_RAc": torch.empty(rows, capacity or width, dtype=torch.int64, device=meta),
        "window_feature_RAcF": torch.empty(rows, capacity or width, features, dtype=torch.bfloat16, device=meta) if features else None,
        "lookback_token_RY": torch.empty(rows, lookback, dtype=torch.int64, device=meta) if lookback else None,
        "lookback_feature_RYF": torch.empty(rows, lookback, features, dtype=torch.bfloat16, device=meta) if lookback else None,
        "shift": 1,
        "width": width,
        "num_words": num_words,
    }


AOT = (
    AotCase("llama-8b-a6", draft_window, lambda: _call(1, 6, 12288)),
    AotCase("llama-8b-b8-a6", draft_window, lambda: _call(8, 6, 12288)),
    AotCase("llama-8b-a16-no-features", draft_window, lambda: _call(8, 16, 0, num_words=2)),
    AotCase("deepseek-y3-a5", draft_window, lambda: _call(8, 5, 7168, lookback=3)),
    AotCase("llama-8b-b8-a6-of-32", draft_window, lambda: _call(8, 6, 12288, capacity=32)),
    AotCase("llama-8b-b64-all-32", draft_window, lambda: _call(64, 32, 12288)),
)

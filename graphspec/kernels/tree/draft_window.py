"""A drafter's first pass: its input, the tokens that the last cycle committed with the target's features; and the row it proposes from."""

from __future__ import annotations

import torch
from torch import Tensor

from ..groups import LIVE, Window
from ..op import Int64, Written, kernel_op
from .tree_build import causal_words


@kernel_op(native="native.cycle")
def draft_window(
    lane_row_B: Int64,
    status_R: Int64,
    seq_len_R: Int64,
    window: Window,
    shift: int,
    width: int,
    num_words: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs of a drafter's first pass: U = Y + width entries per lane, the row's lookback and then the front of its window.

    Entry 0 lies at slot ``seq_len - window_len + 1 - Y``, later ones after it. A row with fewer than Y tokens before its window begins
    at slot ``shift``, the first token that the drafter consumes, and its entries move up. Entries past the window, and all entries of a
    lane whose row is not live, are invalid: token -1, features 0, no ancestors. Their stored values, NaN included, have no effect.

    Args:
        lane_row_B: int64 row of each lane.
        status_R, seq_len_R, window_len_R: int64; values of rows that are not live have no effect on valid entries.
        window_token_RAc: int64, with ``window_len <= width``. window_feature_RAcF: any dtype; None: the drafter has no features.
        lookback_token_RY, lookback_feature_RYF: the Y entries before the window; None: Y = 0.
        shift: static, RoPE position = slot - shift.
        width: static, window entries to read, at most Ac.
        num_words: X, static, ``64 * X >= U``.

    Returns:
        token ``[B, U]`` int64; valid ``[B, U]`` bool; slot, RoPE position ``[B, U]`` int64; begin ``[B]`` int64, slot of entry 0;
        ancestors ``[B, U, X]`` int64, bits 0..u of entry u; known ``[B]`` int64, how many entries are valid; next position ``[B]`` int64,
        ``seq_len + 1``, of the first token to propose; feature ``[B, U, F]`` contiguous, ``[B, U, 0]`` without features.
    """
    window_len_R, window_token_RAc, window_feature_RAcF, lookback_token_RY, lookback_feature_RYF = window
    live_B = status_R[lane_row_B] == LIVE
    seq_B = seq_len_R[lane_row_B]
    length_B = torch.where(live_B, window_len_R[lane_row_B], 0)
    token_BU = window_token_RAc[:, :width][lane_row_B]
    feature_BUF = None if window_feature_RAcF is None else window_feature_RAcF[:, :width][lane_row_B]
    lookback = 0
    if lookback_token_RY is not None:
        lookback = lookback_token_RY.shape[1]
        token_BU = torch.cat((lookback_token_RY[lane_row_B], token_BU), 1)
        if feature_BUF is not None:
            assert lookback_feature_RYF is not None
            feature_BUF = torch.cat((lookback_feature_RYF[lane_row_B], feature_BUF), 1)
    lanes, entries = token_BU.shape
    entry_U = torch.arange(entries, device=lane_row_B.device)
    begin_B = seq_B - length_B + 1 - lookback
    skip_B = (shift - begin_B).clamp(0, lookback)
    begin_B = begin_B + skip_B
    known_B = torch.where(live_B, lookback + length_B - skip_B, 0)
    valid_BU = entry_U < known_B[:, None]
    index_BU = (entry_U + skip_B[:, None]).clamp(max=entries - 1)
    token_BU = torch.where(valid_BU, token_BU.gather(1, index_BU), -1)
    if feature_BUF is None:
        feature_BUF = torch.zeros(lanes, entries, 0, device=lane_row_B.device)
    else:
        feature_BUF = feature_BUF.gather(1, index_BU[..., None].expand(-1, -1, feature_BUF.shape[-1]))
        feature_BUF = torch.where(valid_BU[..., None], feature_BUF, 0)
    slot_BU = begin_B[:, None] + entry_U
    words_BUX = causal_words(entries, num_words, lane_row_B.device).expand(lanes, -1, -1).masked_fill(~valid_BU[..., None], 0)
    return token_BU, valid_BU, slot_BU, slot_BU - shift, begin_B, words_BUX, known_B, seq_B + 1, feature_BUF


@kernel_op(native="native.cycle")
def take_last(hidden_BTH: Tensor, known_B: Int64, out_BH: Written[Tensor]) -> None:
    """The hidden state of the last valid entry of each lane: ``out[b] = hidden[b, known[b] - 1]``, entry 0 where nothing is valid.

    It is written in place, because torch.compile would copy a result to the slot once more at the end of the region.

    Args:
        hidden_BTH: any floating point, contiguous.
        known_B: int64, at most T: how many entries are valid.
        out_BH: the same dtype, contiguous, written whole.
    """
    last_B11 = (known_B - 1).clamp(min=0)[:, None, None]
    out_BH.copy_(hidden_BTH.gather(1, last_B11.expand(-1, 1, hidden_BTH.shape[-1])).squeeze(1))

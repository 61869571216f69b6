"""Masks after a drafter's window, or in a block of their own: the input of a pass that proposes all depths at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..op import Int64, kernel_op
from ..sampling.noise import computed_once
from .tree_build import causal_words


@kernel_op(native="native.shaping", fused=None)
def append_masks(
    token_BA: Int64, feature_BAF: Tensor, begin_B: Int64, known_B: Int64, mask_feature_F: Tensor, mask_token: int, masks: int, shift: int,
    num_words: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Put ``masks`` masks after the last known entry of each window, so that the rows are one causal run (P-EAGLE, arXiv 2602.01469).

    U = A + masks entries; entry u lies at slot ``begin + u``. A mask has the mask token and the mask feature, and the slot and position
    of the unknown token in whose place it stands. Entries after the masks are invalid: token -1, feature 0, no ancestors. A lane without a
    known entry has no mask. The last known entry and the masks are the S = masks + 1 rows that propose, one depth each.

    Args:
        token_BA, feature_BAF: of :func:`~graphspec.kernels.tree.draft_window.draft_window`: -1 and 0 where an entry is not known.
        begin_B: int64, slot of entry 0. known_B: int64, how many entries are known.
        mask_feature_F: of the dtype of ``feature``.
        mask_token, masks: static; masks may be 0.
        shift: static, RoPE position = slot - shift.
        num_words: X, static, ``64 * X >= U``.

    Returns:
        token ``[B, U]`` int64; valid ``[B, U]`` bool; slot, RoPE position ``[B, U]`` int64; ancestors ``[B, U, X]`` int64, bits 0..u of
        entry u; feature ``[B, U, F]``; row ``[B, S]`` int64, the entries that propose; proposing ``[B, S]`` bool, False where no entry is
        known; next position ``[B, S]`` int64, of the token that each row proposes.
    """
    lanes, width = token_BA.shape
    entry_U = torch.arange(width + masks, device=token_BA.device)
    known_B1 = known_B[:, None]
    valid_BU = (entry_U < known_B1 + masks) & (known_B1 > 0)
    mask_BU = valid_BU & (entry_U >= known_B1)
    token_BU = torch.where(mask_BU, mask_token, F.pad(token_BA, (0, masks), value=-1))
    feature_BUF = torch.where(mask_BU[..., None], mask_feature_F, F.pad(feature_BAF, (0, 0, 0, masks)))
    slot_BU = begin_B[:, None] + entry_U
    words_BUX = causal_words(width + masks, num_words, token_BA.device).expand(lanes, -1, -1).masked_fill(~valid_BU[..., None], 0)
    row_BS = (known_B1 - 1).clamp(min=0) + torch.arange(masks + 1, device=token_BA.device)
    proposing_BS = (known_B1 > 0).expand_as(row_BS)
    return token_BU, valid_BU, slot_BU, slot_BU - shift, words_BUX, feature_BUF, row_BS, proposing_BS.clone(), begin_B[:, None] + row_BS + 1


@kernel_op(native="native.shaping", fused=None)
def mask_block(
    token_BA: Int64, known_B: Int64, next_B: Int64, mask_token: int, rows: int, steps: int, shift: int, num_words: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The block of a block drafter: the root, then masks, in the slots after the window (DFlash, arXiv 2602.06036, section 3).

    Row t lies at slot ``next + t``. All rows of a lane without a known entry are invalid: token -1, no ancestors.

    Args:
        token_BA: of :func:`~graphspec.kernels.tree.draft_window.draft_window`; the last known entry is the root.
        known_B: int64, how many entries are known. next_B: int64, slot of the block's first row, not negative where an entry is known.
        mask_token, rows, steps: static; T rows, S steps.
        shift: static, RoPE position = slot - shift.
        num_words: X, static, ``64 * X >= T``.

    Returns:
        token ``[B, T]`` int64; valid ``[B, T]`` bool; slot, RoPE position ``[B, T]`` int64; ancestors ``[B, T, X]`` int64, bits 0..t of row
        t; position ``[B, S]`` int64 of the token that is proposed in each step.
    """
    row_T = torch.arange(rows, device=token_BA.device)
    root_B1 = token_BA.gather(1, (known_B - 1).clamp(min=0)[:, None])
    # Computed once, not again in every layer that reads them; each from the one before, so that one kernel computes all.
    slot_BT = computed_once(next_B[:, None] + row_T)
    position_BT = computed_once(slot_BT - shift)
    valid_BT = computed_once((known_B[:, None] > 0) & (slot_BT >= 0))
    token_BT = torch.where(valid_BT, torch.where(row_T == 0, root_B1, mask_token), -1)
    words_BTX = computed_once(torch.where(valid_BT[..., None], causal_words(rows, num_words, token_BA.device), 0))
    return token_BT, valid_BT, slot_BT, position_BT, words_BTX, next_B[:, None] + torch.arange(steps, device=next_B.device)

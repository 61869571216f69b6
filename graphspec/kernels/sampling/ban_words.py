"""Bans of bad words: of the last token of a sequence, after its others."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Int64, kernel_op
from .bias_logits import columns


@kernel_op(native="native.shaping", fused=None)
def ban_words(logits_BTV: Tensor, lane_row_B: Int64, bad_word_RBwBt: Int64, before_BTt: Int64) -> Tensor:
    """Logits with -inf for every token that would end a bad word.

    Only finite logits become -inf, so that a logit that is not finite is still found to be none of the bans'.

    Args:
        logits_BTV: float32 over the target's vocabulary.
        lane_row_B: int64 row of each lane.
        bad_word_RBwBt: int64, token sequences of all rows that end in the last column; -1 before them, and all -1: no word.
        before_BTt: int64 ``[B, T, Bt - 1]``, tokens before the one being sampled, newest last.

    Returns:
        float32, the shape of ``logits``.
    """
    word_B1Wt = bad_word_RBwBt[lane_row_B][:, None]
    others_B1Wt = word_B1Wt[..., :-1]
    hit_BTW = ((others_B1Wt < 0) | (others_B1Wt == before_BTt[:, :, None])).all(-1)
    end_BTW = torch.where(hit_BTW, word_B1Wt[..., -1], -1)
    vocab_size = logits_BTV.shape[-1]
    ended_BTV = torch.zeros(*hit_BTW.shape[:2], vocab_size + 1, dtype=torch.bool, device=logits_BTV.device)
    ended_BTV = ended_BTV.scatter(-1, columns(end_BTW, vocab_size), True)[..., :-1]
    return torch.where(ended_BTV & logits_BTV.isfinite(), -torch.inf, logits_BTV)

"""Bans by masks: what a request does not allow, and what its grammar refuses."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Int32, Int64, kernel_op


@kernel_op(native="native.shaping", fused=None)
def mask_tokens(
    logits_BTV: Tensor, lane_row_B: Int64, allowed_RU: Int64 | None, token_mask_BTVw: Int32 | None, target_token_Vd: Int64 | None
) -> Tensor:
    """Logits in which -inf stands for banned tokens and for nothing else.

    A finite logit becomes -inf where a mask lacks its token's bit. An -inf becomes NaN, so that it is still found to be none of the bans'.

    Args:
        logits_BTV: float32.
        lane_row_B: int64 row of each lane.
        allowed_RU: int64 words of 64 tokens each, of all rows; None: all tokens are allowed.
        token_mask_BTVw: int32 words of 32 tokens each; None: there is no grammar.
        target_token_Vd: int64, column to target id; None: columns are target ids.

    Returns:
        float32, the shape of ``logits``.
    """
    vocab = logits_BTV.shape[-1]
    token_V = torch.arange(vocab, device=logits_BTV.device) if target_token_Vd is None else target_token_Vd
    known_BTV = logits_BTV.isfinite()
    masked_BTV = torch.where(logits_BTV == -torch.inf, torch.nan, logits_BTV)
    words = ([] if allowed_RU is None else [(allowed_RU[lane_row_B][:, None], 64)]) + (
        [] if token_mask_BTVw is None else [(token_mask_BTVw, 32)]
    )
    for word_BTU, bits in words:
        allowed_BTV = ((word_BTU[..., token_V // bits] >> (token_V % bits).to(word_BTU.dtype)) & 1).bool()
        masked_BTV = torch.where(known_BTV & ~allowed_BTV, -torch.inf, masked_BTV)
    return masked_BTV

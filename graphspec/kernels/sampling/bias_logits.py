"""Biases of single tokens, and stop ids that are banned before the minimum length."""

from __future__ import annotations

import torch
from torch import Tensor

from ..groups import Biases
from ..op import Int64, kernel_op


@kernel_op(native="native.shaping", fused=None)
def bias_logits(
    logits_BTV: Tensor, lane_row_B: Int64, biases: Biases, position_BT: Int64, target_token_Vd: Int64 | None, vocab_size: int
) -> Tensor:
    """Logits plus the biases of their tokens; -inf for a row's stop ids at positions before the one from which they may be sampled.

    Only finite logits become -inf, so that a logit that is not finite is still found to be none of the bans'. A row without biases and
    minimum length keeps its logits.

    Args:
        logits_BTV: float32; of the draft's vocabulary where ``target_token`` is given.
        lane_row_B: int64 row of each lane.
        biases: of all rows; ids of a row are distinct, -1 for none. int64 ``[R, I]``, float32 ``[R, I]``, int64 ``[R, E]``, int64 ``[R]``.
        position_BT: int64, position of the token being sampled; ``[B, 1]``: the same for all T.
        target_token_Vd: int64, column to target id; None: columns are target ids.
        vocab_size: static, number of target ids.

    Returns:
        float32, the shape of ``logits``.
    """
    bias_id_RI, bias_value_RI, stop_id_RE, stop_from_R = biases
    kept = slice(vocab_size) if target_token_Vd is None else target_token_Vd
    shape = (lane_row_B.shape[0], vocab_size + 1)
    # Ids of a row are distinct; the unused ones share the column that is cut off.
    added_BV = torch.zeros(shape, device=logits_BTV.device)
    added_BV = added_BV.scatter(1, columns(bias_id_RI[lane_row_B], vocab_size), bias_value_RI[lane_row_B])
    logits_BTV = logits_BTV + added_BV[:, None, kept]
    stops_BV = torch.zeros(shape, dtype=torch.bool, device=logits_BTV.device)
    stops_BV = stops_BV.scatter(1, columns(stop_id_RE[lane_row_B], vocab_size), True)
    early_BTV = (position_BT < stop_from_R[lane_row_B][:, None])[..., None] & stops_BV[:, None, kept]
    return torch.where(early_BTV & logits_BTV.isfinite(), -torch.inf, logits_BTV)


def columns(token: Tensor, vocab_size: int) -> Tensor:
    """Where to scatter tokens of a vocabulary: negative ids go to an extra last column."""
    return torch.where(token < 0, vocab_size, token)

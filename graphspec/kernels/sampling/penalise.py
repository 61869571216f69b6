"""Repetition, frequency and presence penalties: logits lowered by how often their tokens have come already."""

from __future__ import annotations

import torch
from torch import Tensor

from ..groups import Penalties
from ..op import Int64, kernel_op
from .bias_logits import columns


@kernel_op(native="native.shaping", fused=None)
def penalise(logits_BTV: Tensor, lane_row_B: Int64, penalties: Penalties, path_BTs: Int64 | None, target_token_Vd: Int64 | None) -> Tensor:
    """Logits after the three penalties, in this order.

    * repetition: of tokens in the prompt or the output, positive logits are divided by the factor, others multiplied by it;
    * frequency: a token's logit loses the penalty once for each time that the output has it;
    * presence: a token that the output has loses the penalty once.

    What was drafted on the way to a position counts as output there. A row without penalties (1, 0, 0) keeps its logits to the bit.

    Args:
        logits_BTV: float32; of the draft's vocabulary where ``target_token`` is given.
        lane_row_B: int64 row of each lane.
        penalties: of all rows; float32 ``[R]``, int32 ``[R, V]`` counts, int8 ``[R, V]``, not 0 for tokens of the prompt.
        path_BTs: int64 target ids drafted before each position, in any order, -1 for none; None: nothing was.
        target_token_Vd: int64, column to target id; None: columns are target ids.

    Returns:
        float32, the shape of ``logits``.

    Source: repetition penalty, Keskar et al. 2019 (arXiv 1909.05858), section 4.1.
    """
    count_BTV, seen_BTV = penalties.output_count_RV[lane_row_B][:, None], (penalties.prompt_seen_RV[lane_row_B] != 0)[:, None]
    if path_BTs is not None:
        vocab = count_BTV.shape[-1]
        drafted_BTV = torch.zeros(*path_BTs.shape[:2], vocab + 1, dtype=torch.int32, device=path_BTs.device)
        column_BTs = columns(path_BTs, vocab)
        drafted_BTV = drafted_BTV.scatter_add(-1, column_BTs, torch.ones_like(column_BTs, dtype=torch.int32))
        count_BTV = count_BTV + drafted_BTV[..., :vocab]
    if target_token_Vd is not None:
        count_BTV, seen_BTV = count_BTV[..., target_token_Vd], seen_BTV[..., target_token_Vd]
    put_out_BTV = count_BTV > 0
    repetition_B11, presence_B11, frequency_B11 = (x_R[lane_row_B][:, None, None] for x_R in penalties[:3])
    repeated_BTV = torch.where(logits_BTV > 0, logits_BTV / repetition_B11, logits_BTV * repetition_B11)
    logits_BTV = torch.where(seen_BTV | put_out_BTV, repeated_BTV, logits_BTV)
    logits_BTV = logits_BTV - frequency_B11 * count_BTV.to(logits_BTV.dtype)
    return logits_BTV - presence_B11 * put_out_BTV.to(logits_BTV.dtype)

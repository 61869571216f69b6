"""Commit of the matrices of all recurrent layers: the accepted path enters them, from what verification recorded."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Int64, Written, kernel_op
from .state_runs import scan_run, tokens_of, update_of
from .tree_conv import convolved


@kernel_op(native="native.recurrent", exact=False)
def state_commit(
    input_UBTE: Tensor,
    gate_UBTG: Tensor,
    weight_UEO: Tensor,
    bias_UE: Tensor | None,
    column_RUOE: Tensor,
    matrix_RUHKV: Written[Tensor],
    lane_row_B: Int64,
    path_BA: Int64,
    length_B: Int64,
    selective: bool,
) -> None:
    """Update the matrices of the lanes' rows, in all recurrent layers, by the tokens ``path[:length]``, in order.

    A token is convolved over the tokens before it on the path and the committed columns, then changes its layer's matrix by the rule: the
    operations of ``tree_conv`` and of ``state_scan``, in the same order. Nothing is read for queries, as nothing is returned. A lane of
    length 0 keeps its row's matrices, bit for bit. Inputs and gates off the path may be NaN.

    Args:
        input_UBTE: inputs of the convolutions, by layer.
        gate_UBTG: float32, as the rule's ops take them.
        weight_UEO: ``[U, E, O + 1]``, the convolutions' weights.
        bias_UE: dtype of the input. None: the convolutions have none.
        column_RUOE: dtype of the input; the last O inputs of each row before the path, oldest first.
        matrix_RUHKV: float32, written at the lanes' rows. Lanes of one row agree in everything, or the row is not read.
        lane_row_B: int64.
        path_BA: int64 places in T, of which the first ``length`` count, from the root on.
        length_B: int64, at most A.
        selective: static; the rule is that of ``ssm_rule``, else of ``delta_rule``.
    """
    layers, lanes = input_UBTE.shape[:2]
    steps = path_BA.shape[1]
    lane_B1 = torch.arange(lanes, device=path_BA.device)[:, None]
    source_UBSE = torch.cat((column_RUOE[lane_row_B].transpose(0, 1), input_UBTE[:, lane_B1, path_BA]), 2)
    taps = [source_UBSE[:, :, tap : tap + steps] for tap in range(column_RUOE.shape[2] + 1)]
    mixed_UBAE = convolved(taps, weight_UEO[:, None, None], None if bias_UE is None else bias_UE[:, None, None])
    # A layer of a lane is a lane of its own.
    skip_H = matrix_RUHKV.new_zeros(matrix_RUHKV.shape[2]) if selective else None
    tokens = tokens_of(skip_H, mixed_UBAE.flatten(0, 1), gate_UBTG[:, lane_B1, path_BA].flatten(0, 1), matrix_RUHKV)
    start = matrix_RUHKV[lane_row_B].transpose(0, 1).flatten(0, 1)
    state, _ = scan_run(update_of(skip_H), start, tokens, length_B.repeat(layers))
    matrix_RUHKV.index_copy_(0, lane_row_B, state.unflatten(0, (layers, lanes)).transpose(0, 1))

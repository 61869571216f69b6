"""Selective state space over a run of tokens, one after the other: commit, and prompts where bits matter."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from .op import KernelOp, Written
from .ssm_rule import random_ssm, ssm_tokens, ssm_update
from .state_cases import path_cases
from .state_runs import along, scan_run
from .state_tokens import rows_of


def ssm_scan(
    mixed_BTE: Tensor,
    gate_BTG: Tensor,
    skip_H: Tensor,
    matrix_RUHKV: Written,
    layer: int,
    lane_row_B: Tensor,
    length_B: Tensor,
    fresh_B: Tensor | None = None,
    path_BA: Tensor | None = None,
) -> Tensor:
    """Update the states of the lanes' rows by their first ``length`` tokens, in order, and say what each token reads.

    The update is that of :mod:`graphspec.kernels.ssm_rule`. A lane of length 0 that isn't fresh keeps its row's state, bit for bit. What
    lies past a lane's length may be NaN. With the accepted path of a tree this is its commit: the operations are those of
    :func:`~graphspec.kernels.ssm_walk.ssm_walk`, in the same order.

    Args:
        mixed_BTE, gate_BTG, skip_H: as in :func:`~graphspec.kernels.ssm_walk.ssm_walk`.
        matrix_RUHKV: float32, written at the lanes' rows. Lanes of one row agree in everything, or nobody reads the row.
        layer: static; of the recurrent ones.
        lane_row_B: int64.
        length_B: int64, at most the number of steps.
        fresh_B: bool: the row's tokens start here, from a state of zeros, whatever it held. None: in no lane.
        path_BA: int64, the place in T of each step's token; the steps are A. None: the first tokens, in order; the steps are T.

    Returns:
        ``[B, steps, H, V]`` in the dtype of ``mixed``; 0 past a lane's length.
    """
    tokens = ssm_tokens(*along(path_BA, mixed_BTE, gate_BTG), *matrix_RUHKV.shape[2:])
    start_BHKV = rows_of(matrix_RUHKV, layer, lane_row_B, fresh_B)
    state_BHKV, out_BTHV = scan_run(partial(ssm_update, skip_H), start_BHKV, tokens, length_B)
    matrix_RUHKV[:, layer].index_copy_(0, lane_row_B, state_BHKV)
    return out_BTHV.to(mixed_BTE.dtype)


OP = KernelOp(ssm_scan, partial(path_cases, random_ssm), native="native.recurrent", exact=False)

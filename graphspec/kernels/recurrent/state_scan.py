"""Recurrent layers over a run of tokens, one after the other: prompts where bits matter."""

from __future__ import annotations

from torch import Tensor

from ..op import Bool, Int64, Written, kernel_op
from .state_runs import scan_run, tokens_of, update_of
from .state_tokens import rows_of


@kernel_op(native="native.recurrent", exact=False)
def state_scan(
    mixed_BTE: Tensor,
    gate_BTG: Tensor,
    skip_H: Tensor | None,
    matrix_RUHKV: Written[Tensor],
    layer: int,
    lane_row_B: Int64,
    length_B: Int64,
    fresh_B: Bool | None = None,
) -> Tensor:
    """Update the states of the lanes' rows by their first ``length`` tokens, in order, and say what each token reads.

    A lane of length 0 that isn't fresh keeps its row's state, bit for bit. What lies past a lane's length may be NaN. The operations are
    those of ``state_walk``, in the same order.

    Args:
        mixed_BTE, gate_BTG, skip_H: as in :func:`~graphspec.kernels.recurrent.state_walk.state_walk`.
        matrix_RUHKV: float32, written at the lanes' rows. Lanes of one row agree in everything, or the row is not read.
        layer: static; of the recurrent ones.
        lane_row_B: int64.
        length_B: int64, at most T.
        fresh_B: bool: the row's tokens start here, from a state of zeros, whatever it held. None: in no lane.

    Returns:
        ``[B, T, H, V]`` in the dtype of ``mixed``; 0 past a lane's length.
    """
    tokens = tokens_of(skip_H, mixed_BTE, gate_BTG, matrix_RUHKV)
    start_BHKV = rows_of(matrix_RUHKV, layer, lane_row_B, fresh_B)
    state_BHKV, out_BTHV = scan_run(update_of(skip_H), start_BHKV, tokens, length_B)
    matrix_RUHKV[:, layer].index_copy_(0, lane_row_B, state_BHKV)
    return out_BTHV.to(mixed_BTE.dtype)

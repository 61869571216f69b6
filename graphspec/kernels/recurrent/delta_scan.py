"""Gated delta rule over a run of tokens, one after the other: prompts where bits matter."""

from __future__ import annotations

from torch import Tensor

from ..op import Bool, Int64, Written, kernel_op
from .delta_rule import delta_tokens, delta_update
from .state_runs import scan_run
from .state_tokens import rows_of


@kernel_op(native="native.recurrent", exact=False)
def delta_scan(
    mixed_BTE: Tensor,
    gate_BTG: Tensor,
    matrix_RUHKV: Written[Tensor],
    layer: int,
    lane_row_B: Int64,
    length_B: Int64,
    fresh_B: Bool | None = None,
) -> Tensor:
    """Update the states of the lanes' rows by ``length`` tokens, one after the other, and say what each token reads.

    The update is that of ``delta_rule``. A lane of length 0 that isn't fresh keeps its row's state, bit for bit. What
    lies past a lane's length may be NaN. The operations are those of ``delta_walk``, in the same order.

    Args:
        mixed_BTE, gate_BTG: as in :func:`~graphspec.kernels.recurrent.delta_walk.delta_walk`.
        matrix_RUHKV: float32, written at the lanes' rows. Lanes of one row agree in everything, or the row is not read.
        layer: static; of the recurrent ones.
        lane_row_B: int64.
        length_B: int64, at most T.
        fresh_B: bool: the row's tokens start here, from a state of zeros, whatever it held. None: in no lane.

    Returns:
        ``[B, T, H, V]`` in the dtype of ``mixed``; 0 past a lane's length.
    """
    heads, key_dim, value_dim = matrix_RUHKV.shape[2:]
    tokens = delta_tokens(mixed_BTE, gate_BTG, heads, key_dim, value_dim)
    start_BHKV = rows_of(matrix_RUHKV, layer, lane_row_B, fresh_B)
    state_BHKV, out_BTHV = scan_run(delta_update, start_BHKV, tokens, length_B)
    matrix_RUHKV[:, layer].index_copy_(0, lane_row_B, state_BHKV)
    return out_BTHV.to(mixed_BTE.dtype)

"""Gated delta rule over a run of tokens in blocks: prompts."""

from __future__ import annotations

from torch import Tensor

from ..op import Bool, Int64, Written, kernel_op
from .delta_rule import delta_solve_block, delta_tokens
from .state_runs import run_blocks
from .state_tokens import rows_of


@kernel_op(native="native.recurrent", exact=False)
def delta_chunk(
    mixed_BTE: Tensor,
    gate_BTG: Tensor,
    matrix_RUHKV: Written[Tensor],
    layer: int,
    lane_row_B: Int64,
    length_B: Int64,
    fresh_B: Bool | None = None,
) -> Tensor:
    """What ``delta_scan`` computes, by matrix products over blocks of tokens (arXiv 2412.06464, 3).

    The state goes from block to block; inside a block all tokens are solved at once, as in
    ``delta_solve``. Tokens past a lane's length decay nothing and add nothing. Results differ from those
    of the scan by rounding.

    Args:
        mixed_BTE, gate_BTG, matrix_RUHKV, layer, lane_row_B, length_B, fresh_B: as there; the matrix is written.

    Returns:
        ``[B, T, H, V]`` in the dtype of ``mixed``; 0 past a lane's length.
    """
    heads, key_dim, value_dim = matrix_RUHKV.shape[2:]
    tokens = delta_tokens(mixed_BTE, gate_BTG, heads, key_dim, value_dim)
    start_BHKV = rows_of(matrix_RUHKV, layer, lane_row_B, fresh_B)
    state_BHKV, out_BTHV = run_blocks(delta_solve_block, start_BHKV, tokens, length_B)
    matrix_RUHKV[:, layer].index_copy_(0, lane_row_B, state_BHKV)
    return out_BTHV.to(mixed_BTE.dtype)

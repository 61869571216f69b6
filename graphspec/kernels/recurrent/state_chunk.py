"""Recurrent layers over a run of tokens in blocks: prompts."""

from __future__ import annotations

from torch import Tensor

from ..op import Bool, Int64, Written, kernel_op
from .state_runs import block_of, run_blocks, tokens_of
from .state_tokens import rows_of


@kernel_op(native="native.recurrent", fused="state_scan:CHUNK_OP", exact=False)
def state_chunk(
    mixed_BTE: Tensor,
    gate_BTG: Tensor,
    skip_H: Tensor | None,
    matrix_RUHKV: Written[Tensor],
    layer: int,
    lane_row_B: Int64,
    length_B: Int64,
    fresh_B: Bool | None = None,
) -> Tensor:
    """What ``state_scan`` computes, by matrix products over blocks of tokens (arXiv 2412.06464, section 3; arXiv 2405.21060, section 6).

    The state goes from block to block; inside a block all tokens are taken at once, as in ``state_tree``. Tokens past a lane's length decay
    nothing and add nothing. Results differ from those of the scan by rounding.

    Args:
        mixed_BTE, gate_BTG, skip_H, matrix_RUHKV, layer, lane_row_B, length_B, fresh_B: as there; the matrix is written.

    Returns:
        ``[B, T, H, V]`` in the dtype of ``mixed``; 0 past a lane's length.
    """
    tokens = tokens_of(skip_H, mixed_BTE, gate_BTG, matrix_RUHKV)
    start_BHKV = rows_of(matrix_RUHKV, layer, lane_row_B, fresh_B)
    state_BHKV, out_BTHV = run_blocks(block_of(skip_H), start_BHKV, tokens, length_B)
    matrix_RUHKV[:, layer].index_copy_(0, lane_row_B, state_BHKV)
    return out_BTHV.to(mixed_BTE.dtype)

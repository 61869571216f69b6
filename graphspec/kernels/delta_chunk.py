"""Gated delta rule over a run of tokens in blocks: prompts."""

from __future__ import annotations

import torch
from torch import Tensor

from .delta_rule import delta_solve_block, delta_tokens, rows_of
from .delta_scan import run_cases
from .op import KernelOp, Written

BLOCK = 64
"""Tokens that one triangular system covers."""


def delta_chunk(
    mixed_BTE: Tensor,
    gate_BTG: Tensor,
    matrix_RUHKV: Written,
    layer: int,
    lane_row_B: Tensor,
    length_B: Tensor,
    fresh_B: Tensor | None = None,
) -> Tensor:
    """What :func:`~graphspec.kernels.delta_scan.delta_scan` computes, by matrix products over blocks of tokens (arXiv 2412.06464, 3).

    The state goes from block to block; inside a block all tokens are solved at once, as in
    :func:`~graphspec.kernels.delta_solve.delta_solve`. Tokens past a lane's length decay nothing and add nothing. Results differ from those
    of the scan by rounding.

    Args:
        mixed_BTE, gate_BTG, matrix_RUHKV, layer, lane_row_B, length_B, fresh_B: as there; the matrix is written.

    Returns:
        ``[B, T, H, V]`` in the dtype of ``mixed``; 0 past a lane's length.
    """
    heads, key_dim, value_dim = matrix_RUHKV.shape[2:]
    count, device = mixed_BTE.shape[1], mixed_BTE.device
    token_T = torch.arange(count, device=device)
    tokens = delta_tokens(mixed_BTE, gate_BTG, heads, key_dim, value_dim).masked(token_T < length_B[:, None])
    start_BHKV = state_BHKV = rows_of(matrix_RUHKV, layer, lane_row_B, fresh_B)
    out = []
    for begin in range(0, count, BLOCK):
        block = type(tokens)(*(part[:, begin : begin + BLOCK] for part in tokens))
        place_T = torch.arange(block.decay_BTH.shape[1], device=device)
        before_BTT = (place_T <= place_T[:, None]).expand(mixed_BTE.shape[0], -1, -1)
        read_BTHV, change_BHTV, path_BHT = delta_solve_block(state_BHKV, block, before_BTT)
        out.append(read_BTHV)
        end_BH1 = path_BHT[..., -1:]
        key_BHKT = block.key_BTHK.permute(0, 2, 3, 1) * (end_BH1 - path_BHT).exp()[:, :, None]
        state_BHKV = state_BHKV * end_BH1.exp()[..., None] + key_BHKT @ change_BHTV
    # A row that is not finite would not survive a product with 0.
    state_BHKV = torch.where((length_B > 0)[:, None, None, None], state_BHKV, start_BHKV)
    matrix_RUHKV[:, layer].index_copy_(0, lane_row_B, state_BHKV)
    read_BTHV = torch.where((token_T < length_B[:, None])[..., None, None], torch.cat(out, 1), 0.0)
    return read_BTHV.to(mixed_BTE.dtype)


OP = KernelOp(delta_chunk, run_cases, native="native.recurrent", fused=None, exact=False)

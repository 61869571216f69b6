"""Triton kernel of :mod:`graphspec.kernels.recurrent.ssm_chunk`."""

from __future__ import annotations

from torch import Tensor

from ...fused.launch import register
from ._run_states import block_tokens


def ssm_chunk(
    mixed_BTE: Tensor,
    gate_BTG: Tensor,
    skip_H: Tensor,
    matrix_RUHKV: Tensor,
    layer: int,
    lane_row_B: Tensor,
    length_B: Tensor,
    fresh_B: Tensor | None = None,
) -> Tensor:
    return block_tokens(mixed_BTE, gate_BTG, skip_H, matrix_RUHKV, layer, lane_row_B, length_B, fresh_B)


OP = register(ssm_chunk)

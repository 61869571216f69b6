"""Triton kernel of :mod:`graphspec.kernels.recurrent.delta_scan`."""

from __future__ import annotations

from torch import Tensor

from ...fused.launch import register
from ._run_states import scan_tokens


def delta_scan(
    mixed_BTE: Tensor,
    gate_BTG: Tensor,
    matrix_RUHKV: Tensor,
    layer: int,
    lane_row_B: Tensor,
    length_B: Tensor,
    fresh_B: Tensor | None = None,
) -> Tensor:
    return scan_tokens(mixed_BTE, gate_BTG, None, matrix_RUHKV, layer, lane_row_B, length_B, fresh_B)


OP = register(delta_scan)

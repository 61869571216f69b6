"""Triton kernel of :mod:`graphspec.kernels.recurrent.delta_scan`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...fused.launch import AotCase, aot_case, register
from ..delta_scan import OP as CONTRACT
from ._run_states import scan_tokens
from ._states import QWEN3_NEXT


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


OP = register(CONTRACT, delta_scan)


def _case(name: str, lanes: int, tokens: int) -> AotCase:
    given = {} if "fresh" in name else {"fresh_B": None}
    return aot_case(name, CONTRACT, delta_scan, {**QWEN3_NEXT, "B": lanes, "T": tokens}, layer=3, mixed_BTE=torch.bfloat16, **given)


AOT = (_case("qwen3-next-b8-t64", 8, 64), _case("qwen3-next-fresh-b1-t256", 1, 256))

"""Triton kernel of :mod:`graphspec.kernels.recurrent.ssm_scan`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...fused.launch import AotCase, aot_case, register
from ..ssm_scan import OP as CONTRACT
from ._run_states import scan_tokens
from ._states import NEMOTRON_H, WIDE_STATE


def ssm_scan(
    mixed_BTE: Tensor,
    gate_BTG: Tensor,
    skip_H: Tensor,
    matrix_RUHKV: Tensor,
    layer: int,
    lane_row_B: Tensor,
    length_B: Tensor,
    fresh_B: Tensor | None = None,
) -> Tensor:
    return scan_tokens(mixed_BTE, gate_BTG, skip_H, matrix_RUHKV, layer, lane_row_B, length_B, fresh_B)


OP = register(CONTRACT, ssm_scan)


def _case(name: str, model: dict[str, int], lanes: int, tokens: int) -> AotCase:
    given = {} if "fresh" in name else {"fresh_B": None}
    return aot_case(name, CONTRACT, ssm_scan, {**model, "B": lanes, "T": tokens}, layer=3, mixed_BTE=torch.bfloat16, **given)


AOT = (
    _case("nemotron-h-b8-t64", NEMOTRON_H, 8, 64),
    _case("nemotron-h-fresh-b1-t256", NEMOTRON_H, 1, 256),
    _case("wide-state-b8-t16", WIDE_STATE, 8, 16),
)

"""Triton kernel of :mod:`graphspec.kernels.ssm_scan`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ssm_scan import OP as CONTRACT
from ._run_states import scan_tokens
from ._states import NEMOTRON_H, WIDE_STATE
from .launch import AotCase, aot_case, register


def ssm_scan(
    mixed_BTE: Tensor,
    gate_BTG: Tensor,
    skip_H: Tensor,
    matrix_RUHKV: Tensor,
    layer: int,
    lane_row_B: Tensor,
    length_B: Tensor,
    fresh_B: Tensor | None = None,
    path_BA: Tensor | None = None,
) -> Tensor:
    return scan_tokens(mixed_BTE, gate_BTG, skip_H, matrix_RUHKV, layer, lane_row_B, length_B, fresh_B, path_BA)


OP = register(CONTRACT, ssm_scan)


def _case(name: str, model: dict[str, int], lanes: int, tokens: int, **sizes: int) -> AotCase:
    given = {} if "run" in name else {"fresh_B": None}
    return aot_case(name, CONTRACT, ssm_scan, {**model, "B": lanes, "T": tokens, **sizes}, layer=3, mixed_BTE=torch.bfloat16, **given)


AOT = (
    _case("nemotron-h-b1-n8-a6", NEMOTRON_H, 1, 8, A=6),
    _case("nemotron-h-b8-n64-a9", NEMOTRON_H, 8, 64, A=9),
    _case("nemotron-h-run-b1-t256", NEMOTRON_H, 1, 256),
    _case("wide-state-b8-n16-a6", WIDE_STATE, 8, 16, A=6),
)

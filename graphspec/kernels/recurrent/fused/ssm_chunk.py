"""Triton kernel of :mod:`graphspec.kernels.recurrent.ssm_chunk`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...fused.launch import AotCase, aot_case, register
from ..ssm_chunk import OP as CONTRACT
from ._run_states import block_tokens
from ._states import NEMOTRON_H, WIDE_STATE


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


OP = register(CONTRACT, ssm_chunk)


def _case(name: str, sizes: dict[str, int], lanes: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    return aot_case(name, CONTRACT, ssm_chunk, {**sizes, "B": lanes, "T": tokens}, layer=3, mixed_BTE=dtype)


AOT = (
    _case("nemotron-h-b1-t512", NEMOTRON_H, 1, 512),
    _case("nemotron-h-b4-t256-fp32", NEMOTRON_H, 4, 256, torch.float32),
    _case("wide-state-b1-t512", WIDE_STATE, 1, 512),
)

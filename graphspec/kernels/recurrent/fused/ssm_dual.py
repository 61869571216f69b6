"""Triton kernel of :mod:`graphspec.kernels.recurrent.ssm_dual`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...fused.launch import AotCase, aot_case, register
from ..ssm_dual import OP as CONTRACT
from ._states import NEMOTRON_H, WIDE_STATE
from ._tree_states import block_nodes


def ssm_dual(
    mixed_BTE: Tensor, gate_BTG: Tensor, skip_H: Tensor, matrix_RUHKV: Tensor, layer: int, lane_row_B: Tensor, ancestors_BTX: Tensor
) -> Tensor:
    return block_nodes(mixed_BTE, gate_BTG, skip_H, matrix_RUHKV, layer, lane_row_B, ancestors_BTX)


OP = register(CONTRACT, ssm_dual)


def _case(name: str, sizes: dict[str, int], lanes: int, nodes: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    return aot_case(name, CONTRACT, ssm_dual, {**sizes, "B": lanes, "T": nodes, "X": 1}, layer=3, mixed_BTE=dtype)


AOT = (
    _case("nemotron-h-b1-n8", NEMOTRON_H, 1, 8),
    _case("nemotron-h-b8-n32", NEMOTRON_H, 8, 32),
    _case("nemotron-h-b1-n64-fp32", NEMOTRON_H, 1, 64, torch.float32),
    _case("wide-state-b8-n16", WIDE_STATE, 8, 16),
)

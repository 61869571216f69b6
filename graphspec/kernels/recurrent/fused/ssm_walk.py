"""Triton kernel of :mod:`graphspec.kernels.recurrent.ssm_walk`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ...fused.launch import AotCase, aot_case, register
from ..ssm_walk import OP as CONTRACT
from ._states import NEMOTRON_H, WIDE_STATE
from ._tree_states import walk_nodes


def ssm_walk(
    mixed_BTE: Tensor, gate_BTG: Tensor, skip_H: Tensor, matrix_RUHKV: Tensor, layer: int, lane_row_B: Tensor, ancestors_BTX: Tensor
) -> Tensor:
    return walk_nodes(mixed_BTE, gate_BTG, skip_H, matrix_RUHKV, layer, lane_row_B, ancestors_BTX)


OP = register(CONTRACT, ssm_walk)


def _case(name: str, sizes: dict[str, int], lanes: int, nodes: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    return aot_case(name, CONTRACT, ssm_walk, {**sizes, "B": lanes, "T": nodes, "X": triton.cdiv(nodes, 64)}, layer=3, mixed_BTE=dtype)


AOT = (
    _case("nemotron-h-b1-n1", NEMOTRON_H, 1, 1),
    _case("nemotron-h-b8-n16", NEMOTRON_H, 8, 16),
    _case("nemotron-h-b1-n128-fp32", NEMOTRON_H, 1, 128, torch.float32),
    _case("wide-state-b8-n16", WIDE_STATE, 8, 16),
)

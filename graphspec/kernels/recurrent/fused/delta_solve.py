"""Triton kernel of :mod:`graphspec.kernels.recurrent.delta_solve`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...fused.launch import AotCase, aot_case, register
from ..delta_solve import OP as CONTRACT
from ._states import QWEN3_NEXT
from ._tree_states import block_nodes


def delta_solve(mixed_BTE: Tensor, gate_BTG: Tensor, matrix_RUHKV: Tensor, layer: int, lane_row_B: Tensor, ancestors_BTX: Tensor) -> Tensor:
    return block_nodes(mixed_BTE, gate_BTG, None, matrix_RUHKV, layer, lane_row_B, ancestors_BTX)


OP = register(CONTRACT, delta_solve)


def _case(name: str, lanes: int, nodes: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    return aot_case(name, CONTRACT, delta_solve, {**QWEN3_NEXT, "B": lanes, "T": nodes, "X": 1}, layer=3, mixed_BTE=dtype)


AOT = (_case("qwen3-next-b1-n8", 1, 8), _case("qwen3-next-b8-n32", 8, 32), _case("qwen3-next-b1-n64-fp32", 1, 64, torch.float32))

"""Triton kernel of :mod:`graphspec.kernels.recurrent.delta_walk`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ...fused.launch import AotCase, aot_case, register
from ..delta_walk import OP as CONTRACT
from ._states import QWEN3_NEXT
from ._tree_states import walk_nodes


def delta_walk(mixed_BTE: Tensor, gate_BTG: Tensor, matrix_RUHKV: Tensor, layer: int, lane_row_B: Tensor, ancestors_BTX: Tensor) -> Tensor:
    return walk_nodes(mixed_BTE, gate_BTG, None, matrix_RUHKV, layer, lane_row_B, ancestors_BTX)


OP = register(CONTRACT, delta_walk)


def _case(name: str, lanes: int, nodes: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    sizes = {**QWEN3_NEXT, "B": lanes, "T": nodes, "X": triton.cdiv(nodes, 64)}
    return aot_case(name, CONTRACT, delta_walk, sizes, layer=3, mixed_BTE=dtype)


AOT = (_case("qwen3-next-b1-n1", 1, 1), _case("qwen3-next-b8-n16", 8, 16), _case("qwen3-next-b1-n128-fp32", 1, 128, torch.float32))

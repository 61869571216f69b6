"""Triton kernel of :mod:`graphspec.kernels.recurrent.delta_chunk`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...fused.launch import AotCase, aot_case, register
from ..delta_chunk import OP as CONTRACT
from ._run_states import block_tokens
from ._states import QWEN3_NEXT


def delta_chunk(
    mixed_BTE: Tensor,
    gate_BTG: Tensor,
    matrix_RUHKV: Tensor,
    layer: int,
    lane_row_B: Tensor,
    length_B: Tensor,
    fresh_B: Tensor | None = None,
) -> Tensor:
    return block_tokens(mixed_BTE, gate_BTG, None, matrix_RUHKV, layer, lane_row_B, length_B, fresh_B)


OP = register(CONTRACT, delta_chunk)


def _case(name: str, lanes: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    return aot_case(name, CONTRACT, delta_chunk, {**QWEN3_NEXT, "B": lanes, "T": tokens}, layer=3, mixed_BTE=dtype)


AOT = (_case("qwen3-next-b1-t512", 1, 512), _case("qwen3-next-b4-t256-fp32", 4, 256, torch.float32))

"""Triton kernel of :mod:`graphspec.kernels.delta_solve`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..delta_solve import OP as CONTRACT
from .delta_rule import PART, delta_block, head_sizes
from .delta_walk import QWEN3_NEXT, delta_walk
from .launch import AotCase, aot_case, launch, register

MOST_NODES = 64
"""That fit one program's registers; larger trees are walked, which the contract allows."""


@triton.jit
def _delta_solve(
    out, mixed, gate, matrix, lane_row, ancestors, nodes, layers, layer,
    TOKENS: tl.constexpr, PART: tl.constexpr, HEADS: tl.constexpr, REPEAT: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_PAD: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: all nodes of a (lane, head), a tile of columns."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    first = tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    node = tl.arange(0, TOKENS)
    word = tl.load(ancestors + lane * nodes + node, mask=node < nodes, other=0)
    state = matrix + ((tl.load(lane_row + lane) * layers + layer) * HEADS + head) * (KEY * VALUE)
    used = ((word >> node.to(tl.int64)) & 1) != 0
    before = ((word[:, None] >> node.to(tl.int64)[None, :]) & 1) != 0
    read, _, _, _ = delta_block(
        state, True, mixed, gate, lane * nodes + node, used, before & used[:, None], head, first, HEADS, REPEAT, KEY, VALUE, KEY_PAD,
        COLUMNS, TOKENS, PART, EPS,
    )  # fmt: skip
    place = out + ((lane * nodes + node) * HEADS + head)[:, None] * VALUE + column[None, :]
    read = tl.where(used[:, None], read, 0.0)
    tl.store(place, read.to(out.dtype.element_ty), mask=(node < nodes)[:, None] & (column < VALUE)[None, :])


def delta_solve(mixed_BTE: Tensor, gate_BTG: Tensor, matrix_RUHKV: Tensor, layer: int, lane_row_B: Tensor, ancestors_BTX: Tensor) -> Tensor:
    lanes, nodes, _ = ancestors_BTX.shape
    if nodes > MOST_NODES:
        return delta_walk(mixed_BTE, gate_BTG, matrix_RUHKV, layer, lane_row_B, ancestors_BTX)
    sizes = head_sizes(mixed_BTE, matrix_RUHKV)
    out = mixed_BTE.new_empty(lanes, nodes, sizes["HEADS"], sizes["VALUE"])
    tokens = max(16, triton.next_power_of_2(nodes))
    launch(
        _delta_solve, (lanes * sizes["HEADS"], triton.cdiv(sizes["VALUE"], sizes["COLUMNS"])), out, mixed_BTE.contiguous(),
        gate_BTG.contiguous(), matrix_RUHKV, lane_row_B, ancestors_BTX.contiguous(), nodes, matrix_RUHKV.shape[1], layer,
        TOKENS=tokens, PART=min(PART if tokens == 16 else PART // 2, sizes["KEY_PAD"]), num_warps=4 if tokens == 16 else 8, **sizes,
    )  # fmt: skip
    return out


OP = register(CONTRACT, delta_solve)


def _case(name: str, lanes: int, nodes: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    return aot_case(name, CONTRACT, delta_solve, {**QWEN3_NEXT, "B": lanes, "T": nodes, "X": 1}, layer=3, mixed_BTE=dtype)


AOT = (_case("qwen3-next-b1-n8", 1, 8), _case("qwen3-next-b8-n32", 8, 32), _case("qwen3-next-b1-n64-fp32", 1, 64, torch.float32))

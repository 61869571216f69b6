"""Triton kernel of :mod:`graphspec.kernels.delta_walk`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..delta_walk import OP as CONTRACT
from .delta_rule import delta_token, delta_update, head_sizes, state_tile
from .launch import AotCase, aot_case, launch, register

NODES = 4
"""That one program walks to, from one load of the state."""


@triton.jit
def _delta_walk(
    out, mixed, gate, matrix, lane_row, ancestors, nodes, layers, layer,
    WORDS: tl.constexpr, NODES: tl.constexpr, HEADS: tl.constexpr, REPEAT: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_PAD: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: some nodes of a (lane, head), a tile of columns. Each walks from the row's state along its ancestors."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    first = tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    at, inside = state_tile(matrix, tl.load(lane_row + lane), layers, layer, head, first, HEADS, KEY, VALUE, KEY_PAD, COLUMNS)
    start = tl.load(at, mask=inside, other=0.0)
    begin = tl.program_id(2) * NODES
    for node in range(begin, tl.minimum(begin + NODES, nodes)):
        state = start
        read = tl.zeros([COLUMNS], tl.float32)
        words = ancestors + (lane * nodes + node) * WORDS
        if (tl.load(words + node // 64) >> (node % 64)) & 1 != 0:
            for j in range(node + 1):
                if (tl.load(words + j // 64) >> (j % 64)) & 1 != 0:
                    query, key, value, decay, rate = delta_token(
                        mixed, gate, lane * nodes + j, head, first, HEADS, REPEAT, KEY, VALUE, KEY_PAD, COLUMNS, EPS
                    )
                    state, read = delta_update(state, query, key, value, decay, rate)
        place = out + ((lane * nodes + node) * HEADS + head) * VALUE + column
        tl.store(place, read.to(out.dtype.element_ty), mask=column < VALUE)


def delta_walk(mixed_BTE: Tensor, gate_BTG: Tensor, matrix_RUHKV: Tensor, layer: int, lane_row_B: Tensor, ancestors_BTX: Tensor) -> Tensor:
    lanes, nodes, words = ancestors_BTX.shape
    sizes = head_sizes(mixed_BTE, matrix_RUHKV)
    out = mixed_BTE.new_empty(lanes, nodes, sizes["HEADS"], sizes["VALUE"])
    grid = (lanes * sizes["HEADS"], triton.cdiv(sizes["VALUE"], sizes["COLUMNS"]), triton.cdiv(nodes, NODES))
    launch(
        _delta_walk, grid, out, mixed_BTE.contiguous(), gate_BTG.contiguous(), matrix_RUHKV, lane_row_B, ancestors_BTX.contiguous(), nodes,
        matrix_RUHKV.shape[1], layer, WORDS=words, NODES=NODES, **sizes,
    )  # fmt: skip
    return out


OP = register(CONTRACT, delta_walk)

QWEN3_NEXT = {"U": 36, "H": 32, "K": 128, "V": 128, "E": 8192, "G": 64, "R": 65}
"""Sizes of its recurrent layers."""


def _case(name: str, lanes: int, nodes: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    sizes = {**QWEN3_NEXT, "B": lanes, "T": nodes, "X": triton.cdiv(nodes, 64)}
    return aot_case(name, CONTRACT, delta_walk, sizes, layer=3, mixed_BTE=dtype)


AOT = (_case("qwen3-next-b1-n1", 1, 1), _case("qwen3-next-b8-n16", 8, 16), _case("qwen3-next-b1-n128-fp32", 1, 128, torch.float32))

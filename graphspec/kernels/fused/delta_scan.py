"""Triton kernel of :mod:`graphspec.kernels.delta_scan`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..delta_scan import OP as CONTRACT
from .delta_rule import delta_token, delta_update, head_sizes, state_tile
from .delta_walk import QWEN3_NEXT
from .launch import AotCase, aot_case, launch, register


@triton.jit
def _delta_scan(
    out, mixed, gate, matrix, lane_row, length, fresh, path, tokens, steps, layers, layer,
    FRESH: tl.constexpr, PATH: tl.constexpr, HEADS: tl.constexpr, REPEAT: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_PAD: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: all steps of a (lane, head), a tile of columns."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    first = tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    count = tl.load(length + lane)
    starts = False
    if FRESH:
        starts = tl.load(fresh + lane) != 0
    at, inside = state_tile(matrix, tl.load(lane_row + lane), layers, layer, head, first, HEADS, KEY, VALUE, KEY_PAD, COLUMNS)
    state = tl.load(at, mask=inside & (not starts), other=0.0)
    place = out + (lane * steps * HEADS + head) * VALUE + column
    for step in range(count):
        token = step
        if PATH:
            token = tl.load(path + lane * steps + step)
        query, key, value, decay, rate = delta_token(
            mixed, gate, lane * tokens + token, head, first, HEADS, REPEAT, KEY, VALUE, KEY_PAD, COLUMNS, EPS
        )
        state, read = delta_update(state, query, key, value, decay, rate)
        tl.store(place + step * HEADS * VALUE, read.to(out.dtype.element_ty), mask=column < VALUE)
    for step in range(count, steps):
        tl.store(place + step * HEADS * VALUE, tl.zeros([COLUMNS], out.dtype.element_ty), mask=column < VALUE)
    tl.debug_barrier()
    tl.store(at, state, mask=inside & ((count > 0) | starts))


def delta_scan(
    mixed_BTE: Tensor,
    gate_BTG: Tensor,
    matrix_RUHKV: Tensor,
    layer: int,
    lane_row_B: Tensor,
    length_B: Tensor,
    fresh_B: Tensor | None = None,
    path_BA: Tensor | None = None,
) -> Tensor:
    lanes, tokens, _ = mixed_BTE.shape
    steps = tokens if path_BA is None else path_BA.shape[1]
    sizes = head_sizes(mixed_BTE, matrix_RUHKV)
    out = mixed_BTE.new_empty(lanes, steps, sizes["HEADS"], sizes["VALUE"])
    launch(
        _delta_scan, (lanes * sizes["HEADS"], triton.cdiv(sizes["VALUE"], sizes["COLUMNS"])), out, mixed_BTE.contiguous(),
        gate_BTG.contiguous(), matrix_RUHKV, lane_row_B, length_B, None if fresh_B is None else fresh_B.view(torch.uint8),
        None if path_BA is None else path_BA.contiguous(), tokens, steps, matrix_RUHKV.shape[1], layer,
        FRESH=fresh_B is not None, PATH=path_BA is not None, **sizes,
    )  # fmt: skip
    return out


OP = register(CONTRACT, delta_scan)


def _case(name: str, lanes: int, tokens: int, **sizes: int) -> AotCase:
    given = {} if "run" in name else {"fresh_B": None}
    return aot_case(
        name, CONTRACT, delta_scan, {**QWEN3_NEXT, "B": lanes, "T": tokens, **sizes}, layer=3, mixed_BTE=torch.bfloat16, **given
    )


AOT = (_case("qwen3-next-b1-n8-a6", 1, 8, A=6), _case("qwen3-next-b8-n64-a9", 8, 64, A=9), _case("qwen3-next-run-b1-t256", 1, 256))

"""Triton kernel of :mod:`graphspec.kernels.recurrent.tree_conv`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register
from ._convolution import activated, add_tap

BLOCK = 1024
"""Channels per program."""


@triton.jit
def _tree_conv(
    out, inputs, column, lane_row, parent, weight, bias, fresh, tokens, channels, stride, layers, layer,
    COLUMNS: tl.constexpr, BIAS: tl.constexpr, FRESH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per node and block of channels."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64)
    lane = at // tokens
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    row = tl.load(lane_row + lane)
    columns_end = column + ((row * layers + layer + 1) * COLUMNS * channels + channel)
    nodes = inputs + lane * tokens * stride + channel
    in_columns = inside
    if FRESH:
        in_columns = inside & (tl.load(fresh + lane) == 0)
    # The walk goes from the newest input to the oldest and the sum from the oldest to the newest, so places are collected first.
    place = at % tokens
    places = (place,)
    for _ in tl.static_range(COLUMNS):
        next_place = tl.load(parent + lane * tokens + tl.maximum(place, 0))
        place = tl.where(place >= 0, next_place, place - 1)
        places = places + (place,)  # type: ignore[assignment]  # noqa: RUF005 - Triton unpacks no tuples
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(COLUMNS + 1):
        place = places[COLUMNS - tap]
        factors = weight + channel * (COLUMNS + 1) + tap
        total = add_tap(total, place, tl.maximum(place, 0), nodes, stride, columns_end, channels, factors, inside, in_columns)
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at * channels + channel, activated(total, out.dtype.element_ty), mask=inside)


def tree_conv(
    input_BTE: Tensor,
    column_RUOE: Tensor,
    layer: int,
    lane_row_B: Tensor,
    parent_BT: Tensor,
    weight_EO: Tensor,
    bias_E: Tensor | None = None,
    fresh_B: Tensor | None = None,
) -> Tensor:
    lanes, tokens, channels = input_BTE.shape
    layers, columns = column_RUOE.shape[1:3]
    out = input_BTE.new_empty(lanes, tokens, channels)
    # A slice of a projection's output: rows are strided, and read in place.
    rows = input_BTE.flatten(0, 1)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    block = min(BLOCK, triton.next_power_of_2(channels))
    launch(
        _tree_conv, (lanes * tokens, triton.cdiv(channels, block)), out, rows, column_RUOE, lane_row_B,
        parent_BT.contiguous(), weight_EO.contiguous(), bias_E, None if fresh_B is None else fresh_B.view(torch.uint8), tokens, channels,
        rows.stride(0), layers, layer, COLUMNS=columns, BIAS=bias_E is not None, FRESH=fresh_B is not None, BLOCK=block,
    )  # fmt: skip
    return out


OP = register(tree_conv)

"""Triton kernel of :mod:`graphspec.kernels.recurrent.conv_shift`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register

BLOCK = 512
"""Channels per program."""


@triton.jit
def _conv_shift(
    inputs, column, lane_row, path, length, fresh, lanes, tokens, width, channels, layers, layer,
    COLUMNS: tl.constexpr, COLUMNS_PAD: tl.constexpr, FRESH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per (layer, lane, block of channels). It loads all columns before it stores any."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    unit = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    order = tl.arange(0, COLUMNS_PAD)
    count = tl.load(length + lane)
    is_fresh = False
    if FRESH:
        is_fresh = tl.load(fresh + lane) != 0
    base = column + (tl.load(lane_row + lane) * layers + layer + unit) * COLUMNS * channels
    place = count + order - COLUMNS
    real = order < COLUMNS
    node = tl.load(path + lane * width + place, mask=real & (place >= 0), other=0)
    inside = real[:, None] & (channel < channels)[None, :]
    from_input = (place >= 0)[:, None]
    new = tl.load(
        inputs + ((unit * lanes + lane) * tokens + node)[:, None] * channels + channel[None, :], mask=inside & from_input, other=0.0
    )
    from_state = inside & (place < 0)[:, None] & (not is_fresh)
    old = tl.load(base + (COLUMNS + place)[:, None] * channels + channel[None, :], mask=from_state, other=0.0)
    # Other threads of this program have loaded what is overwritten here.
    tl.debug_barrier()
    to = base + order[:, None] * channels + channel[None, :]
    tl.store(to, tl.where(from_input, new, old), mask=inside & ((count > 0) | is_fresh))


def conv_shift(
    input_UBTE: Tensor,
    column_RUOE: Tensor,
    layer: int,
    lane_row_B: Tensor,
    path_BA: Tensor,
    length_B: Tensor,
    fresh_B: Tensor | None = None,
) -> None:
    units, lanes, tokens, channels = input_UBTE.shape
    layers, columns = column_RUOE.shape[1:3]
    block = min(BLOCK, triton.next_power_of_2(channels))
    launch(
        _conv_shift, (units, lanes, triton.cdiv(channels, block)), input_UBTE.contiguous(), column_RUOE, lane_row_B, path_BA.contiguous(),
        length_B, None if fresh_B is None else fresh_B.view(torch.uint8), lanes, tokens, path_BA.shape[1], channels, layers, layer,
        COLUMNS=columns, COLUMNS_PAD=triton.next_power_of_2(columns), FRESH=fresh_B is not None, BLOCK=block,
    )  # fmt: skip


OP = register(conv_shift)

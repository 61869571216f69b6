"""Triton kernel of :mod:`graphspec.kernels.attention.kv_move`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register

TILE = 4096
"""Elements per program: all rows of a lane, and as many of their channels as fit."""


@triton.jit
def _kv_move(
    pool, table, seq_len, path, accept_len, lane_row,
    page_size, accept_width, page_stride, side_stride, row_stride, table_stride,
    THROUGH_ROWS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per (layer and side, lane, chunk of channels). It loads all accepted rows before it stores any."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    side = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1).to(tl.int64)
    step = tl.arange(0, ROWS)
    count = tl.load(accept_len + lane)
    row = tl.load(lane_row + lane) if THROUGH_ROWS else lane
    begin = tl.load(seq_len + row)
    valid = (step < count) & (step < accept_width)
    node = tl.load(path + lane * accept_width + step, mask=valid, other=0)
    # Rows that stay in place need no copy, often all of them.
    moves = valid & (node != step)
    if tl.max(moves.to(tl.int32), 0) > 0:
        source = begin + node
        target = begin + step
        source_page = tl.load(table + row * table_stride + source // page_size, mask=moves, other=0).to(tl.int64)
        target_page = tl.load(table + row * table_stride + target // page_size, mask=moves, other=0).to(tl.int64)
        channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        base = pool + side * side_stride + channel[None, :]
        inside = moves[:, None] & (channel[None, :] < row_stride)
        rows = tl.load(base + (source_page * page_stride + (source % page_size) * row_stride)[:, None], mask=inside)
        # Sources and targets of a lane overlap, across threads of this program.
        tl.debug_barrier()
        tl.store(base + (target_page * page_stride + (target % page_size) * row_stride)[:, None], rows, mask=inside)


def kv_move(
    kv_pool: Tensor, table_RP: Tensor, seq_len_R: Tensor, path_BA: Tensor, accept_len_B: Tensor, lane_row_B: Tensor | None = None
) -> None:
    layers, sides, pages, page_size, heads, dim = kv_pool.shape
    lanes, width = path_BA.shape
    row, rows = heads * dim, triton.next_power_of_2(width)
    block = min(triton.next_power_of_2(row), max(16, TILE // rows))
    launch(
        _kv_move, (layers * sides, lanes, triton.cdiv(row, block)), kv_pool, table_RP, seq_len_R, path_BA, accept_len_B, lane_row_B,
        page_size, width, page_size * row, pages * page_size * row, row, table_RP.stride(0),
        THROUGH_ROWS=lane_row_B is not None, ROWS=rows, BLOCK=block,
    )  # fmt: skip


OP = register(kv_move)

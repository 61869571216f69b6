"""Triton kernel of :mod:`graphspec.kernels.delta_chunk`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..delta_chunk import OP as CONTRACT
from .delta_rule import PART, delta_block, head_sizes
from .delta_walk import QWEN3_NEXT
from .launch import AotCase, aot_case, launch, register

TOKENS = 16
"""Of a block. Its system is solved row by row, so wider blocks would wait longer for it than they save."""


@triton.jit
def _delta_chunk(
    out, mixed, gate, matrix, lane_row, length, fresh, tokens, layers, layer,
    FRESH: tl.constexpr, TOKENS: tl.constexpr, PART: tl.constexpr, HEADS: tl.constexpr, REPEAT: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KEY_PAD: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: all blocks of a (lane, head), a tile of columns."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    first = tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    order = tl.arange(0, TOKENS)
    keys: tl.constexpr = HEADS // REPEAT * KEY
    count = tl.load(length + lane)
    starts = False
    if FRESH:
        starts = tl.load(fresh + lane) != 0
    state = matrix + ((tl.load(lane_row + lane) * layers + layer) * HEADS + head) * (KEY * VALUE)
    for begin in range(0, tokens, TOKENS):
        token = begin + order
        used = token < count
        place = out + ((lane * tokens + token) * HEADS + head)[:, None] * VALUE + column[None, :]
        there = (token < tokens)[:, None] & (column < VALUE)[None, :]
        # A row without tokens keeps its bits, and one that starts afresh without any is zero.
        if (begin < count) | ((begin == 0) & starts):
            at_token = lane * tokens + token
            known = (begin > 0) | (not starts)
            read, change, key_unit, path = delta_block(
                state, known, mixed, gate, at_token, used, order[None, :] <= order[:, None], head, first, HEADS, REPEAT, KEY, VALUE,
                KEY_PAD, COLUMNS, TOKENS, PART, EPS,
            )  # fmt: skip
            tl.store(place, tl.where(used[:, None], read, 0.0).to(out.dtype.element_ty), mask=there)
            # Tokens that don't count decay nothing, so the last sum is that of the block.
            end = tl.sum(tl.where(order == TOKENS - 1, path, 0.0), 0)
            left = key_unit * tl.exp(end - path)
            served = mixed + at_token * (2 * keys + HEADS * VALUE) + keys + head // REPEAT * KEY
            for part in range(0, KEY_PAD, PART):
                channel = part + tl.arange(0, PART)
                at = state + channel[:, None] * VALUE + column[None, :]
                inside = (channel < KEY)[:, None] & (column < VALUE)[None, :]
                old = tl.load(at, mask=inside & known, other=0.0)
                key = tl.load(served[:, None] + channel[None, :], mask=used[:, None] & (channel < KEY)[None, :], other=0.0).to(tl.float32)
                added = tl.dot(tl.trans(key * left[:, None]), change, input_precision="tf32x3")
                # The block, and this part before, were loaded by other threads than those that store.
                tl.debug_barrier()
                tl.store(at, old * tl.exp(end) + added, mask=inside)
                tl.debug_barrier()
        else:
            tl.store(place, tl.zeros([TOKENS, COLUMNS], out.dtype.element_ty), mask=there)


def delta_chunk(
    mixed_BTE: Tensor,
    gate_BTG: Tensor,
    matrix_RUHKV: Tensor,
    layer: int,
    lane_row_B: Tensor,
    length_B: Tensor,
    fresh_B: Tensor | None = None,
) -> Tensor:
    lanes, tokens, _ = mixed_BTE.shape
    sizes = head_sizes(mixed_BTE, matrix_RUHKV)
    out = mixed_BTE.new_empty(lanes, tokens, sizes["HEADS"], sizes["VALUE"])
    launch(
        _delta_chunk, (lanes * sizes["HEADS"], triton.cdiv(sizes["VALUE"], sizes["COLUMNS"])), out, mixed_BTE.contiguous(),
        gate_BTG.contiguous(), matrix_RUHKV, lane_row_B, length_B, None if fresh_B is None else fresh_B.view(torch.uint8), tokens,
        matrix_RUHKV.shape[1], layer, FRESH=fresh_B is not None, TOKENS=TOKENS,
        PART=min(PART, sizes["KEY_PAD"]), **sizes,
    )  # fmt: skip
    return out


OP = register(CONTRACT, delta_chunk)


def _case(name: str, lanes: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    return aot_case(name, CONTRACT, delta_chunk, {**QWEN3_NEXT, "B": lanes, "T": tokens}, layer=3, mixed_BTE=dtype)


AOT = (_case("qwen3-next-b1-t512", 1, 512), _case("qwen3-next-b4-t256-fp32", 4, 256, torch.float32))

"""Blocks of slots that a program of split-KV attention reads one after another, and how the next one is on its way in time.

A block waits for a round trip to memory, and registers hold no second one. So the next block is brought into the second-level
cache while this one arrives: page ids are loaded two blocks ahead, keys and values prefetched one ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...fused.launch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)
PREFETCHED_CHANNELS = tl.constexpr(128)
"""Most channels of a head whose blocks are prefetched; addresses of wider ones would spill."""


def blocks_in_turn(blocks: int, unit: int, programs: int) -> int:
    """Blocks that the program with the most of them reads, one after another.

    Args:
        blocks: of a lane.
        unit: blocks of a unit of work; the last one may have fewer.
        programs: that take units in turn.
    """
    rounds, units = -(-blocks // (unit * programs)), -(-blocks // unit)
    alone_in_the_last = units - (rounds - 1) * programs == 1
    return (rounds - 1) * unit + (blocks - (units - 1) * unit if alone_in_the_last else unit)


def round_trips(in_turn: int, channels: int) -> float:
    """Round trips to memory that these blocks expose. Two blocks are on their way at a time if the next one is prefetched: a round trip is
    then assumed to serve both.
    """
    return (in_turn + 1) / 2 if channels <= PREFETCHED_CHANNELS.value else in_turn


@triton.jit
def following_block(block, unit, programs):
    """The next block of the unit, or the first of the program's next unit."""
    return tl.where((block + 1) % unit == 0, block + 1 + (programs - 1) * unit, block + 1)


@triton.jit
def prefetch_block(rows, side_stride, DIM: tl.constexpr):
    """Bring keys and values of a block into L2; ``rows`` are addresses of its keys, values lie ``side_stride`` further."""
    LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((DIM + LINE - 1) // LINE)
    at = rows[:, None] + (tl.arange(0, LINES) * LINE)[None, :]
    if not _INTERPRETED:
        for side in tl.static_range(2):
            tl.inline_asm_elementwise(
                "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [(at + side * side_stride).to(tl.int64)],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip

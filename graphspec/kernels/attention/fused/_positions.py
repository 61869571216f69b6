"""Parts of the kernel of :mod:`.position_attention`: bits of words, what a row sees, a block's scores and weights, and the merge."""

from __future__ import annotations

import triton
import triton.language as tl

from ...fused import _partials as partials
from ...fused.launch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _ones(word):
    """Number of set bits of 32-bit words, int32."""
    if _INTERPRETED:
        x = word.to(tl.uint32, bitcast=True)
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        x = x + (x >> 8)
        count = ((x + (x >> 16)) & 0x3F).to(tl.int32)
    else:
        count = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)
    return count


@triton.jit
def _halves(word):
    """Low and high half of 64-bit words, int32."""
    return (word & 0xFFFFFFFF).to(tl.int32), (word >> 32).to(tl.int32)


@triton.jit
def _last_one(half):
    """Place after the last set bit of 32-bit words, int32."""
    x = half.to(tl.uint32, bitcast=True)
    x = x | (x >> 1)
    x = x | (x >> 2)
    x = x | (x >> 4)
    x = x | (x >> 8)
    x = x | (x >> 16)
    return _ones(x.to(tl.int32, bitcast=True))


@triton.jit
def _nth_one(half, rank):
    """Place of set bit number ``rank`` of a 32-bit word, where it has that many."""
    rest = half.to(tl.uint32, bitcast=True) + tl.zeros_like(rank).to(tl.uint32)
    place = tl.zeros_like(rank)
    for step in tl.static_range(5):
        below = _ones((rest & ((1 << (16 >> step)) - 1)).to(tl.int32, bitcast=True))
        above = rank >= below
        rank = tl.where(above, rank - below, rank)
        place = tl.where(above, place + (16 >> step), place)
        rest = tl.where(above, rest >> (16 >> step), rest)
    return place


@triton.jit
def _write(
    out, out_lane, value, pair, row, live,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Store rows of one (lane, key/value head) of the result."""
    channel = tl.arange(0, DIM_PAD)
    at = (pair // GROUPS).to(tl.int64) * out_lane + (row // REPEAT * (GROUPS * REPEAT) + pair % GROUPS * REPEAT + row % REPEAT) * DIM
    tl.store(out + at[:, None] + channel[None, :], value.to(out.dtype.element_ty), mask=live[:, None] & (channel < DIM)[None, :])


@triton.jit
def _merged(
    part_acc, part_stat, scratch, part, channel, rows, part_rows, first, unit, tail, cut, units, parts, sinks, first_row,
    RUN: tl.constexpr, STRETCH: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, UNROLL: tl.constexpr,
    REPEAT: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """:func:`~graphspec.kernels.fused._partials.merged` of ``units`` units up to block ``cut``, then parts that end at ``tail`` and later.

    Of the latter the first is the rest of a run, from ``cut`` to ``tail``, if there is one; every other is a block.
    """
    run_acc, run_peak, run_total = partials.empty(ROWS, DIM_PAD)
    stretch_acc, stretch_peak, stretch_total = partials.empty(ROWS, DIM_PAD)
    all_acc, all_peak, all_total = partials.empty(ROWS, DIM_PAD)
    for lowest in range(0, parts, UNROLL):
        for step in tl.static_range(UNROLL):
            index = lowest + step
            new = partials.load(part_acc, part_stat, scratch + index, part, channel, tl.where(index < parts, rows, 0), part_rows, DIM)
            run_acc, run_peak, run_total = partials.fold(run_acc, run_peak, run_total, new[0], new[1], new[2])
            # Selects, not branches, so that later loads can be issued early.
            end = tl.where(index < units, tl.minimum((first // unit + index + 1) * unit, cut), tail + index - units + (cut == tail))
            closed = end % RUN == 0
            acc, peak, total = partials.fold(stretch_acc, stretch_peak, stretch_total, run_acc, run_peak, run_total)
            stretch_acc, stretch_peak = tl.where(closed, acc, stretch_acc), tl.where(closed, peak, stretch_peak)
            stretch_total = tl.where(closed, total, stretch_total)
            run_acc, run_peak = tl.where(closed, 0.0, run_acc), tl.where(closed, float("-inf"), run_peak)
            run_total = tl.where(closed, 0.0, run_total)
            closed = end % STRETCH == 0
            acc, peak, total = partials.fold(all_acc, all_peak, all_total, stretch_acc, stretch_peak, stretch_total)
            all_acc, all_peak = tl.where(closed, acc, all_acc), tl.where(closed, peak, all_peak)
            all_total = tl.where(closed, total, all_total)
            stretch_acc, stretch_peak = tl.where(closed, 0.0, stretch_acc), tl.where(closed, float("-inf"), stretch_peak)
            stretch_total = tl.where(closed, 0.0, stretch_total)
    acc, peak, total = partials.fold(stretch_acc, stretch_peak, stretch_total, run_acc, run_peak, run_total)
    acc, peak, total = partials.fold(all_acc, all_peak, all_total, acc, peak, total)
    if SINKS:
        total += partials.sink_weight(sinks, first_row + part, peak, REPEAT)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _sight(
    begin, end, ancestors, valid, lane, row, all_rows, length, prefix,
    begin_lane, begin_token, words_lane, words_token, valid_lane, valid_token,
    REPEAT: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr, PATHS: tl.constexpr,
):  # fmt: skip
    """First position that each row sees, the one after its last, and whether its ancestors are other than the first slots of the window."""
    live = row < all_rows
    token = row // REPEAT
    row_begin = tl.load(begin + lane * begin_lane + token * begin_token, mask=live, other=length)
    row_begin = tl.minimum(tl.maximum(row_begin, 0), length).to(tl.int32)
    apart = row < 0
    if CHUNK:
        seeing = live & (tl.load(valid + lane * valid_lane + token * valid_token, mask=live, other=0) != 0)
        row_end = tl.load(end + lane * words_lane + token * words_token, mask=seeing, other=-1)
        row_end = tl.minimum(tl.maximum(row_end, -1), length - 1).to(tl.int32) + 1
    else:
        count = tl.zeros_like(row)
        reach = tl.zeros_like(row)
        for x in tl.static_range(WORDS):
            word = tl.load(ancestors + lane * words_lane + token * words_token + x, mask=live, other=0)
            low, high = _halves(word)
            count += _ones(low) + _ones(high)
            if PATHS:
                last = tl.where(high != 0, 32 + _last_one(high), _last_one(low))
                reach = tl.where(last != 0, 64 * x + last, reach)
        # A prefix that ends before its first slot is empty; the window after it is seen all the same.
        row_begin = tl.where(live, tl.minimum(row_begin, tl.maximum(prefix, 0)), row_begin)
        row_end = tl.where(live, tl.minimum(prefix + count, length), 0)
        if PATHS:
            apart = reach != count
    return row_begin, row_end, apart


@triton.jit
def _loaded(base, place, seen, side_stride, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Keys and values of a block, all in flight before its arithmetic; 0 where no row sees them: 0 * NaN would reach the result."""
    channel = tl.arange(0, DIM_PAD)
    at = base + channel[None, :] + place[:, None]
    inside = seen[:, None] & (channel < DIM)[None, :]
    return tl.load(at, mask=inside, other=0.0), tl.load(at + side_stride, mask=inside, other=0.0)


@triton.jit
def _exact_scores(
    base, place, seen, query_pair, query_row, live,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Products of float32 rows and keys. Without matrix units operands are in registers, which a whole row does not fit."""
    score = tl.zeros([ROWS, BLOCK], tl.float32)
    for channels in range(0, DIM_PAD, PART):
        some = channels + tl.arange(0, PART)
        q = tl.load(query_pair + query_row[:, None] + some[None, :], mask=live[:, None] & (some < DIM)[None, :], other=0.0)
        k = tl.load(base + some[None, :] + place[:, None], mask=seen[:, None] & (some < DIM)[None, :], other=0.0)
        score = tl.dot(q, tl.trans(k), score, input_precision="ieee")
    return score


@triton.jit
def _weighed(score, v, base, place, seen, side_stride, LATE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """The partial of a block; with ``LATE`` its values are loaded here."""
    peak = tl.max(score, 1)
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(score - safe[:, None])
    total = tl.sum(weight, 1)
    if LATE:
        channel = tl.arange(0, DIM_PAD)
        v = tl.load(base + channel[None, :] + side_stride + place[:, None], mask=seen[:, None] & (channel < DIM)[None, :], other=0.0)
    return tl.dot(weight.to(v.dtype), v, input_precision="ieee"), peak, total


@triton.jit
def _store(part_acc, part_stat, slot, part, channel, mine, part_rows, acc, peak, total, DIM: tl.constexpr):
    """:func:`~graphspec.kernels.fused._partials.store` of some rows."""
    at = part_acc + slot * part_rows * DIM + part[:, None] * DIM + channel[None, :]
    tl.store(at, acc, mask=mine[:, None] & (channel < DIM)[None, :])
    at = part_stat + slot * 2 * part_rows + part
    tl.store(at, peak, mask=mine)
    tl.store(at + part_rows, total, mask=mine)

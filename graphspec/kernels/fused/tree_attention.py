"""Triton kernel of :mod:`graphspec.kernels.tree_attention`: split-KV attention over pages, one launch.

Rows of a tile are ``token x query head`` of one key/value head, so that the heads of a group share what is loaded. Tile and blocks depend
on head dimension and dtype alone, never on T, the batch or the table width.

Slots are reduced in an order fixed by slot number: ``SPLIT`` blocks by online softmax, ``RUN`` blocks as a sequential fold of splits, the
rest as a fold of runs. Which program computes what is free: a unit of work is a split, or a run where a lane has more splits than its
programs should take, chosen on the device from the length. Both give the same bits, since an empty partial is neutral to the bit and every
fold is the same explicit fused multiply-add. Splits of 256 slots give a short context of one lane enough programs; runs of 4096 keep the
partials of long contexts few. A lane with one split writes its result at once; otherwise partials go through memory and the last program
to arrive folds them in order.

The grid depends on static shapes only. Programs loop over units and leave at once where there are none.

Source of split-KV attention: Flash-Decoding (Dao et al., 2023); of the online softmax: FlashAttention-2 (Dao, 2023), section 3.1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...errors import ConfigError
from .launch import AotCase, launch, multiprocessors, register, semaphores

SPLIT, RUN = 4, 64
"""Blocks of a split, and of a run of splits. Part of the result's bits."""
SPLITS_PER_PROGRAM = 4
"""A program takes up to so many splits before units become runs, which bounds the partials kept in memory."""
PROGRAMS_PER_MULTIPROCESSOR = 2
MERGE_ROWS, MERGE_UNROLL = 16, 4


@triton.jit
def _either(left, right):
    return left | right


@triton.jit
def _fold(acc, peak, total, next_acc, next_peak, next_total):
    """``(acc, peak, total)`` with the partial that follows it. Neutral to the bit where either is empty."""
    joint = tl.maximum(peak, next_peak)
    safe = tl.where(joint == float("-inf"), 0.0, joint)
    keep = tl.exp2(peak - safe)
    add = tl.exp2(next_peak - safe)
    acc = tl.fma(acc, tl.broadcast_to(keep[:, None], acc.shape), next_acc * add[:, None])
    return acc, joint, tl.fma(total, keep, next_total * add)


@triton.jit
def _empty(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The partial of no slot."""
    return tl.zeros([ROWS, WIDTH], tl.float32), tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)


@triton.jit
def _load(part_acc, part_stat, slot, part, channel, rows, part_rows, DIM: tl.constexpr):
    """A partial that another thread wrote: past the first-level cache, which need not know of it."""
    valid = part < rows
    at = part_acc + slot * part_rows * DIM + part[:, None] * DIM + channel[None, :]
    acc = tl.load(at, mask=valid[:, None] & (channel < DIM)[None, :], other=0.0, cache_modifier=".cg")
    at = part_stat + slot * 2 * part_rows + part
    peak = tl.load(at, mask=valid, other=float("-inf"), cache_modifier=".cg")
    return acc, peak, tl.load(at + part_rows, mask=valid, other=0.0, cache_modifier=".cg")


@triton.jit
def _sees(here, behind, begin, length, word, next_word):
    """Which of the 64 slots from ``here`` on are visible, as bits.

    ``word`` holds the ancestor bits of the word in which ``here`` lies, ``next_word`` those behind; ``behind = here - prefix``.
    """
    shift = (behind & 63).to(tl.uint64)
    window = (word.to(tl.uint64, bitcast=True) >> shift).to(tl.int64, bitcast=True)
    # Shifts by 64 in two steps: one step of 64 is undefined.
    rest = 32 - (behind & 63) // 2
    window = window | (next_word << rest.to(tl.int64) << (64 - (behind & 63) - rest).to(tl.int64))
    ones = tl.full([], -1, tl.int64)
    at = tl.minimum(tl.maximum(begin - here, 0), 64)
    from_begin = ones << (at // 2).to(tl.int64) << (at - at // 2).to(tl.int64)
    at = tl.minimum(tl.maximum(-behind, 0), 64)
    from_prefix = ones << (at // 2).to(tl.int64) << (at - at // 2).to(tl.int64)
    at = tl.minimum(tl.maximum(length - here, 0), 64)
    from_length = ones << (at // 2).to(tl.int64) << (at - at // 2).to(tl.int64)
    return (from_begin & ~from_prefix) | (window & from_prefix & ~from_length)


@triton.jit
def _tree_attention(
    out, query, keys, table, begin, end, ancestors, part_acc, part_stat, counters,
    scale, tokens, length, programs, slots, part_rows,
    query_lane, query_token, query_head, side_stride, page_stride, slot_stride, head_stride,
    table_stride, begin_lane, begin_token, words_lane, words_token,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, RUN: tl.constexpr,
    SPLITS_PER_PROGRAM: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_UNROLL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Units ``program, program + programs, ...`` of one (lane and key/value head, tile of rows); the last program to finish merges."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile = tl.program_id(0)
    program = tl.program_id(1)
    lane = (tl.program_id(2) // GROUPS).to(tl.int64)
    head = (tl.program_id(2) % GROUPS).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    live = row < tokens * REPEAT
    token = row // REPEAT
    channel = tl.arange(0, DIM_PAD)
    inside = channel < DIM

    # What the tile sees: [low, prefix) and, behind it, the slots whose bit stands in any row's words.
    lane_begin = begin + lane * begin_lane
    row_begin = tl.load(lane_begin + token * begin_token, mask=live, other=length)
    row_begin = tl.minimum(tl.maximum(row_begin, 0), length).to(tl.int32)
    low = tl.min(row_begin, 0)
    high = tl.max(tl.where(live, row_begin, 0), 0)
    prefix = tl.minimum(tl.maximum(tl.load(end + lane), -(1 << 30)), length).to(tl.int32)
    entry = tl.arange(0, WORDS_PAD)
    lane_words = ancestors + lane * words_lane
    words = tl.load(lane_words + (token * words_token)[:, None] + entry[None, :], mask=live[:, None] & (entry < WORDS)[None, :], other=0)
    any_word = tl.reduce(words, 0, _either)
    any_words = ()
    reach = 0
    for x in tl.static_range(WORDS):
        any_words = any_words + (tl.sum(tl.where(entry == x, any_word, 0), 0),)  # type: ignore[assignment]  # noqa: RUF005
        reach = tl.where(any_words[x] != 0, tl.where((any_words[x] >> 32) != 0, 64 * x + 64, 64 * x + 32), reach)
    start = tl.where(low < prefix, low, tl.maximum(prefix, 0))
    stop = tl.maximum(tl.minimum(prefix + reach, length), start)
    first = start // BLOCK
    last = tl.where(stop > start, (stop + BLOCK - 1) // BLOCK, first)

    splits = (last + SPLIT - 1) // SPLIT - first // SPLIT
    unit = tl.where(splits <= SPLITS_PER_PROGRAM * programs, SPLIT, RUN)
    first_unit = first // unit
    units = (last + unit - 1) // unit - first_unit
    units = tl.where(last > first, units, 0)
    if program >= tl.maximum(units, 1):
        return

    heads: tl.constexpr = GROUPS * REPEAT
    stored = live[:, None] & inside[None, :]
    result = out + (lane * tokens * heads + head * REPEAT) * DIM
    if units == 0:
        nothing = tl.zeros([ROWS, DIM_PAD], out.dtype.element_ty)
        tl.store(result + (token * heads + row % REPEAT)[:, None] * DIM + channel[None, :], nothing, mask=stored)
        return

    query_pair = query + lane * query_lane + head * REPEAT * query_head
    query_row = token * query_token + row % REPEAT * query_head
    q = tl.load(query_pair + query_row[:, None] + channel[None, :], mask=stored, other=0.0)
    column = tl.arange(0, BLOCK)
    base = keys + head * head_stride + channel[None, :]
    scratch = (tl.program_id(2) * tl.num_programs(0) + tile).to(tl.int64) * (slots + programs)
    rows = tl.minimum(tokens * REPEAT - tile * ROWS, ROWS)
    for index in range(program, units, programs):
        unit_first = tl.maximum(first, (first_unit + index) * unit)
        unit_last = tl.minimum(last, (first_unit + index + 1) * unit)
        split_first = unit_first // SPLIT
        split_last = (unit_last + SPLIT - 1) // SPLIT
        for split in range(split_first, split_last):
            block_last = tl.minimum(unit_last, split * SPLIT + SPLIT)
            acc, peak, total = _empty(ROWS, DIM_PAD)
            for block in range(tl.maximum(unit_first, split * SPLIT), block_last):
                here = block * BLOCK
                behind = here - prefix
                word = tl.zeros([], tl.int64)
                next_word = tl.zeros([], tl.int64)
                for x in tl.static_range(WORDS):
                    word = tl.where((behind >> 6) == x, any_words[x], word)
                    next_word = tl.where((behind >> 6) + 1 == x, any_words[x], next_word)
                # Loaded as 0 where no row sees it: 0 * NaN would reach the result through the weights.
                seen = ((_sees(here, behind, low, length, word, next_word) >> column) & 1) == 1
                position = here + column
                page = tl.load(table + lane * table_stride + position // PAGE_SIZE, mask=seen, other=0)
                place = tl.maximum(page, 0).to(tl.int64) * page_stride + (position % PAGE_SIZE) * slot_stride
                loaded = seen[:, None] & inside[None, :]
                k = tl.load(base + place[:, None], mask=loaded, other=0.0)
                score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
                if (here < high) | (here + BLOCK > prefix):
                    first_word = behind >> 6
                    found = live & (first_word >= 0) & (first_word < WORDS)
                    row_word = tl.load(lane_words + token * words_token + first_word, mask=found, other=0)
                    found = live & (first_word >= -1) & (first_word + 1 < WORDS)
                    row_next = tl.load(lane_words + token * words_token + first_word + 1, mask=found, other=0)
                    mine = tl.load(lane_begin + token * begin_token, mask=live, other=length)
                    mine = tl.minimum(tl.maximum(mine, 0), length).to(tl.int32)
                    row_sees = _sees(here, behind, mine, length, row_word, row_next)
                    half = tl.where((column < 32)[None, :], row_sees.to(tl.int32)[:, None], (row_sees >> 32).to(tl.int32)[:, None])
                    score = tl.where(((half >> (column & 31)[None, :]) & 1) == 1, score, float("-inf"))
                joint = tl.maximum(peak, tl.max(score, 1))
                safe = tl.where(joint == float("-inf"), 0.0, joint)
                weight = tl.exp2(score - safe[:, None])
                keep = tl.exp2(peak - safe)
                peak = joint
                total = tl.fma(total, keep, tl.sum(weight, 1))
                v = tl.load(base + side_stride + place[:, None], mask=loaded, other=0.0)
                acc = tl.dot(weight.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
            # Always 0, which the compiler can't know: else it would compute these addresses ahead and hold them through the loop above.
            zero = block_last >> 30
            late = tl.arange(0, ROWS) + zero
            late_live = tile * ROWS + late < tokens * REPEAT
            late_stored = late_live[:, None] & inside[None, :]
            if splits == 1:
                value = acc / tl.where(total == 0.0, 1.0, total)[:, None]
                late_row = tile * ROWS + late
                out_tile = result + (late_row // REPEAT * heads + late_row % REPEAT)[:, None] * DIM + channel[None, :]
                tl.store(out_tile, value.to(out.dtype.element_ty), mask=late_stored)
            else:
                # The first split of a unit is its partial; those that follow pass through a slot of the program's own.
                slot = scratch + tl.where(split == split_first, index, slots + program)
                tl.store(part_acc + slot * part_rows * DIM + late[:, None] * DIM + channel[None, :], acc, mask=late_stored)
                tl.store(part_stat + slot * 2 * part_rows + late, peak, mask=late_live)
                tl.store(part_stat + slot * 2 * part_rows + part_rows + late, total, mask=late_live)
                if split > split_first:
                    tl.debug_barrier()
                    for top in range(0, rows, MERGE_ROWS):
                        part = top + tl.arange(0, MERGE_ROWS)
                        held = _load(part_acc, part_stat, scratch + index, part, channel, rows, part_rows, DIM)
                        new = _load(part_acc, part_stat, slot, part, channel, rows, part_rows, DIM)
                        acc_sum, peak_sum, total_sum = _fold(held[0], held[1], held[2], new[0], new[1], new[2])
                        held_acc = part_acc + (scratch + index) * part_rows * DIM + part[:, None] * DIM + channel[None, :]
                        held_stat = part_stat + (scratch + index) * 2 * part_rows + part
                        # Every warp loads the peaks and totals of its rows; those of all rows are stored by one.
                        tl.debug_barrier()
                        tl.store(held_acc, acc_sum, mask=(part < rows)[:, None] & inside[None, :])
                        tl.store(held_stat, peak_sum, mask=part < rows)
                        tl.store(held_stat + part_rows, total_sum, mask=part < rows)
                        tl.debug_barrier()
    if splits == 1:
        return

    tl.debug_barrier()
    counter = counters + (tl.program_id(2) * tl.num_programs(0) + tile)
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if arrived + 1 < tl.minimum(units, programs):
        return
    tl.store(counter, 0)
    for top in range(0, rows, MERGE_ROWS):
        part = top + tl.arange(0, MERGE_ROWS)
        run_acc, run_peak, run_total = _empty(MERGE_ROWS, DIM_PAD)
        whole_acc, whole_peak, whole_total = _empty(MERGE_ROWS, DIM_PAD)
        for lowest in range(0, units, MERGE_UNROLL):
            for step in tl.static_range(MERGE_UNROLL):
                index = lowest + step
                new = _load(part_acc, part_stat, scratch + index, part, channel, tl.where(index < units, rows, 0), part_rows, DIM)
                run_acc, run_peak, run_total = _fold(run_acc, run_peak, run_total, new[0], new[1], new[2])
                # Selects, not branches, so that the loads of the steps that follow may be issued early.
                closed = (first_unit + index + 1) * unit % RUN == 0
                acc, peak, total = _fold(whole_acc, whole_peak, whole_total, run_acc, run_peak, run_total)
                whole_acc, whole_peak = tl.where(closed, acc, whole_acc), tl.where(closed, peak, whole_peak)
                whole_total = tl.where(closed, total, whole_total)
                run_acc, run_peak = tl.where(closed, 0.0, run_acc), tl.where(closed, float("-inf"), run_peak)
                run_total = tl.where(closed, 0.0, run_total)
        acc, peak, total = _fold(whole_acc, whole_peak, whole_total, run_acc, run_peak, run_total)
        merged_row = tile * ROWS + part
        merged_tile = result + (merged_row // REPEAT * heads + merged_row % REPEAT)[:, None] * DIM + channel[None, :]
        value = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(merged_tile, value.to(out.dtype.element_ty), mask=(part < rows)[:, None] & inside[None, :])


def check_dtypes(name: str, query: Tensor, kv_pool: Tensor) -> None:
    """Raises ConfigError where the matrix units can't multiply what is given."""
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ConfigError(f"{name}: query", "bfloat16, float16 or float32", str(query.dtype))
    if kv_pool.dtype != query.dtype:
        raise ConfigError(f"{name}: kv_pool", f"{query.dtype}, as the query", str(kv_pool.dtype))


def tile_shape(dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Rows, slots of a block, warps and pipeline stages.

    16-bit types: 64 rows, the least that Hopper's warp-group matrix instructions take. float32 has no such unit at full precision.
    """
    wide = dim > 128
    if dtype == torch.float32:
        return (16, 32, 8, 1) if wide else (16, 64, 4, 1)
    return 64, 64, 8 if wide else 4, 2


def tree_attention(
    query_BTQD: Tensor,
    kv_pool: Tensor,
    layer: int,
    table_BP: Tensor,
    prefix_begin_BT: Tensor,
    prefix_end_B: Tensor,
    ancestors_BTX: Tensor,
    scale: float,
) -> Tensor:
    check_dtypes("fused tree_attention", query_BTQD, kv_pool)
    lanes, tokens, heads, dim = query_BTQD.shape
    page_size, groups = kv_pool.shape[3], kv_pool.shape[4]
    query = query_BTQD if query_BTQD.stride(3) == 1 else query_BTQD.contiguous()
    # One compiled kernel serves every layer: the layer is part of an address, not an argument.
    pool = kv_pool[layer]
    ancestors = ancestors_BTX if ancestors_BTX.stride(2) == 1 else ancestors_BTX.contiguous()
    out = torch.empty((lanes, tokens, heads, dim), dtype=query.dtype, device=query.device)
    rows, block, warps, stages = tile_shape(dim, query.dtype)
    # Every further word of ancestors is held in registers; beside a block of 64 slots a second one would spill.
    block = block if ancestors.shape[2] == 1 else min(block, 32)
    repeat = heads // groups
    length = table_BP.shape[1] * page_size
    tiles, pairs, blocks = triton.cdiv(tokens * repeat, rows), lanes * groups, triton.cdiv(length, block)
    wanted = triton.cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(query.device), tiles * pairs)
    programs = min(wanted, triton.cdiv(blocks, SPLIT))
    slots = max(min(SPLITS_PER_PROGRAM * programs, triton.cdiv(blocks, SPLIT)), triton.cdiv(blocks, RUN))
    part_rows = min(rows, tokens * repeat)
    part_acc = torch.empty((pairs, tiles, slots + programs, part_rows, dim), dtype=torch.float32, device=query.device)
    part_stat = torch.empty((pairs, tiles, slots + programs, 2, part_rows), dtype=torch.float32, device=query.device)
    launch(
        _tree_attention, (tiles, programs, pairs),
        out, query, pool, table_BP, prefix_begin_BT, prefix_end_B, ancestors, part_acc, part_stat,
        semaphores(query.device, pairs * tiles),
        scale * math.log2(math.e), tokens, length, programs, slots, part_rows,
        *query.stride()[:3], *pool.stride()[:4], table_BP.stride(0), *prefix_begin_BT.stride(), *ancestors.stride()[:2],
        num_warps=warps, num_stages=stages,
        GROUPS=groups, REPEAT=repeat, PAGE_SIZE=page_size, DIM=dim, DIM_PAD=max(16, triton.next_power_of_2(dim)),
        WORDS=ancestors.shape[2], WORDS_PAD=triton.next_power_of_2(ancestors.shape[2]), ROWS=rows, BLOCK=block,
        SPLIT=SPLIT, RUN=RUN, SPLITS_PER_PROGRAM=SPLITS_PER_PROGRAM,
        MERGE_ROWS=MERGE_ROWS, MERGE_UNROLL=MERGE_UNROLL,
    )  # fmt: skip
    return out


def _fake(query_BTQD: Tensor, *rest: Any, **named: Any) -> Tensor:
    return query_BTQD.new_empty(query_BTQD.shape)


# The native CPU kernel holds the plain name.
OP = register("fused_tree_attention", tree_attention, _fake)


def _call(lanes: int, tokens: int, *, heads: int = 32, dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    meta = torch.device("meta")
    return {
        "query_BTQD": torch.empty(lanes, tokens, heads, dim, dtype=dtype, device=meta),
        "kv_pool": torch.empty(32, 2, 1025, 16, 8, dim, dtype=dtype, device=meta),
        "layer": 31,
        "table_BP": torch.empty(lanes, 256, dtype=torch.int32, device=meta),
        "prefix_begin_BT": torch.empty(lanes, tokens, dtype=torch.int64, device=meta),
        "prefix_end_B": torch.empty(lanes, dtype=torch.int64, device=meta),
        "ancestors_BTX": torch.empty(lanes, tokens, 1 if tokens <= 64 else 2, dtype=torch.int64, device=meta),
        "scale": dim**-0.5,
    }


AOT = (
    AotCase("llama-8b-t1", tree_attention, lambda: _call(1, 1)),
    AotCase("llama-8b-t8", tree_attention, lambda: _call(1, 8)),
    AotCase("llama-8b-t64", tree_attention, lambda: _call(1, 64)),
    AotCase("llama-8b-t65", tree_attention, lambda: _call(1, 65)),
    AotCase("llama-8b-t128", tree_attention, lambda: _call(1, 128)),
    AotCase("llama-8b-b8-t32", tree_attention, lambda: _call(8, 32)),
    AotCase("d64-t8", tree_attention, lambda: _call(1, 8, dim=64)),
    AotCase("d80-t8", tree_attention, lambda: _call(1, 8, dim=80)),
    AotCase("d256-t8", tree_attention, lambda: _call(1, 8, heads=16, dim=256)),
    AotCase("f32-t8", tree_attention, lambda: _call(1, 8, dtype=torch.float32)),
    AotCase("f32-d256-t8", tree_attention, lambda: _call(1, 8, heads=16, dim=256, dtype=torch.float32)),
)

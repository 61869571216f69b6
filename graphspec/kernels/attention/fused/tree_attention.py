"""Triton kernel of :mod:`graphspec.kernels.attention.tree_attention`: split-KV attention over pages, one launch.

Rows of a tile are ``token x query head`` of one key/value head, so the heads of a group share loads. Tile and block sizes depend on head
dimension and dtype only, never on T, the batch or the table width.

A split is one block of slots. The page ids of a program's first two splits are loaded together with the lane's lengths, and those of each
later split two splits ahead (:mod:`._blocks`); keys and values of a whole split are in flight before its arithmetic starts. So a program
waits for two dependent round trips: page ids and lengths; keys and values.

Slots are reduced in an order fixed by slot number: softmax within a split, a sequential fold of the splits of a run (``RUN`` slots), a fold
of the runs of a stretch (``STRETCH`` slots), and a fold of stretches. The assignment to programs is free: a unit of work is a split, or a
run or a stretch where a lane would have too many units, chosen on the device from the length. The bits are the same for all, since an
empty partial changes no bit and every fold is the same explicit fused multiply-add. Splits give a short context of one lane enough
programs; stretches keep the number of partials of long contexts small. A lane with one split writes its result directly; otherwise
partials go through memory and the last programs to arrive share the merge, a few rows at a time
(:mod:`~graphspec.kernels.fused._partials`).

The grid depends on static shapes only. Programs loop over units and exit at once if they have none.

Source of split-KV attention: Flash-Decoding (Dao et al., 2023); of the online softmax: FlashAttention-2 (Dao, 2023), section 3.1.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....errors import ConfigError
from ...fused import _partials as partials
from ...fused.launch import INTERPRETED, Launch, launch, multiprocessors, register, semaphores
from ...fused.work import ARRIVAL, Situation, Work, works
from ._blocks import PREFETCHED_CHANNELS, blocks_in_turn, following_block, prefetch_block, round_trips

RUN, STRETCH = 1024, 8192
"""Slots of a run and of a stretch; the result's bits depend on them."""
UNITS_PER_PROGRAM = 4
"""Most units per program; beyond that units become larger, which bounds the partials in memory."""
PROGRAMS_PER_MULTIPROCESSOR = 2
HELPERS, POLLS = 8, 8
"""Programs that share a merge, and how often each polls for the arrival of the others."""
FOLD_ROWS, MERGE_ROWS, MERGE_UNROLL = 16, 4, 8


@triton.jit
def _either(left, right):
    return left | right


@triton.jit
def _sees(here, offset, begin, length, word, next_word):
    """Visibility of the 64 slots from ``here`` on, as bits.

    ``word`` is the ancestor word that contains slot ``here``, ``next_word`` the one after it; ``offset = here - prefix``.
    """
    shift = (offset & 63).to(tl.uint64)
    window = (word.to(tl.uint64, bitcast=True) >> shift).to(tl.int64, bitcast=True)
    # A shift by 64 is undefined, hence two shifts.
    rest = 32 - (offset & 63) // 2
    window = window | (next_word << rest.to(tl.int64) << (64 - (offset & 63) - rest).to(tl.int64))
    ones = tl.full([], -1, tl.int64)
    at = tl.minimum(tl.maximum(begin - here, 0), 64)
    from_begin = ones << (at // 2).to(tl.int64) << (at - at // 2).to(tl.int64)
    at = tl.minimum(tl.maximum(-offset, 0), 64)
    from_prefix = ones << (at // 2).to(tl.int64) << (at - at // 2).to(tl.int64)
    at = tl.minimum(tl.maximum(length - here, 0), 64)
    from_length = ones << (at // 2).to(tl.int64) << (at - at // 2).to(tl.int64)
    return (from_begin & ~from_prefix) | (window & from_prefix & ~from_length)


@triton.jit
def _write(
    out, value, pair, row, live, all_rows,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Store rows of one (lane, key/value head) of the result."""
    channel = tl.arange(0, DIM_PAD)
    heads: tl.constexpr = GROUPS * REPEAT
    token = (pair // GROUPS).to(tl.int64) * (all_rows // REPEAT) + row // REPEAT
    at = out + (token * heads + pair % GROUPS * REPEAT + row % REPEAT)[:, None] * DIM + channel[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=live[:, None] & (channel < DIM)[None, :])


def _work(launch: Launch, at: Situation) -> Work:
    values = launch.values
    block, run = values["BLOCK"], values["RUN"]
    tokens = values["all_rows"] // values["REPEAT"]
    slots = min(at.context + tokens, values["length"])
    blocks, maximum = -(-slots // block), values["UNITS_PER_PROGRAM"] * values["programs"]
    unit = 1 if blocks <= maximum else run if -(-blocks // run) <= maximum else values["STRETCH"]
    units = -(-blocks // unit)
    lanes = values["table"].shape[0]
    arriving = min(units, values["programs"])
    rows = min(values["ROWS"], values["part_rows"])
    # The arrival, a claim, and the partials, this many per load.
    merge = ARRIVAL + -(-units // values["MERGE_UNROLL"]) if units > 1 else 0
    row = 2 * values["DIM"] * values["keys"].element_size()
    return Work(
        bytes=lanes * values["GROUPS"] * slots * row,
        programs=lanes * values["GROUPS"] * arriving,
        in_flight=block * row,
        memory=round_trips(blocks_in_turn(blocks, unit, values["programs"]), values["DIM"]),
        cache=1 + merge,
        alone=rows * units * (values["DIM"] + 2) * 4 / min(arriving, max(values["helpers"], 1)) if units > 1 else 0,
        flops=4 * lanes * values["all_rows"] * values["GROUPS"] * slots * values["DIM"],
    )


@works(_work)
@triton.jit
def _tree_attention(
    out, query, keys, table, begin, end, ancestors, part_acc, part_stat, counters, sinks,
    scale, cap, all_rows, length, programs, slots, part_rows, helpers,
    query_lane, query_token, query_head, side_stride, page_stride, slot_stride, head_stride,
    table_stride, begin_lane, begin_token, words_lane, words_token,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr, STRETCH: tl.constexpr,
    EXACT: tl.constexpr, PART: tl.constexpr, UNITS_PER_PROGRAM: tl.constexpr, POLLS: tl.constexpr,
    FOLD_ROWS: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_UNROLL: tl.constexpr, SINKS: tl.constexpr, CAP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, ``program``, (lane, key/value head)): every unit whose number is ``program`` modulo ``programs``."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile = tl.program_id(0)
    program = tl.program_id(1)
    lane = (tl.program_id(2) // GROUPS).to(tl.int64)
    head = (tl.program_id(2) % GROUPS).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    live = row < all_rows
    token = row // REPEAT
    channel = tl.arange(0, DIM_PAD)
    inside = channel < DIM
    stored = live[:, None] & inside[None, :]
    column = tl.arange(0, BLOCK)
    lane_table = table + lane * table_stride

    # Page ids of the program's first two splits if units are splits, loaded before the lane's lengths are known.
    position = program * BLOCK + column
    page = tl.load(lane_table + position // PAGE_SIZE, mask=position < length, other=0)
    ahead = (program + programs) * BLOCK + column
    next_page = tl.load(lane_table + ahead // PAGE_SIZE, mask=ahead < length, other=0)
    lane_begin = begin + lane * begin_lane
    row_begin = tl.load(lane_begin + token * begin_token, mask=live, other=length)
    prefix = tl.load(end + lane)
    entry = tl.arange(0, WORDS_PAD)
    lane_words = ancestors + lane * words_lane
    words = tl.load(lane_words + (token * words_token)[:, None] + entry[None, :], mask=live[:, None] & (entry < WORDS)[None, :], other=0)
    query_pair = query + lane * query_lane + head * REPEAT * query_head
    query_row = token * query_token + row % REPEAT * query_head
    if not EXACT:
        q = tl.load(query_pair + query_row[:, None] + channel[None, :], mask=stored, other=0.0)

    # The tile sees [low, prefix) and, after it, the slots whose bit is set in any row's words.
    row_begin = tl.minimum(tl.maximum(row_begin, 0), length).to(tl.int32)
    low = tl.min(row_begin, 0)
    high = tl.max(tl.where(live, row_begin, 0), 0)
    prefix = tl.minimum(tl.maximum(prefix, -(1 << 30)), length).to(tl.int32)
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

    maximum = UNITS_PER_PROGRAM * programs
    unit = tl.where(last - first <= maximum, 1, RUN)
    unit = tl.where((last + RUN - 1) // RUN - first // RUN <= maximum, unit, STRETCH)
    first_unit = first // unit
    units = (last + unit - 1) // unit - first_unit
    mine = (program + programs - first_unit % programs) % programs
    if mine >= tl.maximum(units, 1):
        return
    if last == first:
        _write(out, tl.zeros([ROWS, DIM_PAD], tl.float32), tl.program_id(2), row, live, all_rows, GROUPS, REPEAT, DIM, DIM_PAD)
        return

    block = tl.maximum(first, (first_unit + mine) * unit)
    following = following_block(block, unit, programs)
    if (block != program) | (unit != 1):
        position = block * BLOCK + column
        page = tl.load(lane_table + position // PAGE_SIZE, mask=position < length, other=0)
        ahead = following * BLOCK + column
        next_page = tl.load(lane_table + ahead // PAGE_SIZE, mask=ahead < length, other=0)
    acc, peak, total = partials.empty(ROWS, DIM_PAD)
    while block < last:
        here = block * BLOCK
        position = here + column
        seen = tl.zeros([BLOCK], tl.int32)
        for x in tl.static_range((BLOCK + 63) // 64):
            offset = here + 64 * x - prefix
            word = tl.zeros([], tl.int64)
            next_word = tl.zeros([], tl.int64)
            for y in tl.static_range(WORDS):
                word = tl.where((offset >> 6) == y, any_words[y], word)
                next_word = tl.where((offset >> 6) + 1 == y, any_words[y], next_word)
            tile_sees = _sees(here + 64 * x, offset, low, length, word, next_word)
            seen = tl.where(column // 32 == 2 * x, tile_sees.to(tl.int32), seen)
            seen = tl.where(column // 32 == 2 * x + 1, (tile_sees >> 32).to(tl.int32), seen)
        seen = ((seen >> ((column & 31) + (following >> 31))) & 1) == 1
        # Loaded as 0 where no row sees it: 0 * NaN would reach the result through the weights.
        place = tl.maximum(page, 0).to(tl.int64) * page_stride + (position % PAGE_SIZE) * slot_stride
        loaded = seen[:, None] & inside[None, :]
        own_keys = keys + ((tl.program_id(2) + (following >> 31)) % GROUPS).to(tl.int64) * head_stride
        base = own_keys + channel[None, :]
        # Before the loads of this one: the compiler puts nothing between them and the wait for them.
        if DIM <= PREFETCHED_CHANNELS and following < last:
            ahead = following * BLOCK + column
            rows_ahead = tl.maximum(next_page, 0).to(tl.int64) * page_stride + (ahead % PAGE_SIZE) * slot_stride
            prefetch_block(own_keys + rows_ahead, side_stride, DIM)
        if not EXACT:
            k = tl.load(base + place[:, None], mask=loaded, other=0.0)
            v = tl.load(base + side_stride + place[:, None], mask=loaded, other=0.0)
        if EXACT:
            # Without matrix units operands are in registers, which a whole row does not fit.
            score = tl.zeros([ROWS, BLOCK], tl.float32)
            for channels in range(0, DIM_PAD, PART):
                some = channels + tl.arange(0, PART)
                q_at = query_pair + query_row[:, None] + some[None, :]
                q = tl.load(q_at, mask=live[:, None] & (some < DIM)[None, :], other=0.0)
                k_at = keys + head * head_stride + some[None, :] + place[:, None]
                k = tl.load(k_at, mask=seen[:, None] & (some < DIM)[None, :], other=0.0)
                score = tl.dot(q, tl.trans(k), score, input_precision="ieee")
        else:
            score = tl.dot(q, tl.trans(k), input_precision="ieee")
        page = next_page
        after_next = following_block(following, unit, programs)
        ahead = after_next * BLOCK + column
        next_page = tl.load(lane_table + ahead // PAGE_SIZE, mask=ahead < length, other=0)
        score = partials.capped(score, scale, cap) if CAP else score * scale
        if (here < high) | (here + BLOCK > prefix):
            # Reloaded, from L1. `zero` hides from the compiler that these are the tile's own rows; else it would keep their
            # addresses in registers through the loop.
            zero = following >> 31
            own_lane = ((tl.program_id(2) + zero) // GROUPS).to(tl.int64)
            own_row = (tl.program_id(0) + zero) * ROWS + tl.arange(0, ROWS)
            row_live = own_row < all_rows
            row_low = tl.load(begin + own_lane * begin_lane + own_row // REPEAT * begin_token, mask=row_live, other=length)
            row_low = tl.minimum(tl.maximum(row_low, 0), length).to(tl.int32)
            row_words = ancestors + own_lane * words_lane + own_row // REPEAT * words_token
            half = tl.zeros([ROWS, BLOCK], tl.int32)
            for x in tl.static_range((BLOCK + 63) // 64):
                there = here + zero + 64 * x
                offset = there - prefix
                first_word = offset >> 6
                found = row_live & (first_word >= 0) & (first_word < WORDS)
                row_word = tl.load(row_words + first_word, mask=found, other=0)
                found = row_live & (first_word >= -1) & (first_word + 1 < WORDS)
                row_next = tl.load(row_words + first_word + 1, mask=found, other=0)
                row_sees = _sees(there, offset, row_low, length, row_word, row_next)
                half = tl.where((column // 32 == 2 * x)[None, :], row_sees.to(tl.int32)[:, None], half)
                half = tl.where((column // 32 == 2 * x + 1)[None, :], (row_sees >> 32).to(tl.int32)[:, None], half)
            score = tl.where(((half >> ((column & 31) + zero)[None, :]) & 1) == 1, score, float("-inf"))
        new_peak = tl.max(score, 1)
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(score - safe[:, None])
        new_total = tl.sum(weight, 1)
        if EXACT:
            v = tl.load(base + side_stride + place[:, None], mask=loaded, other=0.0)
        new_acc = tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        acc, peak, total = partials.fold(acc, peak, total, new_acc, new_peak, new_total)
        if ((block + 1) % tl.minimum(unit, RUN) == 0) | (block + 1 == last):
            # Always 0, unknown to the compiler, which would otherwise hoist the following and keep it in registers through the loop.
            zero = following >> 31
            late = tl.arange(0, ROWS) + zero
            late_tile = tl.program_id(0) + zero
            late_pair = tl.program_id(2) + zero
            late_rows = part_rows + zero
            rows = tl.minimum(all_rows - late_tile * ROWS, ROWS)
            if last - first == 1:
                if SINKS:
                    heads = sinks + (late_pair % GROUPS) * REPEAT
                    total += partials.sink_weight(heads, late_tile * ROWS + late, peak, REPEAT)
                value = acc / tl.where(total == 0.0, 1.0, total)[:, None]
                _write(out, value, late_pair, late_tile * ROWS + late, late < rows, all_rows, GROUPS, REPEAT, DIM, DIM_PAD)
            else:
                # A unit's first run is stored as its partial; later runs go through the program's own slot and are folded in.
                late_scratch = (late_pair * tl.num_programs(0) + late_tile).to(tl.int64) * (slots + programs)
                held_slot = late_scratch + block // unit - first // unit
                further = block // RUN > tl.maximum(block // unit * unit, first) // RUN
                slot = tl.where(further, late_scratch + slots + program, held_slot)
                partials.store(part_acc, part_stat, slot, late, channel, rows, late_rows, acc, peak, total, DIM)
                if further:
                    tl.debug_barrier()
                    for top in range(0, rows, FOLD_ROWS):
                        part = top + tl.arange(0, FOLD_ROWS)
                        held = partials.load(part_acc, part_stat, held_slot, part, channel, rows, late_rows, DIM)
                        new = partials.load(part_acc, part_stat, slot, part, channel, rows, late_rows, DIM)
                        sums = partials.fold(held[0], held[1], held[2], new[0], new[1], new[2])
                        # Every warp loads peaks and totals; one warp stores them.
                        tl.debug_barrier()
                        partials.store(part_acc, part_stat, held_slot, part, channel, rows, late_rows, sums[0], sums[1], sums[2], DIM)
                        tl.debug_barrier()
            acc, peak, total = partials.empty(ROWS, DIM_PAD)
        block = following
        following = after_next
    if last - first == 1:
        return

    zero = following >> 31
    pair = tl.program_id(2) + zero
    late_rows = part_rows + zero
    tile = tl.program_id(0) + zero
    rows = tl.minimum(all_rows - tile * ROWS, ROWS)
    scratch = (pair * tl.num_programs(0) + tile).to(tl.int64) * (slots + programs)
    counter = counters + 2 * (pair * tl.num_programs(0) + tile)
    arriving = tl.minimum(units, programs)
    sharing = tl.minimum(arriving, helpers)
    groups = (rows + MERGE_ROWS - 1) // MERGE_ROWS
    group = partials.first_group(counter, arriving, sharing, groups, POLLS)
    while group < groups:
        # Claimed early, so that the atomic's latency overlaps with the merge of this group.
        next_group = partials.next_group(counter, sharing, groups)
        part = group * MERGE_ROWS + tl.arange(0, MERGE_ROWS)
        value = partials.merged(
            part_acc, part_stat, scratch, part, tl.arange(0, DIM_PAD), rows, late_rows, first_unit, units, unit,
            sinks + pair % GROUPS * REPEAT, tile * ROWS, RUN, STRETCH, MERGE_ROWS, DIM, DIM_PAD, MERGE_UNROLL, REPEAT, SINKS,
        )  # fmt: skip
        _write(out, value, pair, tile * ROWS + part, part < rows, all_rows, GROUPS, REPEAT, DIM, DIM_PAD)
        group = next_group


def check_dtypes(name: str, query: Tensor, kv_pool: Tensor) -> None:
    """Check that queries and pool have one dtype that the kernels support.

    Raises:
        ConfigError: they do not.
    """
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ConfigError(f"{name}: query", "bfloat16, float16 or float32", str(query.dtype))
    if kv_pool.dtype != query.dtype:
        raise ConfigError(f"{name}: kv_pool", f"{query.dtype}, as the query", str(kv_pool.dtype))


def tile_shape(dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """``(rows, slots of a block, warps)``.

    16-bit types: 64 rows, the fewest of Hopper's warp-group matrix instructions, and as many slots as registers can hold in flight; heads
    above 256 have room for 16. float32 has no matrix instruction at full precision.
    """
    wide = dim > 128
    if dtype == torch.float32:
        return 16, 16 if wide else 32, 8
    if dim > 256:
        return 16, 32, 8
    if wide:
        return 64, 32, 8
    return 64, 128 if dim == triton.next_power_of_2(dim) else 64, 4


def by_parts(dim: int, dtype: torch.dtype) -> bool:
    """Rows and keys are multiplied some channels at a time: they are operands in registers, which whole ones don't fit."""
    return dtype == torch.float32 or dim > 256


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """``scale`` and ``cap`` of a kernel whose scores are base 2."""
    return (scale / softcap, softcap * math.log2(math.e)) if softcap > 0 else (scale * math.log2(math.e), 0.0)


def helpers(programs: int, places: int) -> int:
    """Number of programs that share a merge: 1 unless all ``programs`` of the launch run at once."""
    return HELPERS if programs <= places and not INTERPRETED else 1


def tree_attention(
    query_BTQD: Tensor,
    kv_pool: Tensor,
    layer: int,
    table_BP: Tensor,
    prefix_begin_BT: Tensor,
    prefix_end_B: Tensor,
    ancestors_BTX: Tensor,
    scale: float,
    sink_Q: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    check_dtypes("fused tree_attention", query_BTQD, kv_pool)
    lanes, tokens, heads, dim = query_BTQD.shape
    page_size, groups = kv_pool.shape[3], kv_pool.shape[4]
    query = query_BTQD if query_BTQD.stride(3) == 1 else query_BTQD.contiguous()
    # One compiled kernel serves every layer: the layer is part of an address, not an argument.
    pool = kv_pool[layer]
    ancestors = ancestors_BTX if ancestors_BTX.stride(2) == 1 else ancestors_BTX.contiguous()
    out = torch.empty((lanes, tokens, heads, dim), dtype=query.dtype, device=query.device)
    rows, block, warps = tile_shape(dim, query.dtype)
    # Every further word of ancestors is held in registers; next to a larger block a second one would spill.
    block = block if ancestors.shape[2] == 1 else min(block, 32)
    repeat, pad, exact = heads // groups, max(16, triton.next_power_of_2(dim)), by_parts(dim, query.dtype)
    length = table_BP.shape[1] * page_size
    tiles, pairs, blocks = triton.cdiv(tokens * repeat, rows), lanes * groups, triton.cdiv(length, block)
    # Never more than run at once: a program that takes a second unit loads it while others compute, one that has to wait does not.
    places = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(query.device)
    programs = min(max(places // (tiles * pairs), 1), blocks)
    slots = max(min(UNITS_PER_PROGRAM * programs, blocks), triton.cdiv(length, STRETCH))
    part_rows = min(rows, tokens * repeat)
    part_acc = torch.empty((pairs, tiles, slots + programs, part_rows, dim), dtype=torch.float32, device=query.device)
    part_stat = torch.empty((pairs, tiles, slots + programs, 2, part_rows), dtype=torch.float32, device=query.device)
    launch(
        _tree_attention, (tiles, programs, pairs),
        out, query, pool, table_BP, prefix_begin_BT, prefix_end_B, ancestors, part_acc, part_stat,
        semaphores(query.device, 2 * pairs * tiles), query if sink_Q is None else sink_Q,
        *score_factors(scale, softcap), tokens * repeat, length, programs, slots, part_rows, helpers(tiles * programs * pairs, places),
        *query.stride()[:3], *pool.stride()[:4], table_BP.stride(0), *prefix_begin_BT.stride(), *ancestors.stride()[:2],
        num_warps=warps, num_stages=1,
        GROUPS=groups, REPEAT=repeat, PAGE_SIZE=page_size, DIM=dim, DIM_PAD=pad,
        WORDS=ancestors.shape[2], WORDS_PAD=triton.next_power_of_2(ancestors.shape[2]), ROWS=rows, BLOCK=block,
        RUN=RUN // block, STRETCH=STRETCH // block, EXACT=exact, PART=min(64, pad),
        UNITS_PER_PROGRAM=UNITS_PER_PROGRAM, POLLS=POLLS, FOLD_ROWS=FOLD_ROWS,
        MERGE_ROWS=rows if exact else MERGE_ROWS, MERGE_UNROLL=1 if exact else MERGE_UNROLL, SINKS=sink_Q is not None, CAP=softcap > 0,
    )  # fmt: skip
    return out


OP = register(tree_attention)

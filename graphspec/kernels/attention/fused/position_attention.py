"""Triton kernel of :mod:`graphspec.kernels.attention.tree_attention` and ``chunk_attention`` that sums keys by their position.

The kernel of :mod:`.tree_attention` sums keys in order of their slots. A node of a tree then meets its ancestors in other places than plain
decoding does, and a chunk in other tiles. Here a query's keys stand at their positions: slot ``s`` of the prefix at position ``s``, its
ancestor of depth d at ``prefix + d``, which is the slot of the d-th set bit of its words. Tiles of keys, runs and stretches are cut at
absolute positions, so the bits of a query depend on its keys alone: not on its siblings, the number of nodes, or whether a key lies before
the window or in it.

Tiles before the window are the same for every query and shared. Of those that the window reaches, a query reads its own: rows whose
ancestors are the first slots of the window, as in a chain, share a tile; each other token's tile is a unit of work of its own, gathered
through its path. It fills that token's rows of the partial. All are multiplied by the same instructions in the same tile shape, where rows
of other tokens are masked, so a row has the same bits either way.

Units, runs, stretches and the merge are those of :mod:`.tree_attention`, but a unit never spans a run and the window.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused import _partials as partials
from ...fused.launch import Launch, launch, multiprocessors, operator, semaphores
from ...fused.work import ARRIVAL, Situation, Work, works
from ...registry import op_of
from . import tree_attention as by_slot
from ._blocks import PREFETCHED_CHANNELS, blocks_in_turn, following_block, prefetch_block, round_trips
from ._positions import _exact_scores, _halves, _loaded, _merged, _nth_one, _ones, _sight, _store, _weighed, _write
from .tree_attention import score_factors

MAX_CHANNELS = 8192
"""Slots times channels of a block."""
CHUNK_TOKENS = 128
"""Tokens of a chunk per launch, which bounds the partials in memory."""


def _work(launch: Launch, at: Situation) -> Work:
    values = launch.values
    block, run = values["BLOCK"], values["RUN"]
    tokens = values["all_rows"] // values["REPEAT"]
    slots = min(at.context + tokens, values["length"])
    blocks, maximum = -(-slots // block), values["UNITS_PER_PROGRAM"] * values["programs"]
    unit = 1 if blocks <= maximum else run if -(-blocks // run) <= maximum else values["STRETCH"]
    # The last run is a unit of its own.
    units = blocks if unit == 1 else blocks // unit + 1
    rows = min(values["ROWS"], values["part_rows"])
    # Each token of a tree has its own last tiles, which all are in L2 once one program has read them.
    own = 0 if at.chain or not values["PATHS"] else (blocks - min(at.context // block, blocks - 1)) * rows // values["REPEAT"]
    arriving = min(units + own, values["programs"])
    gathers = -(-(units + own) // values["programs"]) - -(-units // values["programs"])
    merge = ARRIVAL + -(-units // values["MERGE_UNROLL"]) if units + own > 1 else 0
    row = 2 * values["DIM"] * values["keys"].element_size()
    lanes = values["table"].shape[0]
    merged = rows * units * (values["DIM"] + 2) * 4 / min(arriving, max(values["helpers"], 1)) if units + own > 1 else 0
    return Work(
        bytes=lanes * values["GROUPS"] * slots * row,
        programs=lanes * values["GROUPS"] * arriving,
        in_flight=block * row,
        memory=round_trips(blocks_in_turn(blocks, unit, values["programs"]), values["DIM"]),
        # Page ids, then keys and values.
        cache=1 + merge + 2 * gathers,
        alone=merged + gathers * block * row,
        flops=4 * lanes * values["all_rows"] * values["GROUPS"] * slots * values["DIM"],
    )


@works(_work)
@triton.jit
def _position_attention(
    out, query, keys, table, begin, end, ancestors, valid, part_acc, part_stat, counters, sinks,
    scale, cap, all_rows, length, programs, slots, part_rows, helpers,
    query_lane, query_token, query_head, side_stride, page_stride, slot_stride, head_stride,
    table_stride, begin_lane, begin_token, words_lane, words_token, valid_lane, valid_token, out_lane,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, CHUNK: tl.constexpr, PATHS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr, STRETCH: tl.constexpr,
    EXACT: tl.constexpr, PART: tl.constexpr, UNITS_PER_PROGRAM: tl.constexpr, POLLS: tl.constexpr,
    FOLD_ROWS: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_UNROLL: tl.constexpr, SINKS: tl.constexpr, CAP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, ``program``, (lane, key/value head)): every unit whose number is ``program`` modulo ``programs``.

    With ``CHUNK`` ``end`` has each token's own slot, and ``words`` its strides; ``ancestors`` is not read. ``PATHS``: tokens may have
    ancestors that are not the first slots of the window.
    """
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
    column = tl.arange(0, BLOCK)
    lane_table = table + lane * table_stride

    # Page ids of the program's first two units if units are blocks, loaded before the lane's lengths are known.
    position = program * BLOCK + column
    page = tl.load(lane_table + position // PAGE_SIZE, mask=position < length, other=0)
    ahead = (program + programs) * BLOCK + column
    next_page = tl.load(lane_table + ahead // PAGE_SIZE, mask=ahead < length, other=0)
    query_pair = query + lane * query_lane + head * REPEAT * query_head
    query_row = token * query_token + row % REPEAT * query_head
    q = query_row
    if not EXACT:
        q = tl.load(query_pair + query_row[:, None] + channel[None, :], mask=live[:, None] & inside[None, :], other=0.0)
    prefix = 0
    if not CHUNK:
        prefix = tl.load(end + lane)
        prefix = tl.minimum(tl.maximum(prefix, -(1 << 30)), length).to(tl.int32)
    row_begin, row_end, apart = _sight(
        begin, end, ancestors, valid, lane, row, all_rows, length, prefix,
        begin_lane, begin_token, words_lane, words_token, valid_lane, valid_token, REPEAT, WORDS, CHUNK, PATHS,
    )  # fmt: skip
    low = tl.min(row_begin, 0)
    high = tl.max(tl.where(live, row_begin, 0), 0)
    stop = tl.max(row_end, 0)
    first = low // BLOCK
    last = tl.where(stop > low, (stop + BLOCK - 1) // BLOCK, first)
    tail = last
    # Tokens with rows in the tile.
    tokens = 0
    if PATHS and tl.max(apart.to(tl.int32), 0) > 0:
        tail = tl.minimum(tl.maximum(prefix // BLOCK, first), last)
        tokens = (tl.minimum(all_rows, tile * ROWS + ROWS) - 1) // REPEAT - tile * ROWS // REPEAT + 1

    maximum = UNITS_PER_PROGRAM * programs
    unit = tl.where(tail - first <= maximum, 1, RUN)
    unit = tl.where((tail + RUN - 1) // RUN - first // RUN <= maximum, unit, STRETCH)
    first_unit = first // unit
    units = (tail + unit - 1) // unit - first_unit
    units = tl.where(tail > first, units, 0)
    items = units + (last - tail) * (tokens + 1)
    mine = (program + programs - first_unit % programs) % programs
    if mine >= tl.maximum(items, 1):
        return
    if last == first:
        _write(out, out_lane, tl.zeros([ROWS, DIM_PAD], tl.float32), tl.program_id(2), row, live, GROUPS, REPEAT, DIM, DIM_PAD)
        return

    base = keys + head * head_stride
    block = tl.maximum(first, (first_unit + mine) * unit)
    following = following_block(block, unit, programs)
    if (block != program) | (unit != 1):
        position = block * BLOCK + column
        page = tl.load(lane_table + position // PAGE_SIZE, mask=position < length, other=0)
        ahead = following * BLOCK + column
        next_page = tl.load(lane_table + ahead // PAGE_SIZE, mask=ahead < length, other=0)
    # Before each block's loads, and when none of its registers is taken.
    if DIM <= PREFETCHED_CHANNELS and following < tail:
        rows_ahead = tl.maximum(next_page, 0).to(tl.int64) * page_stride + ((following * BLOCK + column) % PAGE_SIZE) * slot_stride
        prefetch_block(base + rows_ahead, side_stride, DIM)
    acc, peak, total = partials.empty(ROWS, DIM_PAD)
    while block < tail:
        here = block * BLOCK
        position = here + column
        seen = (position >= low) & (position < stop)
        place = tl.maximum(page, 0).to(tl.int64) * page_stride + (position % PAGE_SIZE) * slot_stride
        v = q
        if not EXACT:
            k, v = _loaded(base, place, seen, side_stride, DIM, DIM_PAD)
        if EXACT:
            score = _exact_scores(base, place, seen, query_pair, query_row, live, ROWS, BLOCK, DIM, DIM_PAD, PART)
        else:
            score = tl.dot(q, tl.trans(k), input_precision="ieee")
        page = next_page
        after_next = following_block(following, unit, programs)
        ahead = after_next * BLOCK + column
        next_page = tl.load(lane_table + ahead // PAGE_SIZE, mask=ahead < length, other=0)
        score = partials.capped(score, scale, cap) if CAP else score * scale
        if CHUNK or (here < high) | (here + BLOCK > prefix):
            # Reloaded, from L1. `zero` hides from the compiler that these are the tile's own rows; else it would keep what follows from
            # them in registers through the loop.
            zero = following >> 31
            own_row = (tl.program_id(0) + zero) * ROWS + tl.arange(0, ROWS)
            row_low, row_stop, _ = _sight(
                begin, end, ancestors, valid, lane, own_row, all_rows, length, prefix,
                begin_lane, begin_token, words_lane, words_token, valid_lane, valid_token, REPEAT, WORDS, CHUNK, PATHS,
            )  # fmt: skip
            score = tl.where((position[None, :] >= row_low[:, None]) & (position[None, :] < row_stop[:, None]), score, float("-inf"))
        new_acc, new_peak, new_total = _weighed(score, v, base, place, seen, side_stride, EXACT, DIM, DIM_PAD)
        acc, peak, total = partials.fold(acc, peak, total, new_acc, new_peak, new_total)
        if ((block + 1) % tl.minimum(unit, RUN) == 0) | (block + 1 == tail):
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
                _write(out, out_lane, value, late_pair, late_tile * ROWS + late, late < rows, GROUPS, REPEAT, DIM, DIM_PAD)
            else:
                # A unit's first run is stored as its partial; later runs go through the program's own slot and are folded in. The rest of
                # a run, which what follows the tail completes, stays a part of its own, after the units.
                late_scratch = (late_pair * tl.num_programs(0) + late_tile).to(tl.int64) * (slots + programs)
                held_slot = late_scratch + block // unit - first // unit
                further = block // RUN > tl.maximum(block // unit * unit, first) // RUN
                rest = further & ((block + 1) % RUN != 0)
                slot = tl.where(further, late_scratch + slots + program, held_slot)
                slot = tl.where(rest, held_slot + 1, slot)
                partials.store(part_acc, part_stat, slot, late, channel, rows, late_rows, acc, peak, total, DIM)
                if further & (rest == 0):
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
        if DIM <= PREFETCHED_CHANNELS and following < tail:
            rows_ahead = tl.maximum(next_page, 0).to(tl.int64) * page_stride + ((following * BLOCK + column) % PAGE_SIZE) * slot_stride
            prefetch_block(base + rows_ahead, side_stride, DIM)
    if (last - first == 1) & (tail == last):
        return

    zero = following >> 31
    # A last stretch of several runs whose last one is cut short has a part more.
    cut = tl.where((unit == STRETCH) & (tail // RUN > tl.maximum(tail // STRETCH * STRETCH, first) // RUN), tail // RUN * RUN, tail)
    if PATHS:
        item = (mine + programs - units % programs) % programs + zero
        whole = units + (cut < tail)
        while item < items - units:
            # Either the rows whose ancestors are the window's first slots, or those of one token.
            block = tail + item // (tokens + 1)
            own = tile * ROWS // REPEAT + item % (tokens + 1) - 1
            alone = item % (tokens + 1) > 0
            own_row = (tl.program_id(0) + zero) * ROWS + tl.arange(0, ROWS)
            row_low, row_stop, row_apart = _sight(
                begin, end, ancestors, valid, lane, own_row, all_rows, length, prefix,
                begin_lane, begin_token, words_lane, words_token, valid_lane, valid_token, REPEAT, WORDS, CHUNK, PATHS,
            )  # fmt: skip
            served = (own_row < all_rows) & (row_apart == alone) & ((own_row // REPEAT == own) | (alone == 0))
            row_low = tl.where(served, row_low, length)
            row_stop = tl.where(served, row_stop, 0)
            position = block * BLOCK + tl.arange(0, BLOCK)
            seen = (position >= tl.min(row_low, 0)) & (position < tl.max(row_stop, 0))
            # An ancestor is in the slot of the set bit of its number.
            rank = position - prefix
            ancestor = rank
            if alone:
                counted = 0
                for x in tl.static_range(WORDS):
                    word = tl.load(ancestors + lane * words_lane + own * words_token + x)
                    for low_or_high in tl.static_range(2):
                        half = _halves(word)[low_or_high]
                        bits = _ones(half)
                        here = (rank >= counted) & (rank < counted + bits)
                        ancestor = tl.where(here, 64 * x + 32 * low_or_high + _nth_one(half, rank - counted), ancestor)
                        counted += bits
            spot = tl.where(rank < 0, position, prefix + ancestor)
            seen = seen & (spot < length)
            page = tl.load(lane_table + spot // PAGE_SIZE, mask=seen, other=0)
            place = tl.maximum(page, 0).to(tl.int64) * page_stride + (spot % PAGE_SIZE) * slot_stride
            if EXACT:
                score = _exact_scores(base, place, seen, query_pair, query_row, live, ROWS, BLOCK, DIM, DIM_PAD, PART)
            else:
                channel = tl.arange(0, DIM_PAD)
                at = base + channel[None, :] + place[:, None]
                k = tl.load(at, mask=seen[:, None] & (channel < DIM)[None, :], other=0.0)
                score = tl.dot(q, tl.trans(k), input_precision="ieee")
            score = partials.capped(score, scale, cap) if CAP else score * scale
            visible = (position[None, :] >= row_low[:, None]) & (position[None, :] < row_stop[:, None]) & (spot < length)[None, :]
            # Values are loaded late: registers would not hold them next to the keys and the gathered places.
            new_acc, new_peak, new_total = _weighed(
                tl.where(visible, score, float("-inf")), q, base, place, seen, side_stride, True, DIM, DIM_PAD
            )  # fmt: skip
            late_scratch = ((tl.program_id(2) + zero) * tl.num_programs(0) + tl.program_id(0) + zero).to(tl.int64) * (slots + programs)
            late = tl.arange(0, ROWS) + zero
            # The empty partial first: a fold, as in a loop over blocks.
            acc, peak, total = partials.empty(ROWS, DIM_PAD)
            acc, peak, total = partials.fold(acc, peak, total, new_acc, new_peak, new_total)
            _store(part_acc, part_stat, late_scratch + whole + block - tail, late, channel, served, part_rows + zero, acc, peak, total, DIM)
            item += programs

    pair = tl.program_id(2) + zero
    late_rows = part_rows + zero
    tile = tl.program_id(0) + zero
    rows = tl.minimum(all_rows - tile * ROWS, ROWS)
    scratch = (pair * tl.num_programs(0) + tile).to(tl.int64) * (slots + programs)
    counter = counters + 2 * (pair * tl.num_programs(0) + tile)
    arriving = tl.minimum(items, programs)
    sharing = tl.minimum(arriving, helpers)
    groups = (rows + MERGE_ROWS - 1) // MERGE_ROWS
    group = partials.first_group(counter, arriving, sharing, groups, POLLS)
    while group < groups:
        # Claimed early, so that the atomic's latency overlaps with the merge of this group.
        next_group = partials.next_group(counter, sharing, groups)
        part = group * MERGE_ROWS + tl.arange(0, MERGE_ROWS)
        value = _merged(
            part_acc, part_stat, scratch, part, tl.arange(0, DIM_PAD), rows, late_rows,
            first, unit, tail, cut, units, units + (cut < tail) + last - tail, sinks + pair % GROUPS * REPEAT, tile * ROWS,
            RUN, STRETCH, MERGE_ROWS, DIM, DIM_PAD, MERGE_UNROLL, REPEAT, SINKS,
        )  # fmt: skip
        _write(out, out_lane, value, pair, tile * ROWS + part, part < rows, GROUPS, REPEAT, DIM, DIM_PAD)
        group = next_group


def _attend(
    query: Tensor, kv_pool: Tensor, layer: int, table: Tensor, begin: Tensor, end: Tensor, ancestors: Tensor | None, valid: Tensor | None,
    scale: float, sinks: Tensor | None, softcap: float, out: Tensor,
) -> None:  # fmt: skip
    lanes, tokens, heads, dim = query.shape
    page_size, groups = kv_pool.shape[3], kv_pool.shape[4]
    # One compiled kernel serves every layer: the layer is part of an address, not an argument.
    pool = kv_pool[layer]
    rows, block, warps = by_slot.tile_shape(dim, query.dtype)
    # Keys and values of 128 slots of 128 channels, next to the places of a token's own ones, would spill.
    block = block if by_slot.by_parts(dim, query.dtype) else min(block, MAX_CHANNELS // max(dim, 1))
    repeat, pad, exact = heads // groups, max(16, triton.next_power_of_2(dim)), by_slot.by_parts(dim, query.dtype)
    length = table.shape[1] * page_size
    words = 1 if ancestors is None else ancestors.shape[2]
    tiles, pairs, blocks = triton.cdiv(tokens * repeat, rows), lanes * groups, triton.cdiv(length, block)
    places = by_slot.PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(query.device)
    programs = min(max(places // (tiles * pairs), 1), blocks)
    # Whole units, the rest of a run, and the blocks that the window reaches.
    slots = (
        max(min(by_slot.UNITS_PER_PROGRAM * programs, blocks), triton.cdiv(length, by_slot.STRETCH) + 1)
        + triton.cdiv(64 * words, block)
        + 2
    )
    part_rows = min(rows, tokens * repeat)
    part_acc = torch.empty((pairs, tiles, slots + programs, part_rows, dim), dtype=torch.float32, device=query.device)
    part_stat = torch.empty((pairs, tiles, slots + programs, 2, part_rows), dtype=torch.float32, device=query.device)
    ends = (end.stride(0), end.stride(1)) if ancestors is None else ancestors.stride()[:2]
    launch(
        _position_attention, (tiles, programs, pairs),
        out, query, pool, table, begin, end, ancestors, valid, part_acc, part_stat,
        semaphores(query.device, 2 * pairs * tiles), query if sinks is None else sinks,
        *score_factors(scale, softcap), tokens * repeat, length, programs, slots, part_rows,
        by_slot.helpers(tiles * programs * pairs, places),
        *query.stride()[:3], *pool.stride()[:4], table.stride(0), *begin.stride(), *ends, *((0, 0) if valid is None else valid.stride()),
        out.stride(0),
        num_warps=warps, num_stages=1,
        GROUPS=groups, REPEAT=repeat, PAGE_SIZE=page_size, DIM=dim, DIM_PAD=pad, WORDS=words, WORDS_PAD=triton.next_power_of_2(words),
        CHUNK=ancestors is None, PATHS=ancestors is not None, ROWS=rows, BLOCK=block,
        RUN=by_slot.RUN // block, STRETCH=by_slot.STRETCH // block, EXACT=exact, PART=min(64, pad),
        UNITS_PER_PROGRAM=by_slot.UNITS_PER_PROGRAM, POLLS=by_slot.POLLS, FOLD_ROWS=by_slot.FOLD_ROWS,
        MERGE_ROWS=rows if exact else by_slot.MERGE_ROWS, MERGE_UNROLL=1 if exact else by_slot.MERGE_UNROLL,
        SINKS=sinks is not None, CAP=softcap > 0,
    )  # fmt: skip


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
    by_slot.check_dtypes("fused tree_attention", query_BTQD, kv_pool)
    query = query_BTQD if query_BTQD.stride(3) == 1 else query_BTQD.contiguous()
    ancestors = ancestors_BTX if ancestors_BTX.stride(2) == 1 else ancestors_BTX.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _attend(query, kv_pool, layer, table_BP, prefix_begin_BT, prefix_end_B, ancestors, None, scale, sink_Q, softcap, out)
    return out


def chunk_attention(
    query_BTQD: Tensor,
    kv_pool: Tensor,
    layer: int,
    table_BP: Tensor,
    prefix_begin_BT: Tensor,
    slot_BT: Tensor,
    valid_BT: Tensor,
    scale: float,
    sink_Q: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    by_slot.check_dtypes("fused chunk_attention", query_BTQD, kv_pool)
    query = query_BTQD if query_BTQD.stride(3) == 1 else query_BTQD.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for some in range(0, query.shape[1], CHUNK_TOKENS):
        part = slice(some, some + CHUNK_TOKENS)
        _attend(
            query[:, part], kv_pool, layer, table_BP, prefix_begin_BT[:, part], slot_BT[:, part], None, valid_BT[:, part], scale, sink_Q,
            softcap, out[:, part],
        )  # fmt: skip
    return out


OP = operator("tree_attention_by_position", tree_attention, op_of("tree_attention").signature)
CHUNK_OP = operator("chunk_attention_by_position", chunk_attention, op_of("chunk_attention").signature)

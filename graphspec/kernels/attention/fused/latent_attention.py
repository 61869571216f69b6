"""Triton kernels of :mod:`graphspec.kernels.attention.latent_attention` and :mod:`graphspec.kernels.attention.latent_chunk_attention`.

A tile holds ``BLOCK_M`` rows of one lane, (token, head) pairs with heads innermost. All of them read the same slots, so a tile of 64 rows
loads a latent row once and uses it 64 times, as key and as value.

For decoding, the slots of a lane are cut into splits at absolute multiples of a size that depends on the lane's own length only. The cuts,
and so a row's bits, do not depend on the batch, the number of tokens or the width of the page table. A second kernel merges the splits of
a row in order, because the last program of a tile alone would have to read megabytes.

With many lanes, tokens and heads the partials of all splits would take gigabytes: 8 trees of 100 nodes with 128 heads have 3.3 million.
So tiles are processed in groups whose partials fit ``SCRATCH``. Each group takes two launches, and all groups share the same memory. With
32 splits a group is 15 tiles, 480 programs, which fill an H200; a chain of up to 6 nodes of DeepSeek-V3 at batch 1 is one group. A program
that folded several splits would need two accumulators, 256 registers per thread, and pass them through memory twice.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....errors import ConfigError
from ...fused.launch import Launch, launch, register
from ...fused.work import Situation, Work, works

SPLIT = 256
"""Fewest slots of a split; doubled until :data:`SPLITS` splits cover a lane."""

SPLITS = 32
"""Most splits of a lane; bounds the memory and time of the merge."""

WINDOW = 128
"""Slots that ancestor words can address."""

SCRATCH = 64 * 2**20
"""Most bytes of partials of one launch. Groups of tiles reuse them, so a larger grid needs no more."""

DOUBLINGS = 16
MERGE = 8
"""Splits that a merging program loads at once."""


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _shifted(word, by):
    """``word << by``, or ``word >> -by`` if negative; 0 when all bits are shifted out."""
    word = word.to(tl.uint64)
    left = word << tl.minimum(tl.maximum(by, 0), 63).to(tl.uint64)
    right = word >> tl.minimum(tl.maximum(-by, 0), 63).to(tl.uint64)
    return tl.where(by >= 0, tl.where(by < 64, left, 0), tl.where(by > -64, right, 0))


@triton.jit
def _bit(word, column):
    """Whether bit ``column`` of a 64-bit word is set, tested on 32-bit halves: a tile of 64-bit words would not fit in registers."""
    low = (word & 0xFFFFFFFF).to(tl.uint32)
    high = (word >> 32).to(tl.uint32)
    half = tl.where(column < 32, low, high)
    return ((half >> (column & 31).to(tl.uint32)) & 1) != 0


def _work(launch: Launch, at: Situation) -> Work:
    values = launch.values
    lanes, block = values["table"].shape[0], values["BLOCK_N"]
    slots = at.context + values["tokens"]
    blocks = -(-slots // (block * values["splits"]))
    row = (values["width"] + values["rope"]) * values["pool"].element_size()
    return Work(
        bytes=lanes * slots * row, programs=launch.programs, in_flight=(launch.num_stages - 1) * block * row,
        memory=1 + blocks / max(launch.num_stages - 1, 1), cache=2,
    )  # fmt: skip


def _merge_work(launch: Launch, at: Situation) -> Work:
    values = launch.values
    return Work(cache=1 + -(-values["splits"] // values["MERGE"]), alone=values["splits"] * values["width"] * 4)


@works(_work)
@triton.jit(do_not_specialize=["first_pair"])
def _latent_attention(
    query_latent, query_rope, pool, table, begin, end, valid, ancestors, out, peak, total, scale,
    first_pair, tiles, tokens, heads, width, rope, columns, splits, table_stride,
    latent_lane, latent_token, latent_head, rope_lane, rope_token, rope_head,
    CUT: tl.constexpr, SPLITS: tl.constexpr, SPLIT: tl.constexpr, DOUBLINGS: tl.constexpr, WINDOW: tl.constexpr,
    WORDS: tl.constexpr, CHUNK: tl.constexpr, PAGE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (split, pair): the result of a (lane, tile) pair, or with ``CUT`` the weighted sum, peak and total of one split.

    Partials are indexed by the pair's number within its launch.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    split = tl.program_id(0)
    pair = first_pair + tl.program_id(1)
    lane = (pair // tiles).to(tl.int64)
    row = pair % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    alive = row < tokens * heads
    step = tl.where(alive, row // heads, 0)
    head = (row % heads).to(tl.int64)
    last = columns * PAGE
    first_row = tl.load(begin + lane * tokens + step, mask=alive, other=0)
    # Slots are 32-bit; begins and ends of queries that see nothing may hold any value, so they are clamped.
    first_row = tl.minimum(tl.maximum(first_row, 0), last).to(tl.int32)
    if CHUNK:
        seeing = alive & (tl.load(valid + lane * tokens + step, mask=alive, other=0) != 0)
        stop_row = tl.load(end + lane * tokens + step, mask=seeing, other=-1) + 1
        stop_row = tl.minimum(tl.maximum(stop_row, 0), last).to(tl.int32)
        stop_row = tl.where(seeing, stop_row, 0)
        low = tl.min(tl.where(seeing, first_row, last), 0)
        high = tl.max(stop_row, 0)
        upper = high
        lower = low
    else:
        prefix = tl.load(end + lane)
        prefix = tl.minimum(tl.maximum(prefix, -(1 << 30)), last).to(tl.int32)
        stop_row = tl.where(alive, prefix, 0)
        low = tl.min(tl.where(alive, first_row, last), 0)
        high = prefix
        word = ancestors + (lane * tokens + step) * WORDS
        word0 = tl.load(word, mask=alive, other=0)
        seen0 = tl.reduce(word0, 0, _either)
        word1 = word0
        seen1 = seen0
        bit = tl.arange(0, 64)
        reach = tl.max(tl.where(_bit(seen0.to(tl.uint64), bit), bit + 1, 0), 0)
        if WORDS == 2:
            word1 = tl.load(word + 1, mask=alive, other=0)
            seen1 = tl.reduce(word1, 0, _either)
            reach = tl.maximum(reach, tl.max(tl.where(_bit(seen1.to(tl.uint64), bit), bit + 65, 0), 0))
        upper = tl.minimum(prefix + reach, last)
        lower = tl.maximum(tl.minimum(low, prefix), 0)
    if CUT:
        size = SPLIT
        for _ in tl.static_range(DOUBLINGS):
            size = tl.where(size * SPLITS < prefix + WINDOW, 2 * size, size)
        lower = tl.maximum(lower, split * size)
        upper = tl.minimum(upper, (split + 1) * size)
    # Equal in every row; reduced because the interpreter takes no other scalar as a loop bound.
    lower = tl.min(tl.where(alive, lower // BLOCK_N * BLOCK_N, last), 0)
    upper = tl.max(tl.where(alive, upper, 0), 0)

    channel = tl.arange(0, LATENT)
    angle = tl.arange(0, ROPE)
    kept = tl.full((LATENT,), True, tl.int1) if EXACT else channel < width
    turned = tl.full((ROPE,), True, tl.int1) if EXACT else angle < rope
    position = lane * latent_lane + step.to(tl.int64) * latent_token + head * latent_head
    queries = tl.load(query_latent + position[:, None] + channel[None, :], mask=alive[:, None] & kept[None, :], other=0.0)
    position = lane * rope_lane + step.to(tl.int64) * rope_token + head * rope_head
    turns = tl.load(query_rope + position[:, None] + angle[None, :], mask=alive[:, None] & turned[None, :], other=0.0)

    column = tl.arange(0, BLOCK_N)
    best = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    sum_row = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, LATENT), tl.float32)
    for start in range(lower, upper, BLOCK_N):
        slot = start + column
        seen = (slot >= low) & (slot < high)
        visible = (slot[None, :] >= first_row[:, None]) & (slot[None, :] < stop_row[:, None])
        if not CHUNK:
            offset = start - prefix
            bits_row = _shifted(word0, -offset)
            bits_all = _shifted(seen0, -offset)
            if WORDS == 2:
                bits_row |= _shifted(word1, 64 - offset)
                bits_all |= _shifted(seen1, 64 - offset)
            seen |= _bit(bits_all, column)
            visible |= _bit(bits_row[:, None], column[None, :])
        # Slots that no row of the tile sees may hold NaN, and 0 * NaN is NaN.
        seen &= slot < upper
        visible &= (slot < upper)[None, :]
        page = tl.load(table + lane * table_stride + slot // PAGE, mask=seen, other=0).to(tl.int64)
        source = pool + (page * PAGE + slot % PAGE) * (width + rope)
        rows = tl.load(source[:, None] + channel[None, :], mask=seen[:, None] & kept[None, :], other=0.0)
        turned_rows = tl.load(source[:, None] + width + angle[None, :], mask=seen[:, None] & turned[None, :], other=0.0)
        score = tl.dot(queries, tl.trans(rows), input_precision="ieee")
        score = tl.dot(turns, tl.trans(turned_rows), score, input_precision="ieee")
        score = tl.where(visible, score * scale, -float("inf"))
        higher = tl.maximum(best, tl.max(score, 1))
        # Rows that have seen nothing yet have no finite peak.
        pivot = tl.where(higher == -float("inf"), 0.0, higher)
        weight = tl.exp2(score - pivot[:, None])
        shrink = tl.exp2(best - pivot)
        sum_row = sum_row * shrink + tl.sum(weight, 1)
        mixed = tl.dot(weight.to(rows.dtype), rows, mixed * shrink[:, None], input_precision="ieee")
        best = higher

    if CUT:
        line = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(peak + line * splits + split, best, mask=alive)
        tl.store(total + line * splits + split, sum_row, mask=alive)
        target = out + (line * splits + split)[:, None] * width + channel[None, :]
        tl.store(target, mixed, mask=(alive & (sum_row != 0))[:, None] & kept[None, :])
    else:
        line = lane * tokens * heads + row
        mixed = mixed * (1.0 / tl.where(sum_row == 0, 1.0, sum_row))[:, None]
        tl.store(out + line[:, None] * width + channel[None, :], mixed, mask=alive[:, None] & kept[None, :])


@works(_merge_work)
@triton.jit(do_not_specialize=["first_pair"])
def _merge(
    partial, peak, total, out, first_pair, tiles, rows_of_lane, splits, width,
    SPLITS: tl.constexpr, MERGE: tl.constexpr, LATENT: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row of a launch): merge the splits of one row, in order."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    line = tl.program_id(0).to(tl.int64)
    pair = first_pair + tl.program_id(0) // BLOCK_M
    row = pair % tiles * BLOCK_M + tl.program_id(0) % BLOCK_M
    if row >= rows_of_lane:
        return
    channel = tl.arange(0, LATENT)
    every = tl.arange(0, SPLITS)
    highest = tl.max(tl.load(peak + line * splits + every, mask=every < splits, other=-float("inf")), 0)
    pivot = tl.where(highest == -float("inf"), 0.0, highest)
    mixed = tl.zeros((LATENT,), tl.float32)
    whole = 0.0
    for start in range(0, splits, MERGE):
        split = start + tl.arange(0, MERGE)
        sums = tl.load(total + line * splits + split, mask=split < splits, other=0.0)
        used = sums != 0
        weight = tl.exp2(tl.load(peak + line * splits + split, mask=used, other=-float("inf")) - pivot)
        source = partial + (line * splits + split)[:, None] * width + channel[None, :]
        rows = tl.load(source, mask=used[:, None] & (channel < width)[None, :], other=0.0)
        mixed += tl.sum(rows * weight[:, None], 0)
        whole += tl.sum(sums * weight, 0)
    mixed = mixed * (1.0 / tl.where(whole == 0, 1.0, whole))
    target = (pair // tiles).to(tl.int64) * rows_of_lane + row
    tl.store(out + target * width + channel, mixed, mask=channel < width)


def _blocks(dtype: torch.dtype) -> tuple[int, int]:
    """``(BLOCK_M, BLOCK_N)``, from the dtype only, so that a row's bits do not depend on shapes.

    A warp group multiplies 64 rows at once. Their 512 output channels take half the register file, which leaves no room for blocks of 64
    slots.
    """
    return (64, 32) if dtype.itemsize == 2 else (16, 16)


def _group(pairs: int, size: int) -> int:
    """(lane, tile) pairs per launch: as many as fit :data:`SCRATCH`, in groups of equal size.

    Args:
        pairs: total number of pairs.
        size: bytes of the partials of one pair.
    """
    groups = triton.cdiv(pairs, max(SCRATCH // size, 1))
    return triton.cdiv(pairs, groups)


def _attend(
    query_latent: Tensor,
    query_rope: Tensor,
    latent_pool: Tensor,
    layer: int,
    table: Tensor,
    begin: Tensor,
    end: Tensor,
    valid: Tensor | None,
    ancestors: Tensor | None,
    scale: float,
) -> Tensor:
    lanes, tokens, heads, width = query_latent.shape
    rope, page_size = query_rope.shape[-1], latent_pool.shape[3]
    slots = table.shape[1] * page_size
    splits = 1 if ancestors is None else min(SPLITS, triton.cdiv(slots, SPLIT))
    block_m, block_n = _blocks(query_latent.dtype)
    out = query_latent.new_empty(lanes, tokens, heads, width)
    tiles = triton.cdiv(tokens * heads, block_m)
    group = pairs = lanes * tiles
    target, peak, total = out, None, None
    if splits > 1:
        group = _group(pairs, splits * block_m * (width + 2) * 4)
        target = out.new_empty(group * block_m, splits, width, dtype=torch.float32)
        peak, total = (out.new_empty(group * block_m, splits, dtype=torch.float32) for _ in range(2))
    latent, turned = triton.next_power_of_2(max(width, 16)), triton.next_power_of_2(max(rope, 16))
    begin, end = begin.contiguous(), end.contiguous()
    valid, ancestors = (None if each is None else each.contiguous() for each in (valid, ancestors))
    for first in range(0, pairs, group):
        taken = min(group, pairs - first)
        launch(
            _latent_attention, (splits, taken),
            query_latent, query_rope, latent_pool[layer], table, begin, end, valid, ancestors,
            target, peak, total, scale * math.log2(math.e),
            first, tiles, tokens, heads, width, rope, table.shape[1], splits, table.stride(0),
            *query_latent.stride()[:3], *query_rope.stride()[:3],
            CUT=splits > 1, SPLITS=SPLITS, SPLIT=SPLIT, DOUBLINGS=DOUBLINGS, WINDOW=WINDOW,
            WORDS=0 if ancestors is None else ancestors.shape[-1], CHUNK=valid is not None, PAGE=page_size,
            LATENT=latent, ROPE=turned, EXACT=(latent, turned) == (width, rope), BLOCK_M=block_m, BLOCK_N=block_n,
            num_warps=8 if query_latent.dtype.itemsize == 2 else 4, num_stages=3,
        )  # fmt: skip
        if splits > 1:
            launch(
                _merge, (taken * block_m,), target, peak, total, out, first, tiles, tokens * heads, splits, width,
                SPLITS=SPLITS, MERGE=MERGE, LATENT=latent, BLOCK_M=block_m,
            )  # fmt: skip
    return out


def latent_attention(
    query_latent_BTQL: Tensor,
    query_rope_BTQR: Tensor,
    latent_pool: Tensor,
    layer: int,
    table_BP: Tensor,
    prefix_begin_BT: Tensor,
    prefix_end_B: Tensor,
    ancestors_BTX: Tensor,
    scale: float,
) -> Tensor:
    if ancestors_BTX.shape[-1] > WINDOW // 64:
        raise ConfigError("ancestors_BTX", f"at most {WINDOW // 64} words", ancestors_BTX.shape[-1])
    return _attend(
        query_latent_BTQL, query_rope_BTQR, latent_pool, layer, table_BP, prefix_begin_BT, prefix_end_B, None, ancestors_BTX, scale
    )


def latent_chunk_attention(
    query_latent_BTQL: Tensor,
    query_rope_BTQR: Tensor,
    latent_pool: Tensor,
    layer: int,
    table_BP: Tensor,
    prefix_begin_BT: Tensor,
    slot_BT: Tensor,
    valid_BT: Tensor,
    scale: float,
) -> Tensor:
    return _attend(query_latent_BTQL, query_rope_BTQR, latent_pool, layer, table_BP, prefix_begin_BT, slot_BT, valid_BT, None, scale)


OP = register(latent_attention)
CHUNK_OP = register(latent_chunk_attention)

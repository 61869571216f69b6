"""Triton kernels of :mod:`graphspec.kernels.attention.latent_attention` and :mod:`graphspec.kernels.attention.latent_chunk_attention`.

A tile holds ``BLOCK_M`` rows of one lane, (token, head) pairs with heads innermost. All of them read the same slots, so a tile of 64 rows
loads a latent row once and uses it 64 times, as key and as value.

For decoding, the slots of a lane are cut into splits at absolute multiples of a size that depends on the lane's own length only. The cuts,
and so a row's bits, do not depend on the batch, the number of tokens or the width of the page table. A second kernel merges the splits of
a row in order, because the last program of a tile alone would have to read megabytes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import register
from ...fused.work import works
from ._latent import WINDOW, attend, check_words, prefix_work, splits_of


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


@works(prefix_work)
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
    check_words(ancestors_BTX)
    splits = splits_of(table_BP, latent_pool)
    return attend(
        _latent_attention, query_latent_BTQL, query_rope_BTQR, latent_pool, layer, table_BP, prefix_begin_BT, prefix_end_B, None,
        ancestors_BTX, scale, tokens_of_tile=query_latent_BTQL.shape[1], splits=splits, merged=splits > 1, CUT=splits > 1, WINDOW=WINDOW,
    )  # fmt: skip


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
    return attend(
        _latent_attention, query_latent_BTQL, query_rope_BTQR, latent_pool, layer, table_BP, prefix_begin_BT, slot_BT, valid_BT,
        None, scale, tokens_of_tile=query_latent_BTQL.shape[1], splits=1, merged=False, CUT=False, WINDOW=WINDOW,
    )  # fmt: skip


OP = register(latent_attention)
CHUNK_OP = register(latent_chunk_attention)

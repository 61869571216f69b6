"""Triton kernel of ``latent_attention`` and ``latent_chunk_attention`` that sums keys by their position.

As in :mod:`.position_attention`, a query's keys stand at their positions: slot ``s`` of the prefix at position ``s``, its ancestor of depth
d at ``prefix + d``. Blocks and splits are cut at absolute positions, and the size of a split follows from the query's own position, so the
bits of a query depend on its keys alone, and a token of a prompt has those of plain decoding.

A tile holds heads of one token only. With 64 heads or more that is what the tiles of :mod:`.latent_attention` hold too. Then reading the
keys through the token's path costs little but the places: all rows of a tile see the same keys. With fewer heads a tile has empty rows,
and each token reads the prefix again, from L2. One loop serves both sides of the window's begin, so that the compiler can't sum them in two
ways.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import operator
from ...fused.work import works
from ...registry import op_of
from ._latent import attend, check_words, prefix_work, splits_of
from ._positions import _halves, _nth_one, _ones


@works(prefix_work)
@triton.jit(do_not_specialize=["first_pair"])
def _latent_position_attention(
    query_latent, query_rope, pool, table, begin, end, valid, ancestors, out, peak, total, scale,
    first_pair, tiles, tokens, heads, width, rope, columns, splits, table_stride,
    latent_lane, latent_token, latent_head, rope_lane, rope_token, rope_head,
    SPLITS: tl.constexpr, SPLIT: tl.constexpr, DOUBLINGS: tl.constexpr,
    WORDS: tl.constexpr, CHUNK: tl.constexpr, PAGE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (split, pair): the weighted sum, peak and total of one split of a (lane, token, tile of heads).

    With ``CHUNK`` ``end`` has each token's own slot, and ``ancestors`` is not read.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    split = tl.program_id(0)
    pair = first_pair + tl.program_id(1)
    place = (pair // tiles).to(tl.int64)
    lane = place // tokens
    step = place % tokens
    row = pair % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    alive = row < heads
    head = row.to(tl.int64)
    last = columns * PAGE
    first = tl.load(begin + place)
    # Slots are 32-bit; begins and ends of queries that see nothing may hold any value, so they are clamped.
    first = tl.minimum(tl.maximum(first, 0), last).to(tl.int32)
    if CHUNK:
        seeing = tl.load(valid + place) != 0
        stop = tl.load(end + place, mask=seeing, other=-1) + 1
        stop = tl.minimum(tl.maximum(stop, 0), last).to(tl.int32)
        prefix = stop
    else:
        prefix = tl.load(end + lane)
        prefix = tl.minimum(tl.maximum(prefix, -(1 << 30)), last).to(tl.int32)
        # An ancestor is in the slot of the set bit of its number. All are found here, where the accumulators take no registers yet.
        number = tl.arange(0, 64 * WORDS)
        ancestor_slot = number
        count = 0
        for x in tl.static_range(WORDS):
            word = tl.load(ancestors + place * WORDS + x)
            for half_of in tl.static_range(2):
                half = _halves(word)[half_of]
                bits = _ones(half)
                here = (number >= count) & (number < count + bits)
                ancestor_slot = tl.where(here, 64 * x + 32 * half_of + _nth_one(half, number - count), ancestor_slot)
                count += bits
        stop = tl.minimum(prefix + count, last)
        # A prefix that ends before its first slot is empty; the window after it is seen all the same.
        first = tl.minimum(first, tl.maximum(prefix, 0))
    size = SPLIT
    for _ in tl.static_range(DOUBLINGS):
        size = tl.where(size * SPLITS < stop, 2 * size, size)
    lower = tl.maximum(first, split * size)
    upper = tl.minimum(stop, (split + 1) * size)

    channel = tl.arange(0, LATENT)
    angle = tl.arange(0, ROPE)
    kept = tl.full((LATENT,), True, tl.int1) if EXACT else channel < width
    turned = tl.full((ROPE,), True, tl.int1) if EXACT else angle < rope
    at = lane * latent_lane + step * latent_token + head * latent_head
    queries = tl.load(query_latent + at[:, None] + channel[None, :], mask=alive[:, None] & kept[None, :], other=0.0)
    at = lane * rope_lane + step * rope_token + head * rope_head
    turns = tl.load(query_rope + at[:, None] + angle[None, :], mask=alive[:, None] & turned[None, :], other=0.0)

    column = tl.arange(0, BLOCK_N)
    best = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    sum_row = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, LATENT), tl.float32)
    for start in range(lower // BLOCK_N * BLOCK_N, upper, BLOCK_N):
        position = start + column
        seen = (position >= lower) & (position < upper)
        slot = position
        if not CHUNK:
            rank = position - prefix
            ancestor = tl.gather(ancestor_slot, tl.minimum(tl.maximum(rank, 0), 64 * WORDS - 1), 0)
            slot = tl.where(rank < 0, position, prefix + ancestor)
        # Slots that the token does not see may hold NaN, and 0 * NaN is NaN.
        seen &= slot < last
        page = tl.load(table + lane * table_stride + slot // PAGE, mask=seen, other=0).to(tl.int64)
        source = pool + (page * PAGE + slot % PAGE) * (width + rope)
        rows = tl.load(source[:, None] + channel[None, :], mask=seen[:, None] & kept[None, :], other=0.0)
        turned_rows = tl.load(source[:, None] + width + angle[None, :], mask=seen[:, None] & turned[None, :], other=0.0)
        score = tl.dot(queries, tl.trans(rows), input_precision="ieee")
        score = tl.dot(turns, tl.trans(turned_rows), score, input_precision="ieee")
        score = tl.where(seen[None, :], score * scale, -float("inf"))
        higher = tl.maximum(best, tl.max(score, 1))
        # Rows that have seen nothing yet have no finite peak.
        pivot = tl.where(higher == -float("inf"), 0.0, higher)
        weight = tl.exp2(score - pivot[:, None])
        shrink = tl.exp2(best - pivot)
        sum_row = sum_row * shrink + tl.sum(weight, 1)
        mixed = tl.dot(weight.to(rows.dtype), rows, mixed * shrink[:, None], input_precision="ieee")
        best = higher

    line = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(peak + line * splits + split, best, mask=alive)
    tl.store(total + line * splits + split, sum_row, mask=alive)
    target = out + (line * splits + split)[:, None] * width + channel[None, :]
    tl.store(target, mixed, mask=(alive & (sum_row != 0))[:, None] & kept[None, :])


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
    # By the width of the table, in which an engine's rows all have their pages: prompts and cycles are cut alike. One split is merged like
    # many: without the division there, results and accumulators share the registers.
    return attend(
        _latent_position_attention, query_latent_BTQL, query_rope_BTQR, latent_pool, layer, table_BP, prefix_begin_BT, prefix_end_B, None,
        ancestors_BTX, scale, tokens_of_tile=1, splits=splits_of(table_BP, latent_pool), merged=True,
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
        _latent_position_attention, query_latent_BTQL, query_rope_BTQR, latent_pool, layer, table_BP, prefix_begin_BT, slot_BT, valid_BT,
        None, scale, tokens_of_tile=1, splits=splits_of(table_BP, latent_pool), merged=True,
    )  # fmt: skip


OP = operator("latent_attention_by_position", latent_attention, op_of("latent_attention").signature)
CHUNK_OP = operator("latent_chunk_attention_by_position", latent_chunk_attention, op_of("latent_chunk_attention").signature)

"""Triton kernel of :mod:`graphspec.kernels.attention.tree_attention`: one pass over the pages, block by block.

Rows of a tile are ``token x query head`` of one key/value head. Blocks are visited in slot order and start at multiples of the block size,
so a row's bits do not depend on the chunk, the batch or the table width. Blocks that every row of the tile sees in full, most of a long
prompt, run without masks; those before and after run with masks.

Source: FlashAttention-2 (Dao, 2023), section 3.1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused._partials import capped, sink_weight
from ...fused.launch import launch, register
from ._positions import _exact_scores
from .tree_attention import check_dtypes, score_factors


@triton.jit
def _chunk_attention(
    out, query, keys, table, begin, slot, valid, sinks, scale, cap, tokens, length,
    query_lane, query_token, query_head, side_stride, page_stride, slot_stride, head_stride,
    table_stride, begin_lane, begin_token, slot_lane, slot_token, valid_lane, valid_token,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr, SINKS: tl.constexpr, CAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of rows of a (lane, key/value head)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # The last tokens have the most keys, so their tiles start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    lane = tl.program_id(2).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    token = row // REPEAT
    channel = tl.arange(0, DIM_PAD)
    inside = channel < DIM
    column = tl.arange(0, BLOCK)

    live = row < tokens * REPEAT
    live = live & (tl.load(valid + lane * valid_lane + token * valid_token, mask=live, other=0) != 0)
    row_begin = tl.load(begin + lane * begin_lane + token * begin_token, mask=live, other=0)
    row_begin = tl.minimum(tl.maximum(row_begin, 0), length).to(tl.int32)
    row_end = tl.load(slot + lane * slot_lane + token * slot_token, mask=live, other=0)
    row_end = tl.minimum(tl.maximum(row_end, -1), length - 1).to(tl.int32) + 1
    live = live & (row_begin < row_end)
    low = tl.min(tl.where(live, row_begin, length), 0)
    high = tl.max(tl.where(live, row_end, 0), 0)
    first = low // BLOCK
    last = tl.where(high > low, (high + BLOCK - 1) // BLOCK, first)
    # Whole blocks: from the latest begin to the earliest end, over live rows; results of the others are dropped.
    whole_first = (tl.max(tl.where(live, row_begin, 0), 0) + BLOCK - 1) // BLOCK
    whole_last = tl.min(tl.where(live, row_end, length), 0) // BLOCK
    whole_first = tl.minimum(tl.maximum(whole_first, first), last)
    whole_last = tl.minimum(tl.maximum(whole_last, whole_first), last)
    row_begin = tl.where(live, row_begin, length)
    row_end = tl.where(live, row_end, 0)

    written = (row < tokens * REPEAT)[:, None] & inside[None, :]
    query_pair = query + lane * query_lane + head.to(tl.int64) * REPEAT * query_head
    query_row = token * query_token + row % REPEAT * query_head
    if not EXACT:
        q = tl.load(query_pair + query_row[:, None] + channel[None, :], mask=written, other=0.0)
    base = keys + head.to(tl.int64) * head_stride + channel[None, :]
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for part in tl.static_range(3):
        if part == 0:
            block_first, block_last = first, whole_first
        elif part == 1:
            block_first, block_last = whole_first, whole_last
        else:
            block_first, block_last = whole_last, last
        for block in range(block_first, block_last):
            position = block * BLOCK + column
            if part == 1:
                seen = position < length
            else:
                visible = (position[None, :] >= row_begin[:, None]) & (position[None, :] < row_end[:, None])
                # Loaded as 0 where no row sees it: 0 * NaN would reach the result through the weights.
                seen = tl.max(visible.to(tl.int32), 0) != 0
            page = tl.load(table + lane * table_stride + position // PAGE_SIZE, mask=seen, other=0)
            place = tl.maximum(page, 0).to(tl.int64) * page_stride + (position % PAGE_SIZE) * slot_stride
            loaded = seen[:, None] & inside[None, :]
            if EXACT:
                keys_at = keys + head.to(tl.int64) * head_stride
                own = row < tokens * REPEAT
                score = _exact_scores(keys_at, place, seen, query_pair, query_row, own, ROWS, BLOCK, DIM, DIM_PAD, 64)
            else:
                k = tl.load(base + place[:, None], mask=loaded, other=0.0)
                score = tl.dot(q, tl.trans(k), input_precision="ieee")
            score = capped(score, scale, cap) if CAP else score * scale
            if part != 1:
                score = tl.where(visible, score, float("-inf"))
            joint = tl.maximum(peak, tl.max(score, 1))
            safe = tl.where(joint == float("-inf"), 0.0, joint)
            weight = tl.exp2(score - safe[:, None])
            keep = tl.exp2(peak - safe)
            peak = joint
            total = tl.fma(total, keep, tl.sum(weight, 1))
            v = tl.load(base + side_stride + place[:, None], mask=loaded, other=0.0)
            acc = tl.dot(weight.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    if SINKS:
        total += sink_weight(sinks + head * REPEAT, row, peak, REPEAT)
    value = tl.where(live[:, None], acc / tl.where(total == 0.0, 1.0, total)[:, None], 0.0)
    result = out + (lane * tokens * (GROUPS * REPEAT) + head * REPEAT) * DIM
    out_tile = result + (token * (GROUPS * REPEAT) + row % REPEAT)[:, None] * DIM + channel[None, :]
    tl.store(out_tile, value.to(out.dtype.element_ty), mask=written)


def tile_shape(dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """``(rows, slots of a block, warps, pipeline stages)``, from head dimension and dtype only."""
    if dtype == torch.float32:
        return 16, 16, 8, 1
    return (32 if dim > 256 else 64, 32, 8, 2) if dim > 128 else (128, 64, 8, 2)


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
    check_dtypes("fused chunk_attention", query_BTQD, kv_pool)
    lanes, tokens, heads, dim = query_BTQD.shape
    page_size, groups = kv_pool.shape[3], kv_pool.shape[4]
    query = query_BTQD if query_BTQD.stride(3) == 1 else query_BTQD.contiguous()
    # One compiled kernel serves every layer: the layer is part of an address, not an argument.
    pool = kv_pool[layer]
    out = torch.empty((lanes, tokens, heads, dim), dtype=query.dtype, device=query.device)
    rows, block, warps, stages = tile_shape(dim, query.dtype)
    repeat = heads // groups
    launch(
        _chunk_attention, (triton.cdiv(tokens * repeat, rows), groups, lanes),
        out, query, pool, table_BP, prefix_begin_BT, slot_BT, valid_BT, query if sink_Q is None else sink_Q,
        *score_factors(scale, softcap), tokens, table_BP.shape[1] * page_size,
        *query.stride()[:3], *pool.stride()[:4], table_BP.stride(0),
        *prefix_begin_BT.stride(), *slot_BT.stride(), *valid_BT.stride(),
        num_warps=warps, num_stages=stages,
        GROUPS=groups, REPEAT=repeat, PAGE_SIZE=page_size, DIM=dim, DIM_PAD=max(16, triton.next_power_of_2(dim)), ROWS=rows, BLOCK=block,
        EXACT=dim > 256 and query.dtype == torch.float32, SINKS=sink_Q is not None, CAP=softcap > 0,
    )  # fmt: skip
    return out


OP = register(chunk_attention)

"""Triton kernel of :mod:`graphspec.kernels.attention.rope_kv_write`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register

HEADS_PER_PROGRAM = 8


@triton.jit
def _normed(x, rms, weight, offset: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm of one slice of a head, given the inverse RMS; rounds where the reference rounds."""
    if offset:
        return ((x * rms) * (1.0 + weight.to(tl.float32))[None, :]).to(dtype).to(tl.float32)
    else:  # noqa: RET505
        return (weight.to(tl.float32)[None, :] * (x * rms).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _rope_kv_write(
    query, key, value, rope, rope_row, out, pool, layer, table, slot, valid, query_norm, key_norm, norm_eps,
    tokens, queries, groups, columns, page_size, pages,
    query_b, query_t, query_h, key_b, key_t, key_h, value_b, value_t, value_h, rope_rows, row_b, row_t, table_b, slot_b, slot_t,
    valid_b, valid_t,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, HEADS: tl.constexpr,
    NORM: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per token and ``HEADS`` heads of queries, keys or values."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane, token = row // tokens, row % tokens
    query_parts = tl.cdiv(queries, HEADS)
    key_parts = tl.cdiv(groups, HEADS)
    is_query = part < query_parts
    is_key = (part >= query_parts) & (part < query_parts + key_parts)
    first_head = tl.where(is_query, part, tl.where(is_key, part - query_parts, part - query_parts - key_parts)) * HEADS
    head = (first_head + tl.arange(0, HEADS)).to(tl.int64)
    heads = tl.where(is_query, queries, groups)
    own = head < heads

    source = tl.where(is_query, query_h, tl.where(is_key, key_h, value_h))
    stride_b = tl.where(is_query, query_b, tl.where(is_key, key_b, value_b))
    stride_t = tl.where(is_query, query_t, tl.where(is_key, key_t, value_t))
    base = query
    if not is_query:
        base = key
        if not is_key:
            base = value
    base = base + lane * stride_b + token * stride_t
    dtype: tl.constexpr = query.dtype.element_ty

    low = tl.arange(0, HALF_BLOCK)
    rest = tl.arange(0, REST_BLOCK)
    in_half = own[:, None] & (low < HALF)[None, :]
    in_rest = own[:, None] & (rest < DIM - 2 * HALF)[None, :]
    at = base + head[:, None] * source
    x1 = tl.load(at + low[None, :], mask=in_half, other=0.0).to(tl.float32)
    x2 = tl.load(at + HALF + low[None, :], mask=in_half, other=0.0).to(tl.float32)
    x3 = tl.load(at + 2 * HALF + rest[None, :], mask=in_rest, other=0.0).to(tl.float32)

    if is_query or is_key:
        if NORM:
            weight = query_norm
            if is_key:
                weight = key_norm
            total = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1) + tl.sum(x3 * x3, 1)
            rms = (1.0 / tl.sqrt(total / DIM + norm_eps))[:, None]
            x1 = _normed(x1, rms, tl.load(weight + low, mask=low < HALF, other=0.0), OFFSET, dtype)
            x2 = _normed(x2, rms, tl.load(weight + HALF + low, mask=low < HALF, other=0.0), OFFSET, dtype)
            x3 = _normed(x3, rms, tl.load(weight + 2 * HALF + rest, mask=rest < DIM - 2 * HALF, other=0.0), OFFSET, dtype)
        angle = tl.load(rope_row + lane * row_b + token * row_t)
        angle = rope + tl.minimum(tl.maximum(angle, 0), rope_rows - 1) * 2 * HALF
        c = tl.load(angle + low, mask=low < HALF, other=0.0).to(dtype).to(tl.float32)[None, :]
        s = tl.load(angle + HALF + low, mask=low < HALF, other=0.0).to(dtype).to(tl.float32)[None, :]
        y1 = x1 * c - x2 * s
        y2 = x2 * c + x1 * s
        x1 = y1
        x2 = y2

    if is_query:
        to = out + (row * queries + head[:, None]) * DIM
        tl.store(to + low[None, :], x1.to(dtype), mask=in_half)
        tl.store(to + HALF + low[None, :], x2.to(dtype), mask=in_half)
        tl.store(to + 2 * HALF + rest[None, :], x3.to(dtype), mask=in_rest)
    else:
        where = tl.load(slot + lane * slot_b + token * slot_t)
        counts = tl.load(valid + lane * valid_b + token * valid_t) != 0
        where = tl.minimum(tl.maximum(where, 0), columns * page_size - 1)
        page = tl.load(table + lane * table_b + where // page_size).to(tl.int64)
        page = tl.where(counts, page, 0)
        side = tl.where(is_key, 0, 1)
        kept = pool.dtype.element_ty
        cell = ((tl.cast(layer, tl.int64) * 2 + side) * pages + page) * page_size + where % page_size
        to = pool + (cell * groups + head[:, None]) * DIM
        tl.store(to + low[None, :], x1.to(dtype).to(kept), mask=in_half)
        tl.store(to + HALF + low[None, :], x2.to(dtype).to(kept), mask=in_half)
        tl.store(to + 2 * HALF + rest[None, :], x3.to(dtype).to(kept), mask=in_rest)


def rope_kv_write(
    query_BTQD: Tensor,
    key_BTGD: Tensor,
    value_BTGD: Tensor,
    rope_LD: Tensor,
    rope_row_BT: Tensor,
    kv_pool: Tensor,
    layer: int,
    table_BP: Tensor,
    slot_BT: Tensor,
    valid_BT: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: bool = False,
) -> Tensor:
    lanes, tokens, queries, dim = query_BTQD.shape
    groups, half = key_BTGD.shape[2], rope_LD.shape[-1] // 2
    _, _, pages, page_size, _, _ = kv_pool.shape
    out = torch.empty((lanes, tokens, queries, dim), dtype=query_BTQD.dtype, device=query_BTQD.device)
    heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(groups))
    grid = (lanes * tokens, triton.cdiv(queries, heads) + 2 * triton.cdiv(groups, heads))
    launch(
        _rope_kv_write, grid, query_BTQD, key_BTGD, value_BTGD, rope_LD, rope_row_BT, out, kv_pool, layer, table_BP, slot_BT, valid_BT,
        query_norm, key_norm, norm_eps, tokens, queries, groups, table_BP.shape[1], page_size, pages,
        *query_BTQD.stride()[:3], *key_BTGD.stride()[:3], *value_BTGD.stride()[:3], rope_LD.shape[0], *rope_row_BT.stride(),
        table_BP.stride(0), *slot_BT.stride(), *valid_BT.stride(),
        DIM=dim, HALF=half, HALF_BLOCK=triton.next_power_of_2(half), REST_BLOCK=triton.next_power_of_2(max(dim - 2 * half, 1)), HEADS=heads,
        NORM=query_norm is not None and key_norm is not None, OFFSET=norm_offset, num_warps=2,
    )  # fmt: skip
    return out


OP = register(rope_kv_write)

"""Triton kernel of :mod:`graphspec.kernels.attention.latent_kv_write`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register

HEADS = 16
"""Query heads that one program rotates."""


@triton.jit
def _rope(source, cos, sin, pair, inside, half, INTERLEAVED: tl.constexpr):
    """Both halves of every rotated pair, float32; ``source`` points to channel 0 of the rotary part."""
    first = tl.load(source + (2 * pair if INTERLEAVED else pair), mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + (2 * pair + 1 if INTERLEAVED else pair + half), mask=inside, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _latent_kv_write(
    pool, latent, query, out, weight, rope, rope_row, table, slot, valid, eps,
    tokens, width, half, heads, table_stride,
    latent_lane, latent_token, query_lane, query_token, query_head, rope_rows, row_lane, row_token,
    PAGE: tl.constexpr, HEADS: tl.constexpr, LATENT: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, 0) writes the token's row into its page, program (token, i) rotates its i-th group of query heads."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane, step = token // tokens, token % tokens
    pair = tl.arange(0, HALF)
    channel = tl.arange(0, LATENT)
    scale = tl.load(weight + channel, mask=channel < width, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    angle = tl.load(rope_row + lane * row_lane + step * row_token)
    angle = rope + tl.minimum(tl.maximum(angle, 0), rope_rows - 1) * 2 * half
    kept = query.dtype.element_ty
    cosine = tl.load(angle + pair, mask=pair < half, other=0.0).to(kept).to(tl.float32)
    sine = tl.load(angle + half + pair, mask=pair < half, other=0.0).to(kept).to(tl.float32)
    if part == 0:
        if tl.load(valid + token):
            logical = tl.load(slot + token)
            page = tl.load(table + lane * table_stride + logical // PAGE).to(tl.int64)
            row = pool + (page * PAGE + logical % PAGE) * (width + 2 * half)
            source = latent + lane * latent_lane + step * latent_token
            raw = tl.load(source + channel, mask=channel < width, other=0.0)
            wide = raw.to(tl.float32)
            wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
            # Rounded before scaling, as in the reference.
            tl.store(row + channel, wide.to(raw.dtype).to(tl.float32) * scale.to(tl.float32), mask=channel < width)
            first, second = _rope(source + width, cosine, sine, pair, pair < half, half, INTERLEAVED)
            tl.store(row + width + pair, first, mask=pair < half)
            tl.store(row + width + half + pair, second, mask=pair < half)
    else:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)
        inside = (head < heads)[:, None] & (pair < half)[None, :]
        source = query + lane * query_lane + step * query_token + head[:, None].to(tl.int64) * query_head
        first, second = _rope(source, cosine[None, :], sine[None, :], pair[None, :], inside, half, INTERLEAVED)
        target = out + (token * heads + head[:, None]) * 2 * half + pair[None, :]
        tl.store(target, first, mask=inside)
        tl.store(target + half, second, mask=inside)


def latent_kv_write(
    latent_pool: Tensor,
    layer: int,
    latent_BTE: Tensor,
    query_rope_BTQR: Tensor,
    norm_weight_L: Tensor,
    rope_LD: Tensor,
    rope_row_BT: Tensor,
    table_BP: Tensor,
    slot_BT: Tensor,
    valid_BT: Tensor,
    eps: float,
    interleaved: bool,
) -> Tensor:
    lanes, tokens, heads, rope = query_rope_BTQR.shape
    width = norm_weight_L.shape[0]
    out = query_rope_BTQR.new_empty(lanes, tokens, heads, rope)
    launch(
        _latent_kv_write, (lanes * tokens, 1 + triton.cdiv(heads, HEADS)),
        latent_pool[layer], latent_BTE, query_rope_BTQR, out, norm_weight_L, rope_LD, rope_row_BT, table_BP,
        slot_BT.contiguous(), valid_BT.contiguous(), eps,
        tokens, width, rope // 2, heads, table_BP.stride(0),
        *latent_BTE.stride()[:2], *query_rope_BTQR.stride()[:3], rope_LD.shape[0], *rope_row_BT.stride(),
        PAGE=latent_pool.shape[3], HEADS=HEADS, LATENT=triton.next_power_of_2(width), HALF=triton.next_power_of_2(rope // 2),
        INTERLEAVED=interleaved,
    )  # fmt: skip
    return out


OP = register(latent_kv_write)

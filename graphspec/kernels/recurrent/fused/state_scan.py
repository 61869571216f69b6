"""Triton kernels of :mod:`graphspec.kernels.recurrent.state_scan` and ``state_chunk``: tokens one by one, or in blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...fused.launch import launch, register
from ._states import PART, head_sizes, head_state, own_columns, state_tile, token_of, token_places
from .delta_rule import delta_block, delta_update
from .ssm_rule import ssm_block, ssm_update

TOKENS = 16
"""Tokens of a block. The delta rule solves a triangular system row by row, so wider blocks would lose more there than they save."""


@triton.jit
def _scan_tokens(
    out, mixed, gate, skip, matrix, lane_row, length, fresh, tokens, layers, layer,
    FRESH: tl.constexpr, SELECTIVE: tl.constexpr, HEADS: tl.constexpr, REPEAT: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KEY_PAD: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per (lane, head) and tile of columns: all tokens, one after the other."""
    lane, head, column = own_columns(HEADS, COLUMNS, PDL)
    count = tl.load(length + lane)
    is_fresh = False
    if FRESH:
        is_fresh = tl.load(fresh + lane) != 0
    at, inside = state_tile(
        head_state(matrix, tl.load(lane_row + lane), layers, layer, head, HEADS, KEY, VALUE), column, KEY, VALUE, KEY_PAD
    )
    state = tl.load(at, mask=inside & (not is_fresh), other=0.0)
    place = out + (lane * tokens * HEADS + head) * VALUE + column
    for token in range(count):
        query, key, value, decay, rate = token_of(
            mixed, gate, lane * tokens + token, head, column, SELECTIVE, HEADS, REPEAT, KEY, VALUE, KEY_PAD
        )
        if SELECTIVE:
            state, read = ssm_update(state, query, key, value, decay, rate, tl.load(skip + head))
        else:
            state, read = delta_update(state, query, key, value, decay, rate, KEY, EPS)
        tl.store(place + token * HEADS * VALUE, read.to(out.dtype.element_ty), mask=column < VALUE)
    for token in range(count, tokens):
        tl.store(place + token * HEADS * VALUE, tl.zeros([COLUMNS], out.dtype.element_ty), mask=column < VALUE)
    tl.debug_barrier()
    tl.store(at, state, mask=inside & ((count > 0) | is_fresh))


@triton.jit
def _block_tokens(
    out, mixed, gate, skip, matrix, lane_row, length, fresh, tokens, layers, layer,
    FRESH: tl.constexpr, TOKENS: tl.constexpr, PART: tl.constexpr, SELECTIVE: tl.constexpr, HEADS: tl.constexpr, REPEAT: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_PAD: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per (lane, head) and tile of columns: all blocks of tokens."""
    lane, head, column = own_columns(HEADS, COLUMNS, PDL)
    order = tl.arange(0, TOKENS)
    count = tl.load(length + lane)
    is_fresh = False
    if FRESH:
        is_fresh = tl.load(fresh + lane) != 0
    state = head_state(matrix, tl.load(lane_row + lane), layers, layer, head, HEADS, KEY, VALUE)
    for begin in range(0, tokens, TOKENS):
        token = begin + order
        used = token < count
        place = out + ((lane * tokens + token) * HEADS + head)[:, None] * VALUE + column[None, :]
        stored = (token < tokens)[:, None] & (column < VALUE)[None, :]
        # A row without tokens keeps its state; a fresh row without tokens gets a zero state.
        if (begin < count) | ((begin == 0) & is_fresh):
            at_token = lane * tokens + token
            has_state = (begin > 0) | (not is_fresh)
            before = order[None, :] <= order[:, None]
            if SELECTIVE:
                read, change, path = ssm_block(
                    state, has_state, mixed, gate, skip, at_token, used, before, head, column, HEADS, REPEAT, KEY, VALUE, KEY_PAD, COLUMNS,
                    TOKENS, PART,
                )  # fmt: skip
            else:
                read, change, key_unit, path = delta_block(
                    state, has_state, mixed, gate, at_token, used, before, head, column, HEADS, REPEAT, KEY, VALUE, KEY_PAD, COLUMNS,
                    TOKENS, PART, EPS,
                )  # fmt: skip
            tl.store(place, tl.where(used[:, None], read, 0.0).to(out.dtype.element_ty), mask=stored)
            # Padding tokens have log-decay 0, so the last path is the sum over the block.
            end = tl.sum(tl.where(order == TOKENS - 1, path, 0.0), 0)
            decay_to_end = tl.exp(end - path)
            if not SELECTIVE:
                decay_to_end = key_unit * decay_to_end
            _, at_key, _ = token_places(mixed, at_token, head, SELECTIVE, HEADS, REPEAT, KEY, VALUE)
            for part in range(0, KEY_PAD, PART):
                channel = part + tl.arange(0, PART)
                at = state + channel[:, None] * VALUE + column[None, :]
                inside = (channel < KEY)[:, None] & (column < VALUE)[None, :]
                old = tl.load(at, mask=inside & has_state, other=0.0)
                key = tl.load(at_key[:, None] + channel[None, :], mask=used[:, None] & (channel < KEY)[None, :], other=0.0).to(tl.float32)
                added = tl.dot(tl.trans(key * decay_to_end[:, None]), change, input_precision="tf32x3")
                # Other threads than the ones that store have loaded this part.
                tl.debug_barrier()
                tl.store(at, old * tl.exp(end) + added, mask=inside)
                tl.debug_barrier()
        else:
            tl.store(place, tl.zeros([TOKENS, COLUMNS], out.dtype.element_ty), mask=stored)


def _over_run(
    mixed_BTE: Tensor, gate_BTG: Tensor, skip_H: Tensor | None, matrix_RUHKV: Tensor, layer: int, lane_row_B: Tensor, length_B: Tensor,
    fresh_B: Tensor | None, *, blocks: bool,
) -> Tensor:  # fmt: skip
    """One launch over all lanes, heads and tiles of columns, in blocks of tokens or token by token."""
    lanes, tokens, _ = mixed_BTE.shape
    sizes = head_sizes(mixed_BTE, matrix_RUHKV, selective=skip_H is not None)
    block = {"TOKENS": TOKENS, "PART": min(PART, sizes["KEY_PAD"])} if blocks else {}
    heads, _, width = matrix_RUHKV.shape[2:]
    out = mixed_BTE.new_empty(lanes, tokens, heads, width)
    launch(
        _block_tokens if blocks else _scan_tokens, (lanes * heads, triton.cdiv(width, sizes["COLUMNS"])), out, mixed_BTE.contiguous(),
        gate_BTG.contiguous(), skip_H, matrix_RUHKV, lane_row_B, length_B, None if fresh_B is None else fresh_B.view(torch.uint8), tokens,
        matrix_RUHKV.shape[1], layer, FRESH=fresh_B is not None, **block, **sizes,
    )  # fmt: skip
    return out


def state_scan(
    mixed_BTE: Tensor,
    gate_BTG: Tensor,
    skip_H: Tensor | None,
    matrix_RUHKV: Tensor,
    layer: int,
    lane_row_B: Tensor,
    length_B: Tensor,
    fresh_B: Tensor | None = None,
) -> Tensor:
    return _over_run(mixed_BTE, gate_BTG, skip_H, matrix_RUHKV, layer, lane_row_B, length_B, fresh_B, blocks=False)


def state_chunk(
    mixed_BTE: Tensor,
    gate_BTG: Tensor,
    skip_H: Tensor | None,
    matrix_RUHKV: Tensor,
    layer: int,
    lane_row_B: Tensor,
    length_B: Tensor,
    fresh_B: Tensor | None = None,
) -> Tensor:
    return _over_run(mixed_BTE, gate_BTG, skip_H, matrix_RUHKV, layer, lane_row_B, length_B, fresh_B, blocks=True)


OP, CHUNK_OP = register(state_scan), register(state_chunk)

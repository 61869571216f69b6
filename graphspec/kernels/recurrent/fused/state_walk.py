"""Triton kernels of :mod:`graphspec.kernels.recurrent.state_walk` and ``state_tree``: nodes one by one, or all at once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...fused.launch import launch, register
from ...fused.work import works
from ._states import PART, head_sizes, head_state, own_columns, state_tile, states_work, token_of
from .delta_rule import delta_block, delta_update
from .ssm_rule import ssm_block, ssm_update

NODES = 4
"""Nodes of one program of the walk, which share one load of the state."""
MAX_NODES = 64
"""Most nodes that fit one program's registers at once; larger trees use the walk, which the contract allows."""


@works(states_work)
@triton.jit
def _walk_nodes(
    out, mixed, gate, skip, matrix, lane_row, ancestors, nodes, layers, layer,
    WORDS: tl.constexpr, NODES: tl.constexpr, SELECTIVE: tl.constexpr, HEADS: tl.constexpr, REPEAT: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KEY_PAD: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per (lane, head), tile of columns and ``NODES`` nodes. Every node replays its ancestors from the row's state."""
    lane, head, column = own_columns(HEADS, COLUMNS, PDL)
    state = head_state(matrix, tl.load(lane_row + lane), layers, layer, head, HEADS, KEY, VALUE)
    at, inside = state_tile(state, column, KEY, VALUE, KEY_PAD)
    start = tl.load(at, mask=inside, other=0.0)
    begin = tl.program_id(2) * NODES
    for node in range(begin, tl.minimum(begin + NODES, nodes)):
        reached = start
        read = tl.zeros([COLUMNS], tl.float32)
        words = ancestors + (lane * nodes + node) * WORDS
        if (tl.load(words + node // 64) >> (node % 64)) & 1 != 0:
            for j in range(node + 1):
                if (tl.load(words + j // 64) >> (j % 64)) & 1 != 0:
                    query, key, value, decay, rate = token_of(
                        mixed, gate, lane * nodes + j, head, column, SELECTIVE, HEADS, REPEAT, KEY, VALUE, KEY_PAD
                    )
                    if SELECTIVE:
                        reached, read = ssm_update(reached, query, key, value, decay, rate, tl.load(skip + head))
                    else:
                        reached, read = delta_update(reached, query, key, value, decay, rate, KEY, EPS)
        place = out + ((lane * nodes + node) * HEADS + head) * VALUE + column
        tl.store(place, read.to(out.dtype.element_ty), mask=column < VALUE)


@works(states_work)
@triton.jit
def _block_nodes(
    out, mixed, gate, skip, matrix, lane_row, ancestors, nodes, layers, layer,
    TOKENS: tl.constexpr, PART: tl.constexpr, SELECTIVE: tl.constexpr, HEADS: tl.constexpr, REPEAT: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KEY_PAD: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per (lane, head) and tile of columns: all nodes."""
    lane, head, column = own_columns(HEADS, COLUMNS, PDL)
    node = tl.arange(0, TOKENS)
    word = tl.load(ancestors + lane * nodes + node, mask=node < nodes, other=0)
    state = head_state(matrix, tl.load(lane_row + lane), layers, layer, head, HEADS, KEY, VALUE)
    used = ((word >> node.to(tl.int64)) & 1) != 0
    before = (((word[:, None] >> node.to(tl.int64)[None, :]) & 1) != 0) & used[:, None]
    token = lane * nodes + node
    if SELECTIVE:
        read, _, _ = ssm_block(
            state, True, mixed, gate, skip, token, used, before, head, column, HEADS, REPEAT, KEY, VALUE, KEY_PAD, COLUMNS, TOKENS, PART
        )
    else:
        read, _, _, _ = delta_block(
            state, True, mixed, gate, token, used, before, head, column, HEADS, REPEAT, KEY, VALUE, KEY_PAD, COLUMNS, TOKENS, PART, EPS
        )
    place = out + (token * HEADS + head)[:, None] * VALUE + column[None, :]
    read = tl.where(used[:, None], read, 0.0)
    tl.store(place, read.to(out.dtype.element_ty), mask=(node < nodes)[:, None] & (column < VALUE)[None, :])


def state_walk(
    mixed_BTE: Tensor, gate_BTG: Tensor, skip_H: Tensor | None, matrix_RUHKV: Tensor, layer: int, lane_row_B: Tensor, ancestors_BTX: Tensor
) -> Tensor:
    lanes, nodes, words = ancestors_BTX.shape
    sizes = head_sizes(mixed_BTE, matrix_RUHKV, selective=skip_H is not None)
    heads, _, width = matrix_RUHKV.shape[2:]
    out = mixed_BTE.new_empty(lanes, nodes, heads, width)
    launch(
        _walk_nodes, (lanes * heads, triton.cdiv(width, sizes["COLUMNS"]), triton.cdiv(nodes, NODES)), out, mixed_BTE.contiguous(),
        gate_BTG.contiguous(), skip_H, matrix_RUHKV, lane_row_B, ancestors_BTX.contiguous(), nodes, matrix_RUHKV.shape[1], layer,
        WORDS=words, NODES=NODES, **sizes,
    )  # fmt: skip
    return out


def state_tree(
    mixed_BTE: Tensor, gate_BTG: Tensor, skip_H: Tensor | None, matrix_RUHKV: Tensor, layer: int, lane_row_B: Tensor, ancestors_BTX: Tensor
) -> Tensor:
    lanes, nodes, _ = ancestors_BTX.shape
    if nodes > MAX_NODES:
        return state_walk(mixed_BTE, gate_BTG, skip_H, matrix_RUHKV, layer, lane_row_B, ancestors_BTX)
    sizes = head_sizes(mixed_BTE, matrix_RUHKV, selective=skip_H is not None)
    heads, _, width = matrix_RUHKV.shape[2:]
    out = mixed_BTE.new_empty(lanes, nodes, heads, width)
    tokens = max(16, triton.next_power_of_2(nodes))
    launch(
        _block_nodes, (lanes * heads, triton.cdiv(width, sizes["COLUMNS"])), out, mixed_BTE.contiguous(), gate_BTG.contiguous(), skip_H,
        matrix_RUHKV, lane_row_B, ancestors_BTX.contiguous(), nodes, matrix_RUHKV.shape[1], layer,
        TOKENS=tokens, PART=min(PART if tokens == 16 else PART // 2, sizes["KEY_PAD"]), num_warps=4 if tokens == 16 else 8, **sizes,
    )  # fmt: skip
    return out


OP, TREE_OP = register(state_walk), register(state_tree)

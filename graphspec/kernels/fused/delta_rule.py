"""What the Triton kernels of the gated delta rule share: a token's inputs, its update, and a block of tokens (:mod:`..delta_rule`).

A program has a tile of columns of one head's state. Columns don't meet, so tiles are independent. Walk and scan keep theirs in registers,
have tiles of one shape and call one update.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..delta_rule import NORM_EPS

COLUMNS = 32
"""Of a tile: with a key of 128 channels a thread of four warps has 32 registers of state."""
PART = 32
"""Channels of a key that a block of tokens takes at a time."""


def head_sizes(mixed: Tensor, matrix: Tensor) -> dict[str, int]:
    """Compile-time sizes of a head: its own, and those padded for tiles."""
    heads, key_dim, value_dim = matrix.shape[2:]
    keys = (mixed.shape[-1] - heads * value_dim) // 2
    return {
        "HEADS": heads,
        "REPEAT": heads * key_dim // keys,
        "KEY": key_dim,
        "VALUE": value_dim,
        "KEY_PAD": max(16, triton.next_power_of_2(key_dim)),
        "COLUMNS": max(16, min(COLUMNS, triton.next_power_of_2(value_dim))),
        "EPS": NORM_EPS,
    }


@triton.jit
def state_tile(
    matrix, row, layers, layer, head, first, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEY_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Places of columns ``[first, first + COLUMNS)`` of a head's state, and which of them there are."""
    channel = tl.arange(0, KEY_PAD)
    column = first + tl.arange(0, COLUMNS)
    at = matrix + ((row * layers + layer) * HEADS + head) * (KEY * VALUE) + channel[:, None] * VALUE + column[None, :]
    return at, (channel < KEY)[:, None] & (column < VALUE)[None, :]


@triton.jit
def delta_token(
    mixed, gate, token, head, first, HEADS: tl.constexpr, REPEAT: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_PAD: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Query, key, value, log-decay and rate of one token; ``token`` counts over lanes."""
    channel = tl.arange(0, KEY_PAD)
    column = first + tl.arange(0, COLUMNS)
    keys: tl.constexpr = HEADS // REPEAT * KEY
    base = mixed + token * (2 * keys + HEADS * VALUE)
    served = base + head // REPEAT * KEY + channel
    query = tl.load(served, mask=channel < KEY, other=0.0).to(tl.float32)
    key = tl.load(served + keys, mask=channel < KEY, other=0.0).to(tl.float32)
    value = tl.load(base + 2 * keys + head * VALUE + column, mask=column < VALUE, other=0.0).to(tl.float32)
    decay = tl.load(gate + token * 2 * HEADS + head)
    rate = tl.load(gate + token * 2 * HEADS + HEADS + head)
    query = query * (1.0 / tl.sqrt(tl.sum(query * query, 0) + EPS)) * (KEY**-0.5)
    key = key * (1.0 / tl.sqrt(tl.sum(key * key, 0) + EPS))
    return query, key, value, decay, rate


@triton.jit
def delta_update(state, query, key, value, decay, rate):
    """The state after one token, and what the token reads."""
    state = state * tl.exp(decay)
    change = rate * (value - tl.sum(state * key[:, None], 0))
    state = state + key[:, None] * change[None, :]
    return state, tl.sum(state * query[:, None], 0)


@triton.jit
def delta_block(
    state, known, mixed, gate, token, used, before, head, first, HEADS: tl.constexpr, REPEAT: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KEY_PAD: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, PART: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """A block of tokens at once: what they read, their changes, factors that make keys of length 1, sums of log-decays on their paths.

    Channels of queries, keys and state pass by a part at a time, so that a program holds sums only. Products are of three TF32 parts,
    nearly as precise as float32. The unit triangular system is solved row by row, which is as stable as the recurrence itself; powers of
    the matrix are not where keys of a long path resemble each other.

    Args:
        state: where the head's state begins. known: it counts; else it is zero.
        token: place of each token over all lanes. used: which of them count; of the others nothing is read.
        before: token j lies on the path of token i, i itself included.
    """
    column = first + tl.arange(0, COLUMNS)
    order = tl.arange(0, TOKENS)
    keys: tl.constexpr = HEADS // REPEAT * KEY
    base = mixed + token * (2 * keys + HEADS * VALUE)
    served = base + head // REPEAT * KEY
    decay = tl.load(gate + token * 2 * HEADS + head, mask=used, other=0.0)
    rate = tl.load(gate + token * 2 * HEADS + HEADS + head, mask=used, other=0.0)
    path = tl.sum(tl.where(before, decay[None, :], 0.0), 1)
    # An exponent of a pair that is no pair may be positive, and overflow.
    since = tl.exp(tl.where(before, path[:, None] - path[None, :], float("-inf")))
    from_state = tl.exp(path)

    query_square = tl.zeros([TOKENS], tl.float32)
    key_square = tl.zeros([TOKENS], tl.float32)
    read = tl.zeros([TOKENS, COLUMNS], tl.float32)
    recalled = tl.zeros([TOKENS, COLUMNS], tl.float32)
    seen = tl.zeros([TOKENS, TOKENS], tl.float32)
    system = tl.zeros([TOKENS, TOKENS], tl.float32)
    for begin in range(0, KEY_PAD, PART):
        channel = begin + tl.arange(0, PART)
        there = used[:, None] & (channel < KEY)[None, :]
        query = tl.load(served[:, None] + channel[None, :], mask=there, other=0.0).to(tl.float32)
        key = tl.load(served[:, None] + keys + channel[None, :], mask=there, other=0.0).to(tl.float32)
        inside = (channel < KEY)[:, None] & (column < VALUE)[None, :] & known
        part = tl.load(state + channel[:, None] * VALUE + column[None, :], mask=inside, other=0.0)
        query_square += tl.sum(query * query, 1)
        key_square += tl.sum(key * key, 1)
        read = tl.dot(query, part, read, input_precision="tf32x3")
        recalled = tl.dot(key, part, recalled, input_precision="tf32x3")
        seen = tl.dot(query, tl.trans(key), seen, input_precision="tf32x3")
        system = tl.dot(key, tl.trans(key), system, input_precision="tf32x3")
    query_unit = 1.0 / tl.sqrt(query_square + EPS) * (KEY**-0.5)
    key_unit = 1.0 / tl.sqrt(key_square + EPS)
    read = read * (query_unit * from_state)[:, None]
    seen = seen * query_unit[:, None] * key_unit[None, :] * since
    system = system * (rate * key_unit)[:, None] * key_unit[None, :] * since
    at_value = (base + 2 * keys + head * VALUE)[:, None] + column[None, :]
    value = tl.load(at_value, mask=used[:, None] & (column < VALUE)[None, :], other=0.0).to(tl.float32)
    change = rate[:, None] * (value - recalled * (key_unit * from_state)[:, None])
    for i in range(1, TOKENS):
        row = tl.sum(tl.where((order == i)[:, None] & (order < i)[None, :], system, 0.0), 0)
        solved = tl.sum(row[:, None] * change, 0)
        change = tl.where((order == i)[:, None], change - solved[None, :], change)
    read = tl.dot(seen, change, read, input_precision="tf32x3")
    return read, change, key_unit, path

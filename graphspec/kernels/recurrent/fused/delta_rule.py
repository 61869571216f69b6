"""The gated delta rule in Triton, for one token and for a block of tokens (:mod:`..delta_rule`)."""

from __future__ import annotations

import triton
import triton.language as tl

from ._states import block_gates, block_part, token_places


@triton.jit
def delta_change(state, key, value, decay, rate, EPS: tl.constexpr):
    """The state after one token."""
    key = key * (1.0 / tl.sqrt(tl.sum(key * key, 0) + EPS))
    state = state * tl.exp(decay)
    change = rate * (value - tl.sum(state * key[:, None], 0))
    # An explicit fma: left to the compiler, contraction could differ between the walk and the commit.
    return tl.fma(tl.broadcast_to(key[:, None], state.shape), tl.broadcast_to(change[None, :], state.shape), state)


@triton.jit
def delta_update(state, query, key, value, decay, rate, KEY: tl.constexpr, EPS: tl.constexpr):
    """The state after one token, and the token's output."""
    query = query * (1.0 / tl.sqrt(tl.sum(query * query, 0) + EPS)) * (KEY**-0.5)
    state = delta_change(state, key, value, decay, rate, EPS)
    return state, tl.sum(state * query[:, None], 0)


@triton.jit
def delta_block(
    state, has_state, mixed, gate, token, used, before, head, column, HEADS: tl.constexpr, REPEAT: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KEY_PAD: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, PART: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """A block of tokens at once: their outputs, value updates, inverse key norms, and cumulative log-decays along their paths.

    Channels of queries, keys and state are loaded ``PART`` at a time, so that a program only holds sums. Products use TF32x3, nearly as
    precise as float32. The unit triangular system is solved by forward substitution, which is as stable as the recurrence itself; a
    series of matrix powers is not when the keys of a long path are similar.

    Args:
        state: pointer to the head's state. has_state: whether to read it; else it is zero.
        token: index of each token over all lanes. used: mask of the tokens that are loaded.
        before: ``[i, j]``, whether token j is on the path of token i, i itself included.
    """
    order = tl.arange(0, TOKENS)
    at_query, at_key, at_value = token_places(mixed, token, head, False, HEADS, REPEAT, KEY, VALUE)
    rate, path, since = block_gates(gate, token, used, before, head, HEADS)
    from_state = tl.exp(path)

    query_square = tl.zeros([TOKENS], tl.float32)
    key_square = tl.zeros([TOKENS], tl.float32)
    read = tl.zeros([TOKENS, COLUMNS], tl.float32)
    recalled = tl.zeros([TOKENS, COLUMNS], tl.float32)
    seen = tl.zeros([TOKENS, TOKENS], tl.float32)
    system = tl.zeros([TOKENS, TOKENS], tl.float32)
    for begin in range(0, KEY_PAD, PART):
        query, key, part = block_part(state, has_state, at_query, at_key, used, column, begin, KEY, VALUE, PART)
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
    value = tl.load(at_value[:, None] + column[None, :], mask=used[:, None] & (column < VALUE)[None, :], other=0.0).to(tl.float32)
    change = rate[:, None] * (value - recalled * (key_unit * from_state)[:, None])
    for i in range(1, TOKENS):
        row = tl.sum(tl.where((order == i)[:, None] & (order < i)[None, :], system, 0.0), 0)
        solved = tl.sum(row[:, None] * change, 0)
        change = tl.where((order == i)[:, None], change - solved[None, :], change)
    read = tl.dot(seen, change, read, input_precision="tf32x3")
    return read, change, key_unit, path

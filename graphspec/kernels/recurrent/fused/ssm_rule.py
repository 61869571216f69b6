"""The selective state space of Mamba-2 in Triton, for one token and for a block of tokens (:mod:`..ssm_rule`)."""

from __future__ import annotations

import triton
import triton.language as tl

from ._states import block_gates, block_part, token_places


@triton.jit
def ssm_change(state, key, value, decay, step):
    """The state after one token."""
    # An explicit fma: left to the compiler, contraction could differ between the walk and the commit.
    added = tl.broadcast_to((step * value)[None, :], state.shape)
    return tl.fma(tl.broadcast_to(key[:, None], state.shape), added, state * tl.exp(decay))


@triton.jit
def ssm_update(state, query, key, value, decay, step, skip):
    """The state after one token, and the token's output."""
    state = ssm_change(state, key, value, decay, step)
    return state, tl.fma(value, tl.broadcast_to(skip, value.shape), tl.sum(state * query[:, None], 0))


@triton.jit
def ssm_block(
    state, has_state, mixed, gate, skip, token, used, before, head, column, HEADS: tl.constexpr, REPEAT: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KEY_PAD: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A block of tokens at once: their outputs, value updates, and cumulative log-decays along their paths.

    As ``delta_block``, but updates do not depend on the state, so there is no system to solve.

    Args:
        skip: pointer to D ``[H]``.
    """
    at_query, at_key, at_value = token_places(mixed, token, head, True, HEADS, REPEAT, KEY, VALUE)
    step, path, since = block_gates(gate, token, used, before, head, HEADS)
    read = tl.zeros([TOKENS, COLUMNS], tl.float32)
    seen = tl.zeros([TOKENS, TOKENS], tl.float32)
    for begin in range(0, KEY_PAD, PART):
        query, key, part = block_part(state, has_state, at_query, at_key, used, column, begin, KEY, VALUE, PART)
        read = tl.dot(query, part, read, input_precision="tf32x3")
        seen = tl.dot(query, tl.trans(key), seen, input_precision="tf32x3")
    value = tl.load(at_value[:, None] + column[None, :], mask=used[:, None] & (column < VALUE)[None, :], other=0.0).to(tl.float32)
    change = step[:, None] * value
    read = read * tl.exp(path)[:, None] + tl.load(skip + head) * value
    return tl.dot(seen * since, change, read, input_precision="tf32x3"), change, path

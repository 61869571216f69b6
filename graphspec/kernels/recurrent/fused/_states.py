"""Helpers shared by the Triton kernels of recurrent layers, for both rules: sizes, the work of a program, addresses of tokens and states.

A program owns a tile of columns of one head's state. Columns are independent of each other. Walk and scan keep their tile in registers and
use tiles of one shape and the same update.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import Launch
from ...fused.work import Situation, Work
from ..delta_rule import NORM_EPS

TILE = 4096
"""Most elements of a tile: 32 registers of state per thread with four warps."""
COLUMNS = 32
"""Most columns of a tile."""
PART = 32
"""Key channels that a block of tokens loads at a time."""


def states_work(launch: Launch, at: Situation) -> Work:
    """States of recurrent layers: read once from memory, for one layer by verification; the commit writes them too, for all layers.

    A program that holds its tile processes tokens one by one, in the commit after looking each up on the path; others read the state part
    by part.
    """
    values = launch.values
    commits, matrix = "length" in values, values["matrix"]
    if commits:
        layers, turns = matrix.shape[1], 2 * values["steps"]
    else:
        layers, turns = 1, values["KEY_PAD"] // values["PART"] if "PART" in values else values["nodes"]
    return Work(
        bytes=4 * values["lane_row"].shape[0] * layers * matrix[0, 0].numel() * (2 if commits else 1),
        programs=launch.programs,
        in_flight=4 * values.get("PART", values["KEY_PAD"]) * values["COLUMNS"],
        memory=1,
        cache=1 + turns,
    )


def head_sizes(mixed: Tensor, matrix: Tensor, *, selective: bool) -> dict[str, Any]:
    """Compile-time arguments of a kernel: the rule, sizes of a head, and sizes padded for tiles.

    Args:
        mixed: ``[..., E]``, convolved channels of tokens.
        matrix: states ``[R, U, H, K, V]``.
        selective: whether the rule is Mamba-2's; else it is the gated delta rule.
    """
    heads, key_dim, value_dim = matrix.shape[2:]
    keys = (mixed.shape[-1] - heads * value_dim) // 2
    key_pad = max(16, triton.next_power_of_2(key_dim))
    return {
        "SELECTIVE": selective,
        "HEADS": heads,
        "REPEAT": heads * key_dim // keys,
        "KEY": key_dim,
        "VALUE": value_dim,
        "KEY_PAD": key_pad,
        "COLUMNS": max(16, min(COLUMNS, TILE // key_pad, triton.next_power_of_2(value_dim))),
        "EPS": NORM_EPS,
    }


@triton.jit
def own_columns(HEADS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    """Lane, head and columns of this program, after the wait of a programmatic launch."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    return lane, head, tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def head_state(matrix, row, layers, layer, head, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr):
    """Pointer to a head's state."""
    return matrix + ((row * layers + layer) * HEADS + head) * (KEY * VALUE)


@triton.jit
def state_tile(state, column, KEY: tl.constexpr, VALUE: tl.constexpr, KEY_PAD: tl.constexpr):
    """Pointers ``[KEY_PAD, COLUMNS]`` to columns of a head's state, and their mask."""
    channel = tl.arange(0, KEY_PAD)
    return state + channel[:, None] * VALUE + column[None, :], (channel < KEY)[:, None] & (column < VALUE)[None, :]


@triton.jit
def token_places(
    mixed, token, head, SELECTIVE: tl.constexpr, HEADS: tl.constexpr, REPEAT: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Pointers to query, key and value of one or several tokens; ``token`` counts over all lanes. With ``mixed`` 0, offsets."""
    keys: tl.constexpr = HEADS // REPEAT * KEY
    values: tl.constexpr = HEADS * VALUE
    base = mixed + token * (2 * keys + values)
    served = base + head // REPEAT * KEY
    if SELECTIVE:
        query = served + values + keys
        key = served + values
        value = base + head * VALUE
    else:
        query = served
        key = served + keys
        value = base + 2 * keys + head * VALUE
    return query, key, value


@triton.jit
def token_of(
    mixed, gate, token, head, column, SELECTIVE: tl.constexpr, HEADS: tl.constexpr, REPEAT: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KEY_PAD: tl.constexpr,
):  # fmt: skip
    """Query, key, value, log-decay and rate (or step) of one token, unnormalised."""
    channel = tl.arange(0, KEY_PAD)
    at_query, at_key, at_value = token_places(mixed, token, head, SELECTIVE, HEADS, REPEAT, KEY, VALUE)
    query = tl.load(at_query + channel, mask=channel < KEY, other=0.0).to(tl.float32)
    key = tl.load(at_key + channel, mask=channel < KEY, other=0.0).to(tl.float32)
    value = tl.load(at_value + column, mask=column < VALUE, other=0.0).to(tl.float32)
    decay = tl.load(gate + token * 2 * HEADS + head)
    rate = tl.load(gate + token * 2 * HEADS + HEADS + head)
    return query, key, value, decay, rate


@triton.jit
def block_part(
    state, has_state, at_query, at_key, used, column, begin, KEY: tl.constexpr, VALUE: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """``PART`` channels from ``begin`` on of a block's queries and keys and of a tile of the state, zero-padded."""
    channel = begin + tl.arange(0, PART)
    loaded = used[:, None] & (channel < KEY)[None, :]
    query = tl.load(at_query[:, None] + channel[None, :], mask=loaded, other=0.0).to(tl.float32)
    key = tl.load(at_key[:, None] + channel[None, :], mask=loaded, other=0.0).to(tl.float32)
    inside = (channel < KEY)[:, None] & (column < VALUE)[None, :] & has_state
    return query, key, tl.load(state + channel[:, None] * VALUE + column[None, :], mask=inside, other=0.0)


@triton.jit
def block_gates(gate, token, used, before, head, HEADS: tl.constexpr):
    """Rates (or steps) of a block of tokens, sums of log-decays on their paths, and the decay from every token to every other."""
    decay = tl.load(gate + token * 2 * HEADS + head, mask=used, other=0.0)
    rate = tl.load(gate + token * 2 * HEADS + HEADS + head, mask=used, other=0.0)
    path = tl.sum(tl.where(before, decay[None, :], 0.0), 1)
    # Outside the mask the difference may be positive and overflow.
    return rate, path, tl.exp(tl.where(before, path[:, None] - path[None, :], float("-inf")))

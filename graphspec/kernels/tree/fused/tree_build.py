"""Triton kernel of :mod:`graphspec.kernels.tree.tree_build`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....errors import ConfigError
from ...fused.launch import launch, register
from ...groups import Nodes

MAX_CANDIDATES = 1 << 15
"""Most candidates that fit the registers of one program."""


@triton.jit
def window_root(lane, lane_row, window_token, window_len, width):
    """The token of the last entry of a lane's window."""
    row = tl.load(lane_row + lane)
    last = tl.minimum(tl.maximum(tl.load(window_len + row) - 1, 0), width - 1)
    return tl.load(window_token + row * width + last)


@triton.jit
def _ordered(score):
    """Unsigned keys with the order of the scores. NaN orders as -inf, -0.0 as 0.0; no key is 0."""
    score = tl.where(score != score, float("-inf"), score)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _tree_build(
    score, token, parent, lane_row, window_token, window_len, node_token, node_parent, node_depth, node_ancestors,
    candidates, nodes, words, width, max_depth,
    POOL: tl.constexpr, POOL_BITS: tl.constexpr, NODES: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per lane. The pool stays in registers; only selected candidates become nodes, so no memory is quadratic in the pool."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.program_id(0).to(tl.int64)
    pool = tl.arange(0, POOL)
    key = _ordered(tl.load(score + lane * candidates + pool, mask=pool < candidates, other=float("-inf")))
    # Padding orders below every score.
    key = tl.where(pool < candidates, key, 0)

    # Binary search, bit by bit, for the largest key that enough candidates reach: the key of the last node.
    taken = nodes - 1
    bound = tl.full((), 0, tl.uint32)
    bit = tl.full((), 0x80000000, tl.uint32)
    for _ in range(32):
        above = bound | bit
        bound = tl.where(tl.sum((key >= above).to(tl.int32)) >= taken, above, bound)
        bit = bit >> 1
    better = key > bound
    tied = (key == bound) & (pool < candidates)
    ties = taken - tl.sum(better.to(tl.int32))
    # Both counts stay below 2^16, so one scan computes both.
    counts = tl.cumsum(better.to(tl.int32) * 65536 + tied.to(tl.int32), 0)
    number = (counts >> 16) + tl.minimum(counts & 0xFFFF, ties)
    selected = better | (tied & ((counts & 0xFFFF) <= ties))

    # Pool index of every node: the first position where the cumulative count reaches the node's number.
    node = tl.arange(0, NODES)
    before = tl.zeros((NODES,), tl.int32)
    for step in tl.static_range(POOL_BITS):
        place = before + (POOL >> (step + 1))
        before = tl.where(tl.gather(number, place - 1, 0) < node, place, before)
    real = (node > 0) & (node < nodes)
    at_pool = lane * candidates + before
    kept_score = tl.load(score + at_pool, mask=real, other=float("-inf"))
    kept_token = tl.load(token + at_pool, mask=real, other=-1)
    kept_parent = tl.load(parent + at_pool, mask=real, other=-1)
    inside = (kept_parent >= 0) & (kept_parent < candidates)
    parent_node = tl.gather(tl.where(selected, number, 0), tl.where(inside, kept_parent, 0).to(tl.int32), 0)
    linked = inside & (parent_node > 0) & (parent_node < node)
    usable = real & (linked | (kept_parent == -1)) & (kept_token >= 0) & (kept_score > float("-inf"))

    # Unusable nodes point to themselves, so only paths of usable nodes reach the root, which also points to itself.
    up = tl.where(usable, tl.where(linked, parent_node, 0), node)
    word = tl.arange(0, WORDS)[None, :]
    own = tl.where((node >> 6)[:, None] == word, (tl.full((NODES,), 1, tl.int64) << (node & 63).to(tl.int64))[:, None], 0)
    ancestors = own
    at = node
    depth = tl.zeros((NODES,), tl.int32)
    for _ in range(max_depth):
        depth += (at > 0).to(tl.int32)
        at = tl.gather(up, at, 0)
        ancestors |= tl.where((at >> 6)[:, None] == word, (tl.full((NODES,), 1, tl.int64) << (at & 63).to(tl.int64))[:, None], 0)
    used = at == 0
    root = window_root(lane, lane_row, window_token, window_len, width)
    out = lane * nodes + node
    written = node < nodes
    tl.store(node_token + out, tl.where(node == 0, root, tl.where(used, kept_token, -1)), mask=written)
    tl.store(node_parent + out, tl.where(used & (node > 0), up, -1).to(tl.int64), mask=written)
    tl.store(node_depth + out, tl.where(used, depth, 0).to(tl.int64), mask=written)
    cells = out[:, None] * words + word
    tl.store(node_ancestors + cells, tl.where(used[:, None], ancestors, own), mask=written[:, None] & (word < words))


def tree_build(
    score_BM: Tensor,
    token_BM: Tensor,
    parent_BM: Tensor,
    lane_row_B: Tensor,
    window_token_RAc: Tensor,
    window_len_R: Tensor,
    nodes: Nodes,
    max_depth: int,
) -> None:
    lanes, candidates = score_BM.shape
    count, words = nodes.node_ancestors_BNX.shape[1:]
    if candidates > MAX_CANDIDATES:
        expected = f"at most {MAX_CANDIDATES} candidates for the fused tree_build"
        raise ConfigError("variant.num_steps, variant.topk", expected, candidates, "runtime=compiled, or kernels.mode=compiled, takes more")
    pool = max(64, triton.next_power_of_2(candidates))
    launch(
        _tree_build, (lanes,), score_BM, token_BM, parent_BM, lane_row_B, window_token_RAc, window_len_R,
        *nodes, candidates, count, words, window_token_RAc.shape[1], max_depth,
        POOL=pool, POOL_BITS=pool.bit_length() - 1, NODES=max(32, triton.next_power_of_2(count)), WORDS=triton.next_power_of_2(words),
        num_warps=min(16, max(1, pool // 256)),
    )  # fmt: skip


OP = register(tree_build)

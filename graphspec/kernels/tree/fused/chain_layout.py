"""Triton kernel of :mod:`graphspec.kernels.tree.tree_build`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register
from ...groups import Nodes
from .tree_build import window_root


@triton.jit
def _chain_layout(
    score, token, lane_row, window_token, window_len, node_token, node_parent, node_depth, node_ancestors,
    nodes, words, width, DRAFTED: tl.constexpr, NODES: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per lane."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    written = node < nodes
    tokens = tl.full((NODES,), -1, tl.int64)
    if DRAFTED:
        drafted = written & (node > 0)
        at_pool = lane * (nodes - 1) + node - 1
        kept = tl.load(score + at_pool, mask=drafted, other=float("-inf")) > float("-inf")
        tokens = tl.where(kept, tl.load(token + at_pool, mask=drafted, other=-1), -1)
    root = window_root(lane, lane_row, window_token, window_len, width)
    out = lane * nodes + node
    tl.store(node_token + out, tl.where(node == 0, root, tokens), mask=written)
    tl.store(node_parent + out, (node - 1).to(tl.int64), mask=written)
    tl.store(node_depth + out, node.to(tl.int64), mask=written)
    # Bits 0..node are set. Shifting by a full word is undefined, hence two shifts.
    word = tl.arange(0, WORDS)[None, :]
    bits = tl.minimum(tl.maximum(node[:, None] + 1 - 64 * word, 0), 64).to(tl.int64)
    half = bits >> 1
    ones = ~((tl.full((NODES, WORDS), -1, tl.int64) << half) << (bits - half))
    tl.store(node_ancestors + out[:, None] * words + word, ones, mask=written[:, None] & (word < words))


def chain_layout(
    score_BM: Tensor | None,
    token_BM: Tensor | None,
    lane_row_B: Tensor,
    window_token_RAc: Tensor,
    window_len_R: Tensor,
    nodes: Nodes,
) -> None:
    lanes, count, words = nodes.node_ancestors_BNX.shape
    launch(
        _chain_layout, (lanes,), score_BM, token_BM, lane_row_B, window_token_RAc, window_len_R,
        *nodes, count, words, window_token_RAc.shape[1],
        DRAFTED=score_BM is not None, NODES=max(32, triton.next_power_of_2(count)), WORDS=triton.next_power_of_2(words), num_warps=1,
    )  # fmt: skip


OP = register(chain_layout)

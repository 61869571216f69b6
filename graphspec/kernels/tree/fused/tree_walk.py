"""Triton kernel of :mod:`graphspec.kernels.tree.tree_walk`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register
from ...groups import Limits, Nodes, Run
from ..tree_walk import LIVE, OUT_OF_BUDGET, ROW_FAILED, ROW_LIVE, STOPPED

BLOCK = 8
"""Depths of the path processed at once; a path may have up to 128."""


@triton.jit
def _tree_walk(
    token, parent, depth, ancestors, drawn, finite, depth_cap, lane_row, status, seq_len, draft_len, budget, stop_id,
    draft_context, sample, path, accept_len, outcome, nodes, accept_width, stops,
    CAPPED: tl.constexpr, NODES: tl.constexpr, WORDS: tl.constexpr, STOPS: tl.constexpr, BLOCK: tl.constexpr,
    LIVE: tl.constexpr, STOPPED: tl.constexpr, OUT_OF_BUDGET: tl.constexpr, ROW_LIVE: tl.constexpr, ROW_FAILED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per lane."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    real = node < nodes
    at = lane * nodes + node
    node_token = tl.load(token + at, mask=real, other=-1)
    node_parent = tl.load(parent + at, mask=real, other=-1)
    node_depth = tl.load(depth + at, mask=real, other=0)
    tl.store(sample + at, tl.load(drawn + at, mask=real), mask=real)
    row = tl.load(lane_row + lane)
    row_status = tl.load(status + row)
    tokens_left = tl.load(budget + row)
    cap = tl.minimum(tl.load(draft_len + row), tl.maximum(draft_context - tl.load(seq_len + row), 0))
    if CAPPED:
        cap = tl.minimum(cap, tl.load(depth_cap + lane))
    cap = tl.minimum(cap, accept_width - 1)
    live = row_status == ROW_LIVE

    hangs = real & (node_token >= 0) & (node_parent >= 0)
    of_parent = tl.load(drawn + lane * nodes + tl.where(hangs, node_parent, 0), mask=hangs, other=-1)
    match = (hangs & (node_token == of_parent) & (node_depth <= cap)) | (node == 0)
    accepted = match
    for word in tl.static_range(WORDS):
        bit = tl.where((node >> 6) == word, tl.full((NODES,), 1, tl.int64) << (node & 63).to(tl.int64), 0)
        # Bits are distinct, so their sum is their bitwise or.
        missing = tl.sum(tl.where(match, 0, bit), 0)
        accepted = accepted & ((tl.load(ancestors + at * WORDS + word, mask=real, other=0) & missing) == 0)
    new = tl.sum(accepted.to(tl.int32), 0)

    stop = tl.arange(0, STOPS)
    stop_token = tl.load(stop_id + row * stops + stop, mask=stop < stops, other=-1)
    stop_len = tl.full((), 0, tl.int32) + accept_width + 1
    sound = tl.full((), 0, tl.int32) + accept_width
    for begin in range(0, accept_width, BLOCK):
        step = begin + tl.arange(0, BLOCK)
        on_path = accepted[None, :] & (node_depth[None, :] == step[:, None])
        found = tl.max(tl.where(on_path, node[None, :], 0), 1)
        inside = step < accept_width
        emitted = tl.load(drawn + lane * nodes + found, mask=inside, other=-1)
        whole = tl.load(finite + lane * nodes + found, mask=inside, other=1) != 0
        hit = (emitted[:, None] == stop_token[None, :]) & (stop_token >= 0)[None, :]
        stopped = (tl.max(hit.to(tl.int32), 1) > 0) & (step < new) & inside
        stop_len = tl.minimum(stop_len, tl.min(tl.where(stopped, step + 1, accept_width + 1), 0))
        sound = tl.minimum(sound, tl.min(tl.where(whole, accept_width, step), 0))
        tl.store(path + lane * accept_width + step, tl.where(live, found, 0).to(tl.int64), mask=inside)

    length = tl.minimum(tl.minimum(new, stop_len).to(tl.int64), tl.maximum(tokens_left, 0))
    reason = tl.where(stop_len == length, STOPPED, tl.where(tokens_left <= length, OUT_OF_BUDGET, LIVE))
    failed = sound < length
    tl.store(accept_len + lane, tl.where(live, tl.minimum(length, sound.to(tl.int64)), 0))
    tl.store(outcome + lane, tl.where(live, tl.where(failed, ROW_FAILED, reason + ROW_LIVE).to(tl.int64), row_status))


def tree_walk(
    nodes: Nodes,
    drawn_BN: Tensor,
    finite_BN: Tensor,
    depth_cap_B: Tensor | None,
    lane_row_B: Tensor,
    limits: Limits,
    draft_context: int,
    run: Run,
) -> None:
    lanes, count, words = nodes.node_ancestors_BNX.shape
    stops = limits.stop_id_RE.shape[1]
    padded = max(32, triton.next_power_of_2(count))
    launch(
        _tree_walk, (lanes,), *nodes, drawn_BN.contiguous(), finite_BN.contiguous().view(torch.uint8), depth_cap_B, lane_row_B, *limits,
        draft_context, *run, count, run.path_BA.shape[1], stops,
        CAPPED=depth_cap_B is not None, NODES=padded, WORDS=words, STOPS=triton.next_power_of_2(max(stops, 1)), BLOCK=BLOCK,
        LIVE=LIVE, STOPPED=STOPPED, OUT_OF_BUDGET=OUT_OF_BUDGET, ROW_LIVE=ROW_LIVE, ROW_FAILED=ROW_FAILED,
        num_warps=1 if padded == 32 else 2,
    )  # fmt: skip


OP = register(tree_walk)

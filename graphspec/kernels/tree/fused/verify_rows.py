"""Triton kernel of :mod:`graphspec.kernels.tree.tree_build`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register
from ...groups import LIVE


@triton.jit
def _verify_rows(
    lane_row, status, seq_len, token, depth, ancestors, out_token, out_valid, out_slot, out_position, out_begin, out_end, out_ancestors,
    nodes,
    LIVE: tl.constexpr, NODES: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per lane: all its nodes."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < nodes
    row = tl.load(lane_row + lane)
    begin = tl.load(seq_len + row)
    live = tl.load(status + row) == LIVE
    at = lane * nodes + node
    own = tl.load(token + at, mask=inside, other=-1)
    valid = live & (own >= 0)
    tl.store(out_token + at, tl.where(valid, own, -1), mask=inside)
    tl.store(out_valid + at, valid, mask=inside)
    tl.store(out_slot + at, begin + node, mask=inside)
    tl.store(out_position + at, begin + tl.load(depth + at, mask=inside, other=0), mask=inside)
    tl.store(out_begin + at, tl.zeros_like(own), mask=inside)
    tl.store(out_end + lane, begin)
    for word in tl.static_range(WORDS):
        bits = tl.load(ancestors + at * WORDS + word, mask=inside, other=0)
        tl.store(out_ancestors + at * WORDS + word, tl.where(valid, bits, 0), mask=inside)


def verify_rows(
    lane_row_B: Tensor, status_R: Tensor, seq_len_R: Tensor, node_token_BN: Tensor, node_depth_BN: Tensor, node_ancestors_BNX: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    token, valid = torch.empty_like(node_token_BN), torch.empty_like(node_token_BN, dtype=torch.bool)
    slot, position, begin = (torch.empty_like(node_token_BN) for _ in range(3))
    out = token, valid, slot, position, begin, torch.empty_like(lane_row_B), torch.empty_like(node_ancestors_BNX)
    lanes, nodes, words = node_ancestors_BNX.shape
    launch(
        _verify_rows, (lanes,), lane_row_B, status_R, seq_len_R, node_token_BN, node_depth_BN, node_ancestors_BNX, *out, nodes,
        LIVE=LIVE, NODES=triton.next_power_of_2(nodes), WORDS=words, num_warps=1,
    )  # fmt: skip
    return out


OP = register(verify_rows)

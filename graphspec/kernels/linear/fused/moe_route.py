"""Triton kernel of :mod:`graphspec.kernels.linear.moe_route`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register
from ..moe_route import NORM_EPS


@triton.jit
def _finite(x):
    return tl.where((x == x) & (tl.abs(x) != float("inf")), x, -float("inf"))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _moe_route(
    logits, bias, valid, index, weight, scaling, eps, row_stride,
    EXPERTS: tl.constexpr, SIZE: tl.constexpr, TOPK: tl.constexpr, GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, BIASED: tl.constexpr,
    GROUPS_PAD: tl.constexpr, SIZE_PAD: tl.constexpr, TOPK_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token): experts as a tile ``[groups, experts of a group]``, so that all groups are ranked at once."""
    group = tl.arange(0, GROUPS_PAD)
    member = tl.arange(0, SIZE_PAD)
    expert = group[:, None] * SIZE + member[None, :]
    inside = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    if BIASED:
        shift = tl.load(bias + expert, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    logit = _finite(tl.load(logits + token * row_stride + expert, mask=inside, other=-float("inf")))
    rank = logit
    if SIGMOID:
        rank = _sigmoid(logit)
    else:
        peak = tl.max(tl.max(logit, 1), 0)
        peak = tl.where(peak == -float("inf"), 0.0, peak)
        total = tl.sum(tl.sum(tl.exp(logit - peak), 1), 0)
        total = tl.where(total == 0.0, 1.0, total)
        if BIASED:
            rank = tl.exp(logit - peak) / total
    if BIASED:
        rank += shift
    if TOPK_GROUPS < GROUPS:
        rank = tl.where(inside, rank, -float("inf"))
        worth = tl.max(rank, 1)
        if GROUP_BEST == 2:
            best = tl.min(tl.where(rank == worth[:, None], member[None, :], SIZE_PAD), 1)
            worth += tl.max(tl.where(member[None, :] == best[:, None], -float("inf"), rank), 1)
        column = tl.arange(0, GROUPS_PAD)
        across = tl.sum(tl.where(group[:, None] == column[None, :], worth[:, None], 0.0), 0)
        better = (across[None, :] > worth[:, None]) | ((across[None, :] == worth[:, None]) & (column[None, :] < group[:, None]))
        ahead = tl.sum((better & (column < GROUPS)[None, :]).to(tl.int32), 1)
        rank = tl.where((ahead < TOPK_GROUPS)[:, None], rank, -float("inf"))
    # One integer that orders by score, then by lower index. The high half is the float's bits as an integer of the same order.
    bits = tl.where(rank == 0.0, 0.0, rank).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - expert).to(tl.int64)
    key = tl.where(inside, key, -0x8000000000000000)
    place = tl.arange(0, TOPK_PAD)
    chosen = tl.zeros((TOPK_PAD,), tl.int32)
    for k in tl.static_range(TOPK):
        top = tl.max(tl.max(key, 1), 0)
        key = tl.where(key == top, -0x8000000000000000, key)
        chosen = tl.where(place == k, 0x7FFFFFFF - (top & 0xFFFFFFFF).to(tl.int32), chosen)
    used = place < TOPK
    score = _finite(tl.load(logits + token * row_stride + chosen, mask=used, other=-float("inf")))
    score = _sigmoid(score) if SIGMOID else tl.exp(score - peak) / total
    if NORMALIZE:
        score = score / (tl.sum(tl.where(used, score, 0.0), 0) + eps)
    routed = tl.load(valid + token) != 0
    tl.store(index + token * TOPK + place, tl.where(routed, chosen, -1).to(tl.int64), mask=used)
    tl.store(weight + token * TOPK + place, tl.where(routed, score * scaling, 0.0), mask=used)


def moe_route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    valid_T: Tensor,
    topk: int,
    groups: int,
    topk_groups: int,
    group_best: int,
    sigmoid: bool,
    normalize: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    tokens, experts = logits_TE.shape
    size = experts // groups
    index, weight = logits_TE.new_empty(tokens, topk, dtype=torch.int64), logits_TE.new_empty(tokens, topk)
    launch(
        _moe_route, (tokens,), logits_TE, bias_E, valid_T.contiguous(), index, weight, scaling, NORM_EPS, logits_TE.stride(0),
        EXPERTS=experts, SIZE=size, TOPK=topk, GROUPS=groups, TOPK_GROUPS=topk_groups, GROUP_BEST=group_best,
        SIGMOID=sigmoid, NORMALIZE=normalize, BIASED=bias_E is not None,
        GROUPS_PAD=triton.next_power_of_2(groups), SIZE_PAD=triton.next_power_of_2(size), TOPK_PAD=triton.next_power_of_2(topk),
        num_warps=1,
    )  # fmt: skip
    return index, weight


OP = register(moe_route)

"""Triton kernels of :mod:`graphspec.kernels.linear.moe_mlp`: two launches, each of which reads the weights of a chosen expert once.

A program owns rows of one expert's weights and all choices (token, expert) of that expert; weights are the M operand of the product, tokens
the N operand. With few choices, program j serves the expert of choice j unless an earlier choice has the same expert; with many, there is
one program per expert. Up to :data:`SCANNED` choices a program scans them for its tokens; beyond that (prefill) they are sorted first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import Launch, launch, register, semaphores
from ...fused.work import Situation, Work, works
from ..moe_route import distinct_experts

SCANNED = 512
"""Most choices (tokens x experts per token) that programs scan themselves."""

GATE_ROWS, ROWS = 32, 64
"""Rows per program, of gate and of up projection, and of any other projection."""

MERGED = 16
"""Tokens whose experts are summed at once."""


@triton.jit
def _choices(index, order, begin, count_all, SORTED: tl.constexpr, PER_EXPERT: tl.constexpr, PADDED: tl.constexpr):
    """``(expert, count, match, rank)`` of this program: its expert, number and mask of its choices, rank of each; count 0: no work."""
    program = tl.program_id(0)
    expert = program.to(tl.int64)
    match = tl.zeros((PADDED,), tl.int1)
    rank = tl.zeros((PADDED,), tl.int32)
    if SORTED:
        # Sums, because the interpreter takes no other scalar as a loop bound.
        edge = tl.arange(0, 2)
        place = tl.load(begin + expert + edge)
        count = tl.sum(tl.where(edge == 0, -place, place), 0).to(tl.int32)
    else:
        choice = tl.arange(0, PADDED)
        experts = tl.load(index + choice, mask=choice < count_all, other=-1)
        if not PER_EXPERT:
            expert = tl.load(index + program)
        match = (experts == expert) & (experts >= 0)
        if not PER_EXPERT:
            first = tl.min(tl.where(match, choice, PADDED), 0)
            match = match & (first == program)
        own = match.to(tl.int32)
        count = tl.sum(own, 0)
        rank = tl.cumsum(own, 0) - 1
    return expert, count, match, rank


@triton.jit
def _picked(match, rank, order, begin, expert, start, count, SORTED: tl.constexpr, PADDED: tl.constexpr, BLOCK_T: tl.constexpr):
    """The program's choices number ``start`` to ``start + BLOCK_T - 1``; 0 past the last."""
    place = start + tl.arange(0, BLOCK_T)
    if SORTED:
        choice = tl.load(order + tl.load(begin + expert) + place, mask=place < count, other=0).to(tl.int32)
    else:
        found = match[None, :] & (rank[None, :] == place[:, None])
        choice = tl.sum(tl.where(found, tl.arange(0, PADDED)[None, :], 0), 1)
    return choice


def _work(launch: Launch, at: Situation) -> Work:
    values = launch.values
    weight = values["weights"]
    count, topk = weight.shape[0], values["topk"]
    hit = distinct_experts(count, topk, values["count_all"] / topk)
    # Gate and up are two tiles.
    tile = values["ROWS"] * values["STEP"] * weight.element_size() * (2 if values.get("GATED") else 1)
    return Work(
        bytes=weight.numel() * weight.element_size() * hit / count,
        programs=launch.programs,
        in_flight=max(launch.num_stages - 1, 1) * tile,
        memory=1,
        cache=2,
        flops=2 * values["count_all"] * weight[0].numel(),
    )


@works(_work)
@triton.jit
def _gate_up(
    x, index, order, begin, weights, out, count_all, topk, hidden, width, x_stride,
    SORTED: tl.constexpr, PER_EXPERT: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK_T: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (expert, rows): ``silu(gate) * up``, or ``relu(up) ** 2`` without a gate, for every choice of its expert."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, count, match, rank = _choices(index, order, begin, count_all, SORTED, PER_EXPERT, PADDED)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, STEP)
    halves: tl.constexpr = 2 if GATED else 1
    up_rows = weights + (expert * halves + halves - 1) * width * hidden + row[:, None] * hidden
    inside = (row < width)[:, None]
    for start in range(0, count, BLOCK_T):
        choice = _picked(match, rank, order, begin, expert, start, count, SORTED, PADDED, BLOCK_T)
        alive = start + tl.arange(0, BLOCK_T) < count
        token_rows = x + (choice // topk).to(tl.int64)[:, None] * x_stride
        if GATED:
            gate = tl.zeros((ROWS, BLOCK_T), tl.float32)
        up = tl.zeros((ROWS, BLOCK_T), tl.float32)
        for offset in range(0, hidden, STEP):
            column = (offset + channel)[None, :]
            left = inside if EVEN else inside & (column < hidden)
            right = alive[:, None] if EVEN else alive[:, None] & (column < hidden)
            ups = tl.load(up_rows + column, mask=left, other=0.0)
            tokens = tl.trans(tl.load(token_rows + column, mask=right, other=0.0))
            if GATED:
                gates = tl.load(up_rows - width * hidden + column, mask=left, other=0.0)
                gate = tl.dot(gates, tokens, gate, input_precision="ieee")
            up = tl.dot(ups, tokens, up, input_precision="ieee")
        if GATED:
            active = gate / (1.0 + tl.exp(-gate)) * up
        else:
            # NaN stays NaN.
            positive = tl.where(up < 0.0, 0.0, up)
            active = positive * positive
        tl.store(out + choice.to(tl.int64)[None, :] * width + row[:, None], active, mask=inside & alive[None, :])


@works(_work)
@triton.jit
def _down(
    active, index, weight, order, begin, weights, partial, out, counters, count_all, topk, hidden, width, tokens, programs,
    SORTED: tl.constexpr, PER_EXPERT: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK_T: tl.constexpr, EVEN: tl.constexpr, TOPK: tl.constexpr, MERGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (expert, rows): the down projection of its choices; the last program of these rows sums the experts of every token."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, count, match, rank = _choices(index, order, begin, count_all, SORTED, PER_EXPERT, PADDED)
    tile = tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, STEP)
    down_rows = weights + expert * hidden * width + row[:, None] * width
    inside = (row < hidden)[:, None]
    for start in range(0, count, BLOCK_T):
        choice = _picked(match, rank, order, begin, expert, start, count, SORTED, PADDED, BLOCK_T)
        alive = start + tl.arange(0, BLOCK_T) < count
        choice_rows = active + choice.to(tl.int64)[:, None] * width
        mixed = tl.zeros((ROWS, BLOCK_T), tl.float32)
        for offset in range(0, width, STEP):
            column = (offset + channel)[None, :]
            left = inside if EVEN else inside & (column < width)
            right = alive[:, None] if EVEN else alive[:, None] & (column < width)
            downs = tl.load(down_rows + column, mask=left, other=0.0)
            inputs = tl.trans(tl.load(choice_rows + column, mask=right, other=0.0))
            mixed = tl.dot(downs, inputs, mixed, input_precision="ieee")
        tl.store(partial + choice.to(tl.int64)[None, :] * hidden + row[:, None], mixed, mask=inside & alive[None, :])

    tl.debug_barrier()
    if tl.atomic_add(counters + tile, 1, sem="acq_rel") == programs - 1:
        tl.store(counters + tile, 0)
        tl.debug_barrier()
        whole = row < hidden
        for start in range(0, tokens, MERGED):
            token = start + tl.arange(0, MERGED)
            summed = tl.zeros((MERGED, ROWS), tl.float32)
            for k in tl.static_range(TOPK):
                choice = token.to(tl.int64) * TOPK + k
                chosen = (token < tokens) & (tl.load(index + choice, mask=token < tokens, other=-1) >= 0)
                share = tl.load(weight + choice, mask=chosen, other=0.0)
                # Written by other programs: bypass L1.
                source = partial + choice[:, None] * hidden + row[None, :]
                part = tl.load(source, mask=chosen[:, None] & whole[None, :], other=0.0, cache_modifier=".cg")
                summed += share[:, None] * part
            tl.store(out + token.to(tl.int64)[:, None] * hidden + row[None, :], summed, mask=(token < tokens)[:, None] & whole[None, :])


def moe_mlp(x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor, gate_up_EFH: Tensor, down_EHF: Tensor) -> Tensor:
    tokens, topk = index_TK.shape
    experts, hidden, width = down_EHF.shape
    gated = gate_up_EFH.shape[1] == 2 * width
    up_rows = GATE_ROWS if gated else ROWS
    choices = tokens * topk
    index, weight = index_TK.contiguous(), weight_TK.contiguous()
    order = begin = None
    if choices > SCANNED:
        ordered, order = torch.sort(index.view(-1), stable=True)
        begin = torch.searchsorted(ordered, torch.arange(experts + 1, device=index.device))
    programs = experts if choices > SCANNED else min(choices, experts)
    # 256 bytes of a weight row at a time.
    step = 256 // x_TH.dtype.itemsize
    options: dict[str, Any] = {
        "SORTED": choices > SCANNED,
        "PER_EXPERT": choices > experts,
        "PADDED": triton.next_power_of_2(choices) if choices <= SCANNED else 1,
        "STEP": step,
        "BLOCK_T": 16 if choices <= SCANNED else 64,
        "num_warps": 4,
        "num_stages": 4,
    }
    active = x_TH.new_empty(choices, width)
    partial = x_TH.new_empty(choices, hidden, dtype=torch.float32)
    out = x_TH.new_empty(tokens, hidden)
    launch(
        _gate_up, (programs, triton.cdiv(width, up_rows)),
        x_TH, index, order, begin, gate_up_EFH, active, choices, topk, hidden, width, x_TH.stride(0),
        ROWS=up_rows, EVEN=hidden % step == 0, GATED=gated, **options,
    )  # fmt: skip
    tiles = triton.cdiv(hidden, ROWS)
    launch(
        _down, (programs, tiles),
        active, index, weight, order, begin, down_EHF, partial, out, semaphores(x_TH.device, tiles),
        choices, topk, hidden, width, tokens, programs,
        ROWS=ROWS, EVEN=width % step == 0, TOPK=topk, MERGED=MERGED, **options,
    )  # fmt: skip
    return out


OP = register(moe_mlp)

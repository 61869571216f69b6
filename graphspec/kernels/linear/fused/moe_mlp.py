"""Triton kernels of :mod:`graphspec.kernels.linear.moe_mlp`: two launches, each of which reads the weights of a chosen expert once.

A program owns rows of one expert's weights and all choices (token, expert) of that expert; weights are the M operand of the product, tokens
the N operand. With few choices, program j serves the expert of choice j unless an earlier choice has the same expert; with many, there is
one program per expert. Up to :data:`SCANNED` choices a program scans them for its tokens; beyond that (prefill) they are sorted first.

Weights of low precision become numbers tile by tile, as in ``_packed.py``, and everything after that is the same.
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
from ..packed import Packed, check_packed
from ._packed import dequantised, fields_from, pair
from .linear import stored

SCANNED = 512
"""Most choices (tokens x experts per token) that programs scan themselves."""

FEW = 64
"""Most choices for which four warps have the registers that codes need."""
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


_FIELDS = ("weights", "scales", "super_scales", "zeros", "minimums", "super_minimums")
"""Arguments that are the experts' weights."""


def _work(launch: Launch, at: Situation) -> Work:
    values = launch.values
    weights = values["weights"]
    count, topk = values["experts"], values["topk"]
    hit = distinct_experts(count, topk, values["count_all"] / topk)
    # Gate and up are two tiles. Codes may have less than a byte.
    channels = values["width"] if values.get("GATED") is None else values["hidden"]
    tile = values["ROWS"] * values["STEP"] * weights[0].nbytes / channels * (2 if values.get("GATED") else 1)
    return Work(
        bytes=sum(values[name].nbytes for name in _FIELDS if values[name] is not None) * hit / count,
        programs=launch.programs,
        in_flight=max(launch.num_stages - 1, 1) * tile,
        memory=1,
        cache=2,
        flops=2 * values["count_all"] * values["hidden"] * values["width"] * (2 if values.get("GATED") else 1),
    )


@triton.jit
def _tile(
    rows_at, fields, entries, inside, start, inputs,
    CODE: tl.constexpr, FLOAT8: tl.constexpr, GROUP: tl.constexpr, DIVIDES: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Numbers ``[rows, STEP]`` of weights from channel ``start`` on; 0 past the last one.

    Args:
        rows_at: ``[rows, 1]``, where rows of numbers or codes begin.
        fields, entries: of codes, see :func:`~._packed.fields_from`.
        inside: bool ``[rows, 1]``, rows that are read.
    """
    PAIR: tl.constexpr = pair(CODE)
    column = (start // PAIR + tl.arange(0, STEP // PAIR))[None, :]
    tile = tl.load(rows_at + column, mask=inside if EVEN else inside & (column < inputs // PAIR), other=0)
    if CODE != "":
        tile = dequantised(tile, entries, fields, CODE, FLOAT8, GROUP, DIVIDES, dtype)
        if not EVEN:
            tile = tl.where((start + tl.arange(0, STEP) < inputs)[None, :], tile, 0.0)
    return tile


@works(_work)
@triton.jit
def _gate_up(
    x, index, order, begin, weights, scales, super_scales, zeros, minimums, super_minimums, group_of, bias, out,
    count_all, topk, experts, hidden, width, columns, super_columns, super_minimum_columns, x_stride, alpha, limit,
    CODE: tl.constexpr, FLOAT8: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr, SUPER_MINIMUM: tl.constexpr,
    DIVIDES: tl.constexpr,
    SORTED: tl.constexpr, PER_EXPERT: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK_T: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (expert, rows): the activation of gate and up, or ``relu(up) ** 2`` without a gate, for every choice of its expert."""
    dtype: tl.constexpr = x.dtype.element_ty
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, count, match, rank = _choices(index, order, begin, count_all, SORTED, PER_EXPERT, PADDED)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, STEP)
    halves: tl.constexpr = 2 if GATED else 1
    inside = (row < width)[:, None]
    first = (expert * halves + halves - 1) * width
    PAIR: tl.constexpr = pair(CODE)
    up_at = weights + first * (hidden // PAIR) + row[:, None] * (hidden // PAIR)
    # Fields of rows past the end are those of the last one.
    up_row = first + tl.minimum(row, width - 1)
    fields = (
        scales, super_scales, zeros, minimums, super_minimums, group_of, columns, super_columns, super_minimum_columns, hidden,
    )  # fmt: skip
    for start in range(0, count, BLOCK_T):
        choice = _picked(match, rank, order, begin, expert, start, count, SORTED, PADDED, BLOCK_T)
        alive = start + tl.arange(0, BLOCK_T) < count
        token_rows = x + (choice // topk).to(tl.int64)[:, None] * x_stride
        if GATED:
            gate = tl.zeros((ROWS, BLOCK_T), tl.float32)
        up = tl.zeros((ROWS, BLOCK_T), tl.float32)
        up_entries, gate_entries = 0, 0
        if CODE != "":
            # One step ahead of their codes.
            up_entries = fields_from(None, fields, up_row, 0, GROUP, SUPER, SUPER_MINIMUM, STEP)
            if GATED:
                gate_entries = fields_from(None, fields, up_row - width, 0, GROUP, SUPER, SUPER_MINIMUM, STEP)
        for offset in range(0, hidden, STEP):
            column = (offset + channel)[None, :]
            right = alive[:, None] if EVEN else alive[:, None] & (column < hidden)
            ups = _tile(up_at, fields, up_entries, inside, offset, hidden, CODE, FLOAT8, GROUP, DIVIDES, STEP, EVEN, dtype)
            tokens = tl.trans(tl.load(token_rows + column, mask=right, other=0.0))
            if GATED:
                gates = _tile(
                    up_at - width * (hidden // PAIR), fields, gate_entries, inside, offset, hidden,
                    CODE, FLOAT8, GROUP, DIVIDES, STEP, EVEN, dtype,
                )  # fmt: skip
                gate = tl.dot(gates, tokens, gate, input_precision="ieee")
            up = tl.dot(ups, tokens, up, input_precision="ieee")
            if CODE != "":
                up_entries = fields_from(up_entries, fields, up_row, offset + STEP, GROUP, SUPER, SUPER_MINIMUM, STEP)
                if GATED:
                    gate_entries = fields_from(gate_entries, fields, up_row - width, offset + STEP, GROUP, SUPER, SUPER_MINIMUM, STEP)
        if bias is not None:
            up += tl.load(bias + first + row[:, None], mask=inside, other=0.0).to(tl.float32)
            if GATED:
                gate += tl.load(bias + first - width + row[:, None], mask=inside, other=0.0).to(tl.float32)
        # NaN stays NaN.
        if CLAMPED:
            gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
            active = gate / (1.0 + tl.exp(-(alpha * gate))) * (up + 1.0)
        elif GELU:
            # x / 2 (1 + tanh(z)) = x / (1 + exp(-2 z))
            active = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up
        elif GATED:
            active = gate / (1.0 + tl.exp(-gate)) * up
        else:
            positive = tl.where(up < 0.0, 0.0, up)
            active = positive * positive
        tl.store(out + choice.to(tl.int64)[None, :] * width + row[:, None], active, mask=inside & alive[None, :])


@works(_work)
@triton.jit
def _down(
    active, index, weight, order, begin, weights, scales, super_scales, zeros, minimums, super_minimums, group_of, bias,
    partial, out, counters, count_all, topk, experts, hidden, width, columns, super_columns, super_minimum_columns, tokens, programs,
    CODE: tl.constexpr, FLOAT8: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr, SUPER_MINIMUM: tl.constexpr,
    DIVIDES: tl.constexpr,
    SORTED: tl.constexpr, PER_EXPERT: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK_T: tl.constexpr, EVEN: tl.constexpr, TOPK: tl.constexpr, MERGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (expert, rows): the down projection of its choices; the last program of these rows sums the experts of every token."""
    dtype: tl.constexpr = active.dtype.element_ty
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, count, match, rank = _choices(index, order, begin, count_all, SORTED, PER_EXPERT, PADDED)
    tile = tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, STEP)
    inside = (row < hidden)[:, None]
    first = expert * hidden
    PAIR: tl.constexpr = pair(CODE)
    down_at = weights + first * (width // PAIR) + row[:, None] * (width // PAIR)
    down_row = first + tl.minimum(row, hidden - 1)
    fields = (
        scales, super_scales, zeros, minimums, super_minimums, group_of, columns, super_columns, super_minimum_columns, width,
    )  # fmt: skip
    for start in range(0, count, BLOCK_T):
        choice = _picked(match, rank, order, begin, expert, start, count, SORTED, PADDED, BLOCK_T)
        alive = start + tl.arange(0, BLOCK_T) < count
        choice_rows = active + choice.to(tl.int64)[:, None] * width
        mixed = tl.zeros((ROWS, BLOCK_T), tl.float32)
        entries = 0
        if CODE != "":
            entries = fields_from(None, fields, down_row, 0, GROUP, SUPER, SUPER_MINIMUM, STEP)
        for offset in range(0, width, STEP):
            column = (offset + channel)[None, :]
            right = alive[:, None] if EVEN else alive[:, None] & (column < width)
            downs = _tile(down_at, fields, entries, inside, offset, width, CODE, FLOAT8, GROUP, DIVIDES, STEP, EVEN, dtype)
            inputs = tl.trans(tl.load(choice_rows + column, mask=right, other=0.0))
            mixed = tl.dot(downs, inputs, mixed, input_precision="ieee")
            if CODE != "":
                entries = fields_from(entries, fields, down_row, offset + STEP, GROUP, SUPER, SUPER_MINIMUM, STEP)
        if bias is not None:
            mixed += tl.load(bias + first + row[:, None], mask=inside, other=0.0).to(tl.float32)
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


def _shape(weight: Tensor | Packed, choices: int, *, clamped: bool = False) -> dict[str, int]:
    """Tokens of a block, warps and stages: codes and what they become need more registers, with many tokens or scales of scales."""
    scaled_twice = isinstance(weight, Packed) and weight.super_scales is not None
    many = 16 if scaled_twice else 64
    warps = 8 if isinstance(weight, Packed) and (choices > FEW or scaled_twice) else 4
    # With limits and biases, a fourth stage of numbers spills.
    stages = 3 if clamped and not isinstance(weight, Packed) else 4
    return {"BLOCK_T": 16 if choices <= SCANNED else many, "num_warps": warps, "num_stages": stages}


def experts_of(
    x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor, gate_up: Tensor | Packed, down: Tensor | Packed,
    gate_up_bias_EF: Tensor | None, down_bias_EH: Tensor | None, alpha: float, limit: float, gelu: bool,
) -> Tensor:  # fmt: skip
    """Either op; weights of numbers are ``[E * rows, channels]``, too."""
    tokens, topk = index_TK.shape
    hidden, width = x_TH.shape[1], down.shape[1]
    experts = down.shape[0] // hidden
    gated = gate_up.shape[0] == 2 * experts * width
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if isinstance(weight, Packed):
            check_packed(weight, f"packed_moe_mlp: {name}")
    up_rows = GATE_ROWS if gated else ROWS
    choices = tokens * topk
    index, weight = index_TK.contiguous(), weight_TK.contiguous()
    order = begin = None
    if choices > SCANNED:
        ordered, order = torch.sort(index.view(-1), stable=True)
        begin = torch.searchsorted(ordered, torch.arange(experts + 1, device=index.device))
    programs = experts if choices > SCANNED else min(choices, experts)
    # 256 bytes of a weight row of numbers at a time.
    step = 256 // x_TH.dtype.itemsize
    options: dict[str, Any] = {
        "SORTED": choices > SCANNED,
        "PER_EXPERT": choices > experts,
        "PADDED": triton.next_power_of_2(choices) if choices <= SCANNED else 1,
        "STEP": step,
    }
    active = x_TH.new_empty(choices, width)
    partial = x_TH.new_empty(choices, hidden, dtype=torch.float32)
    out = x_TH.new_empty(tokens, hidden)
    held = stored(gate_up)
    launch(
        _gate_up, (programs, triton.cdiv(width, up_rows)),
        x_TH, index, order, begin, held.rows, *held.fields, gate_up_bias_EF, active,
        choices, topk, experts, hidden, width, *held.columns, x_TH.stride(0), alpha, limit,
        **held.options, ROWS=up_rows, EVEN=hidden % step == 0, GATED=gated, CLAMPED=limit > 0, GELU=gelu,
        **_shape(gate_up, choices, clamped=limit > 0), **options,
    )  # fmt: skip
    tiles, held = triton.cdiv(hidden, ROWS), stored(down)
    launch(
        _down, (programs, tiles),
        active, index, weight, order, begin, held.rows, *held.fields, down_bias_EH, partial, out, semaphores(x_TH.device, tiles),
        choices, topk, experts, hidden, width, *held.columns, tokens, programs,
        **held.options, ROWS=ROWS, EVEN=width % step == 0, TOPK=topk, MERGED=MERGED, **_shape(down, choices), **options,
    )  # fmt: skip
    return out


def moe_mlp(
    x_TH: Tensor,
    index_TK: Tensor,
    weight_TK: Tensor,
    gate_up_EFH: Tensor,
    down_EHF: Tensor,
    gate_up_bias_EF: Tensor | None = None,
    down_bias_EH: Tensor | None = None,
    alpha: float = 1.0,
    limit: float = 0.0,
    gelu: bool = False,
) -> Tensor:
    numbers = gate_up_EFH.flatten(0, 1), down_EHF.flatten(0, 1)
    return experts_of(x_TH, index_TK, weight_TK, *numbers, gate_up_bias_EF, down_bias_EH, alpha, limit, gelu)


OP = register(moe_mlp)

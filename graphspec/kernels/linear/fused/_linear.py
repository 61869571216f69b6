"""The kernels of :mod:`graphspec.kernels.linear.fused.linear`.

The weight is the M operand of the matrix instruction and the few rows are N. With split-K, programs store their partial sums in memory; the
last one to arrive adds them in order and runs the epilogue of the tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import INTERPRETED, Launch
from ...fused.work import ARRIVAL, Situation, Work, works
from ...sampling.fused._vocabulary import arrive, exp_exact
from ._packed import dequantised, fields_from, pair

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _prefetch(at):
    """Prefetch the cache lines at these addresses into L2."""
    if not _INTERPRETED:
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _factor(total, inputs, eps):
    return tl.rsqrt(total / inputs + eps)


@triton.jit
def _row_totals(squares, row, in_rows, parts, PARTS: tl.constexpr):
    """Sums of ``squares [rows, parts]`` over the parts, in an order that depends on their number alone."""
    BLOCK: tl.constexpr = PARTS if PARTS < 32 else 32
    part = tl.arange(0, BLOCK)
    at = squares + row.to(tl.int64)[:, None] * parts + part[None, :]
    total = tl.load(at, mask=in_rows[:, None] & (part < parts)[None, :], other=0.0)
    for start in tl.static_range(BLOCK, PARTS, BLOCK):
        total += tl.load(at + start, mask=in_rows[:, None] & (start + part < parts)[None, :], other=0.0)
    return tl.sum(total, 1)


@triton.jit
def _scanned_totals(row_at, in_rows, inputs, SCAN_M: tl.constexpr, SCAN_K: tl.constexpr, SCANS: tl.constexpr):
    """Sums of squares of whole rows. Unrolled, because a nested loop would keep the loop over the weight from being pipelined."""
    position = tl.arange(0, SCAN_K)
    total = tl.zeros([SCAN_M, SCAN_K], tl.float32)
    for scan in tl.static_range(SCANS):
        inside = in_rows[:, None] & (scan * SCAN_K + position < inputs)[None, :]
        part = tl.load(row_at[:, None] + (scan * SCAN_K + position)[None, :], mask=inside, other=0.0).to(tl.float32)
        total += part * part
    return tl.sum(total, 1)


@triton.jit
def _normed(x, factor, weight, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm of ``x``, given its factors and the weight, both broadcast; rounds where the reference rounds."""
    x = x.to(tl.float32) * factor
    weight = weight.to(tl.float32)
    y = x * (1.0 + weight) if OFFSET else weight * x.to(dtype).to(tl.float32)
    return y.to(dtype)


@triton.jit
def _sum_of_32(x, COLUMNS: tl.constexpr):
    """Column sums of ``x [32, columns]``, two numbers at a time: the compiler lays out tiles of few and of many columns differently, and
    would add more than two in different orders.
    """
    x = tl.sum(tl.reshape(x, [2, 16, COLUMNS]), 0)
    x = tl.sum(tl.reshape(x, [2, 8, COLUMNS]), 0)
    x = tl.sum(tl.reshape(x, [2, 4, COLUMNS]), 0)
    x = tl.sum(tl.reshape(x, [2, 2, COLUMNS]), 0)
    return tl.sum(x, 0)


@triton.jit
def _finish(
    acc, up, output, row, in_rows, bias, residual_at, out, outputs, sums_at,
    GATED: tl.constexpr, dtype: tl.constexpr, TILE_O: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """Epilogue of a tile ``[TILE_O, TILE_M]``: bias, gate, residual and store. Rounds where the reference rounds, unless ``out`` is wider.

    ``sums_at [TILE_M]``, if given, receives the tile's share of each row's sum of squares, taken of the rounded values that are stored.
    """
    keep = (output < outputs)[:, None] & in_rows[None, :]
    result: tl.constexpr = out.dtype.element_ty
    rounded: tl.constexpr = dtype if result == dtype else tl.float32
    if bias is not None:
        acc += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + outputs + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    y = acc.to(rounded).to(tl.float32)
    if GATED:
        y = (y / (1.0 + exp_exact(-y))).to(rounded).to(tl.float32) * up.to(rounded).to(tl.float32)
        y = y.to(rounded).to(tl.float32)
    if residual_at is not None:
        y = tl.load(residual_at, mask=keep, other=0.0).to(tl.float32) + y
    tl.store(out + row.to(tl.int64)[None, :] * outputs + output[:, None], y.to(result), mask=keep)
    if sums_at is not None:
        stored = tl.where(keep, y.to(result).to(tl.float32), 0.0)
        squares = stored * stored
        tl.store(sums_at, _sum_of_32(squares, TILE_M) if TILE_O == 32 else tl.sum(squares, 0), mask=in_rows)


@triton.jit
def _sum_of_parts(at, stride, keep, SPLITS: tl.constexpr):
    """The sum of what the programs of a split have stored, in their order. Written by other programs, so that L1 is bypassed."""
    total = tl.load(at, mask=keep, other=0.0, cache_modifier=".cg")
    for other in tl.static_range(1, SPLITS):
        total += tl.load(at + other * stride, mask=keep, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _place_heads(
    low, high, head, channel, row, in_rows, bias, places, norms,
    DIM: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Epilogue of some channels of a head, ``low [channels, rows]``, and of those that they rotate with, ``high``, half a head further on.

    Queries go to ``out [rows, queries, DIM]``, keys and values to the slot of each row in the pool, ``cell``, as
    :mod:`graphspec.kernels.attention.rope_kv_write` puts them. Rounds where the product and that op round. A norm needs all channels.
    """
    cos, sin, cell, out, pool, queries, groups, pool_slots = places
    query_norm, key_norm, eps = norms
    HALF: tl.constexpr = DIM // 2
    if bias is not None:
        low += tl.load(bias + head * DIM + channel).to(tl.float32)[:, None]
        high += tl.load(bias + head * DIM + HALF + channel).to(tl.float32)[:, None]
    low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
    if head < queries + groups:
        if NORM:
            weight = query_norm
            if head >= queries:
                weight = key_norm
            total = tl.sum(low * low, 0) + tl.sum(high * high, 0)
            factor = (1.0 / tl.sqrt(total / DIM + eps))[None, :]
            low = _normed(low, factor, tl.load(weight + channel)[:, None], OFFSET, dtype).to(tl.float32)
            high = _normed(high, factor, tl.load(weight + HALF + channel)[:, None], OFFSET, dtype).to(tl.float32)
        turned = low * cos - high * sin
        high = high * cos + low * sin
        low = turned
    if head < queries:
        at = out + (row.to(tl.int64) * queries + head)[None, :] * DIM + channel[:, None]
        tl.store(at, low.to(dtype), mask=in_rows[None, :])
        tl.store(at + HALF, high.to(dtype), mask=in_rows[None, :])
    else:
        is_value = head >= queries + groups
        own = head - queries - tl.where(is_value, groups, 0)
        slot = tl.where(is_value, pool_slots, 0).to(tl.int64) + cell
        at = pool + (slot * groups + own)[None, :] * DIM + channel[:, None]
        kept: tl.constexpr = pool.dtype.element_ty
        tl.store(at, low.to(dtype).to(kept), mask=in_rows[None, :])
        tl.store(at + HALF, high.to(dtype).to(kept), mask=in_rows[None, :])


@triton.jit
def _halves(acc, PAIRS: tl.constexpr, TILE_M: tl.constexpr):
    """A tile whose first rows are channels of a head, and whose others are those that they rotate with."""
    return tl.split(tl.permute(tl.reshape(acc, [2, PAIRS, TILE_M]), (1, 2, 0)))


@triton.jit
def _row_squares(x, squares, inputs, inner, x_outer, x_inner, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program per row: its sum of squares, in an order that depends only on the length of the row."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    at = x + (row // inner).to(tl.int64) * x_outer + (row % inner).to(tl.int64) * x_inner
    channel = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, inputs, BLOCK):
        part = tl.load(at + start + channel, mask=start + channel < inputs, other=0.0).to(tl.float32)
        total += part * part
    tl.store(squares + row, tl.sum(total, 0))


_FIELDS = ("weight", "scales", "super_scales", "zeros", "minimums", "super_minimums", "group_of")
"""Arguments that are a weight."""


def _linear_work(launch: Launch, at: Situation) -> Work:
    values = launch.values
    weight = values["weight"]
    channels, item = values["inputs"], values["x"].element_size()
    held = sum(values[name].nbytes for name in _FIELDS if values[name] is not None)
    # Parts of one tile, or of one head, which one program puts together.
    joined = max(values["TILE_O"], values["DIM"]) if values["HEAD_NORM"] else values["TILE_O"]
    cut = values["SPLITS"] * joined > values["TILE_O"]
    rows = values["rows"]
    halves = 2 if values["GATED"] else 1
    # Codes may have less than a byte.
    tile = (values["TILE_O"] * halves * weight[0].nbytes / channels + values["TILE_M"] * item) * values["TILE_K"]
    part = values["SPLITS"] * joined * halves * min(rows, values["TILE_M"]) * 4 if cut else 0
    logits = 4 * rows * weight.shape[0] if values["out"].element_size() == 4 and item < 4 else 0
    # The inputs of the norm's factors arrive together with the first weights, which are on their way to the cache while the kernel before
    # still runs.
    ahead = at.programmatic and values["PREFETCH"] > 0
    return Work(
        bytes=held + logits,
        programs=launch.programs,
        in_flight=(launch.num_stages - 1) * tile,
        memory=0 if ahead else 1,
        # Where a head's rows turn and go is looked up, two loads one after the other, while parts are on their way.
        cache=(ARRIVAL if cut else 3 if values["DIM"] else 1) + ahead,
        alone=part,
        flops=2 * rows * weight.shape[0] * channels,
    )


def _dequantise_work(launch: Launch, at: Situation) -> Work:
    values = launch.values
    size = sum(values[name].nbytes for name in (*_FIELDS, "out") if values[name] is not None)
    return Work(bytes=size, programs=launch.programs, in_flight=values["weight"].nbytes / launch.programs, memory=1, cache=1)


@works(_linear_work)
@triton.jit
def _linear(
    x, weight, scales, super_scales, zeros, minimums, super_minimums, group_of, bias, norm_weight, squares, residual, out, sums,
    partial, semaphore, rope, rope_row, pool, table, slot, valid, query_norm, key_norm,
    eps, head_eps, begin, rows, inner, outputs, inputs, columns, super_columns, super_minimum_columns, square_parts,
    x_outer, x_inner, weight_o, to_up, residual_outer, residual_inner,
    queries, groups, table_columns, page_size, pages, rope_rows, row_b, row_t, table_b, slot_b, slot_t, valid_b, valid_t,
    CODE: tl.constexpr, FLOAT8: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr, SUPER_MINIMUM: tl.constexpr,
    DIVIDES: tl.constexpr,
    TILE_M: tl.constexpr, TILE_O: tl.constexpr, TILE_K: tl.constexpr, SPLITS: tl.constexpr, EVEN: tl.constexpr,
    SCAN_M: tl.constexpr, SCAN_K: tl.constexpr, SCANS: tl.constexpr, PARTS: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr,
    PREFETCH: tl.constexpr, LINE: tl.constexpr,
    DIM: tl.constexpr, HEAD_NORM: tl.constexpr, HEAD_OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: ``TILE_O`` outputs (of gate and of up, if gated) of ``TILE_M`` rows, over one of ``SPLITS`` ranges of the inputs.

    Rows are ``begin .. begin + rows`` of ``x``, whose two leading dimensions are flattened; the inner one has size ``inner``. The norm's
    factors come from ``squares [rows, square_parts]``, the parts of each row's sum of squares; without it the program computes the sums
    of ``SCAN_M`` rows itself. ``sums [rows, tiles]`` receives the sums of squares of the result.

    With ``CODE``, ``weight`` has codes, and the arguments after it are what :func:`~._packed.fields_from` takes. Every tile becomes what a
    weight of numbers has there, and so the sums are the same to the bit.

    With ``DIM``, outputs are heads of queries, keys and values of ``DIM`` channels, and a program has channels of one head that rotate with
    each other: ``TILE_O / 2`` of its first half, then theirs of the second. See :func:`_place_heads`. With a norm of heads, the last
    program of a head has all of it.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    PAIR: tl.constexpr = pair(CODE)
    tiles_m = tl.cdiv(rows, TILE_M)
    program = tl.program_id(0)
    tile_m = program % tiles_m
    split = program // tiles_m % SPLITS
    tile = program // (tiles_m * SPLITS)
    steps = tl.cdiv(tl.cdiv(inputs, TILE_K), SPLITS)
    first = split * steps * TILE_K
    end = tl.minimum(first + steps * TILE_K, inputs)

    output = tile * TILE_O + tl.arange(0, TILE_O)
    if DIM > 0:
        PAIRS: tl.constexpr = TILE_O // 2
        OF_HEAD: tl.constexpr = DIM // TILE_O
        inner_output = tl.arange(0, TILE_O)
        output = tile // OF_HEAD * DIM + tile % OF_HEAD * PAIRS + inner_output // PAIRS * (DIM // 2) + inner_output % PAIRS
    # Outputs past the end repeat the last one; they are not stored.
    weight_row = tl.minimum(output, outputs - 1).to(tl.int64)
    weight_at = weight + weight_row[:, None] * weight_o
    channel = tl.arange(0, TILE_K)
    code = tl.arange(0, TILE_K // PAIR)
    if PREFETCH > 0:
        line = first // PAIR + tl.arange(0, PREFETCH) * LINE
        line = tl.minimum(line, inputs // PAIR - 1)
        _prefetch(weight_at + line[None, :])
        if GATED:
            _prefetch(weight_at + to_up + line[None, :])
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    lane = tile_m * TILE_M + tl.arange(0, TILE_M)
    in_rows = lane < rows
    row = begin + lane
    x_at = x + ((row // inner).to(tl.int64) * x_outer + (row % inner).to(tl.int64) * x_inner)[:, None]
    if norm_weight is not None:
        scale = tl.zeros([TILE_M], tl.float32)
        # Loaded one step ahead: the dot waits for the scaled rows, but not for weights of later steps.
        norm_scales = tl.load(norm_weight + first + channel, mask=first + channel < end, other=0.0)

    if CODE != "":
        # One step ahead, too.
        fields = (
            scales, super_scales, zeros, minimums, super_minimums, group_of,
            columns, super_columns, super_minimum_columns, inputs,
        )  # fmt: skip
        entries = fields_from(None, fields, weight_row, first, GROUP, SUPER, SUPER_MINIMUM, TILE_K)
        if GATED:
            up_entries = fields_from(None, fields, weight_row + outputs, first, GROUP, SUPER, SUPER_MINIMUM, TILE_K)

    acc = tl.zeros([TILE_O, TILE_M], tl.float32)
    up = acc
    for start in range(first, end, TILE_K):
        at = weight_at + (start // PAIR + code)[None, :]
        if EVEN:
            rows_of_x = tl.load(x_at + (start + channel)[None, :], mask=in_rows[:, None], other=0.0)
            rows_of_weight = tl.load(at)
        else:
            inside = start + channel < inputs
            rows_of_x = tl.load(x_at + (start + channel)[None, :], mask=in_rows[:, None] & inside[None, :], other=0.0)
            rows_of_weight = tl.load(at, mask=(start // PAIR + code < inputs // PAIR)[None, :], other=0)
        if norm_weight is not None:
            # Inside the loop, so that the first weight tiles are in flight before anything waits for these loads.
            if start == first:
                if SCAN_M > 0:
                    scanned = tile_m * TILE_M + tl.arange(0, SCAN_M)
                    scanned_row = begin + scanned
                    scanned_at = x + (scanned_row // inner).to(tl.int64) * x_outer + (scanned_row % inner).to(tl.int64) * x_inner
                    total = _scanned_totals(scanned_at, scanned < rows, inputs, SCAN_M, SCAN_K, SCANS)
                    # Each row of `own` has one entry, so the sum is exact.
                    own = tl.arange(0, TILE_M)[:, None] == tl.arange(0, SCAN_M)[None, :]
                    scale = tl.sum(tl.where(own, _factor(total, inputs, eps)[None, :], 0.0), 1)
                else:
                    scale = _factor(_row_totals(squares, row, in_rows, square_parts, PARTS), inputs, eps)
            rows_of_x = _normed(rows_of_x, scale[:, None], norm_scales[None, :], OFFSET, dtype)
            following = start + TILE_K + channel
            norm_scales = tl.load(norm_weight + following, mask=following < end, other=0.0)
        narrow = tl.trans(rows_of_x)
        if CODE != "":
            rows_of_weight = dequantised(rows_of_weight, entries, fields, CODE, FLOAT8, GROUP, DIVIDES, dtype)
            if not EVEN:
                rows_of_weight = tl.where((start + channel < inputs)[None, :], rows_of_weight, 0.0)
            entries = fields_from(entries, fields, weight_row, start + TILE_K, GROUP, SUPER, SUPER_MINIMUM, TILE_K)
        acc = tl.dot(rows_of_weight, narrow, acc, input_precision="ieee")
        if GATED:
            at += to_up
            rows_of_weight = tl.load(at) if EVEN else tl.load(at, mask=(start // PAIR + code < inputs // PAIR)[None, :], other=0)
            if CODE != "":
                rows_of_weight = dequantised(rows_of_weight, up_entries, fields, CODE, FLOAT8, GROUP, DIVIDES, dtype)
                if not EVEN:
                    rows_of_weight = tl.where((start + channel < inputs)[None, :], rows_of_weight, 0.0)
                up_entries = fields_from(up_entries, fields, weight_row + outputs, start + TILE_K, GROUP, SUPER, SUPER_MINIMUM, TILE_K)
            up = tl.dot(rows_of_weight, narrow, up, input_precision="ieee")

    if DIM > 0:
        # Before the parts of a split are waited for.
        lane_at, token = (row // inner).to(tl.int64), row % inner
        angle = tl.load(rope_row + lane_at * row_b + token * row_t, mask=in_rows, other=0)
        place = tl.load(slot + lane_at * slot_b + token * slot_t, mask=in_rows, other=0)
        counts = tl.load(valid + lane_at * valid_b + token * valid_t, mask=in_rows, other=0) != 0
        place = tl.minimum(tl.maximum(place, 0), table_columns * page_size - 1)
        page = tl.load(table + lane_at * table_b + place // page_size, mask=in_rows, other=0).to(tl.int64)
        cell = tl.where(counts, page, 0) * page_size + place % page_size
        channel_of_pair = tl.arange(0, DIM // 2) if HEAD_NORM else tile % OF_HEAD * PAIRS + tl.arange(0, PAIRS)
        turn_at = rope + (tl.minimum(tl.maximum(angle, 0), rope_rows - 1) * DIM)[None, :] + channel_of_pair[:, None]
        cos = tl.load(turn_at, mask=in_rows[None, :], other=0.0).to(dtype).to(tl.float32)
        sin = tl.load(turn_at + DIM // 2, mask=in_rows[None, :], other=0.0).to(dtype).to(tl.float32)
        places = (cos, sin, cell, out, pool, queries, groups, pages * page_size)
        norms = (query_norm, key_norm, head_eps)
        head = tile // OF_HEAD
    residual_at = None
    if residual is not None:
        residual_row = (row // inner).to(tl.int64) * residual_outer + (row % inner).to(tl.int64) * residual_inner
        residual_at = residual + residual_row[None, :] + output[:, None]
    sums_at = None
    if sums is not None:
        sums_at = sums + row.to(tl.int64) * tl.cdiv(outputs, TILE_O) + tile
    JOINED: tl.constexpr = DIM // TILE_O if HEAD_NORM else 1
    if SPLITS * JOINED == 1:
        if DIM > 0:
            low, high = _halves(acc, PAIRS, TILE_M)
            _place_heads(low, high, head, channel_of_pair, row, in_rows, bias, places, norms, DIM, HEAD_NORM, HEAD_OFFSET, dtype)
        else:
            _finish(acc, up, output, row, in_rows, bias, residual_at, out, outputs, sums_at, GATED, dtype, TILE_O, TILE_M)
    else:
        keep = (output < outputs)[:, None] & in_rows[None, :]
        halves: tl.constexpr = 2 if GATED else 1
        lane_part = partial + lane.to(tl.int64)[None, :] * (halves * outputs)
        part_at = lane_part + output[:, None]
        stride = rows * halves * outputs
        own_part_at = part_at + split.to(tl.int64) * stride
        tl.store(own_part_at, acc, mask=keep)
        if GATED:
            tl.store(own_part_at + outputs, up, mask=keep)
        if arrive(semaphore + tile // JOINED * tiles_m + tile_m, SPLITS * JOINED):
            if HEAD_NORM:
                low_at = lane_part + (head * DIM + channel_of_pair)[:, None]
                low = _sum_of_parts(low_at, stride, in_rows[None, :], SPLITS)
                high = _sum_of_parts(low_at + DIM // 2, stride, in_rows[None, :], SPLITS)
                _place_heads(low, high, head, channel_of_pair, row, in_rows, bias, places, norms, DIM, HEAD_NORM, HEAD_OFFSET, dtype)
            else:
                acc = _sum_of_parts(part_at, stride, keep, SPLITS)
                if GATED:
                    up = _sum_of_parts(part_at + outputs, stride, keep, SPLITS)
                if DIM > 0:
                    low, high = _halves(acc, PAIRS, TILE_M)
                    _place_heads(low, high, head, channel_of_pair, row, in_rows, bias, places, norms, DIM, HEAD_NORM, HEAD_OFFSET, dtype)
                else:
                    _finish(acc, up, output, row, in_rows, bias, residual_at, out, outputs, sums_at, GATED, dtype, TILE_O, TILE_M)


@works(_dequantise_work)
@triton.jit
def _dequantise(
    weight, scales, super_scales, zeros, minimums, super_minimums, group_of, out,
    outputs, inputs, columns, super_columns, super_minimum_columns, weight_o,
    CODE: tl.constexpr, FLOAT8: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr, SUPER_MINIMUM: tl.constexpr,
    DIVIDES: tl.constexpr, TILE_O: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Program (columns, rows): a tile of codes as numbers."""
    PAIR: tl.constexpr = pair(CODE)
    start = tl.program_id(0) * TILE_K
    output = tl.program_id(1) * TILE_O + tl.arange(0, TILE_O)
    row = tl.minimum(output, outputs - 1).to(tl.int64)
    code = start // PAIR + tl.arange(0, TILE_K // PAIR)
    fields = (
        scales, super_scales, zeros, minimums, super_minimums, group_of,
        columns, super_columns, super_minimum_columns, inputs,
    )  # fmt: skip
    codes = tl.load(weight + row[:, None] * weight_o + code[None, :], mask=(code < inputs // PAIR)[None, :], other=0)
    entries = fields_from(None, fields, row, start, GROUP, SUPER, SUPER_MINIMUM, TILE_K)
    values = dequantised(codes, entries, fields, CODE, FLOAT8, GROUP, DIVIDES, out.dtype.element_ty)
    channel = start + tl.arange(0, TILE_K)
    keep = (output < outputs)[:, None] & (channel < inputs)[None, :]
    tl.store(out + row[:, None] * inputs + channel[None, :], values, mask=keep)

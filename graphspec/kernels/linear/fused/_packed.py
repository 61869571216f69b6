"""Tiles of weights of low precision in a kernel: :func:`graphspec.kernels.linear.packed.dequantise`, rounding by rounding.

Every code becomes its number by shifts and an exact operation, without a branch or a table. Codes of 4 bits are loaded as they are stored,
a pair in a byte, and spread along the channels in registers. Tensors of 8-bit floats are passed as bytes.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ...fused.launch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)
NO = tl.constexpr(0x80008000 - (1 << 32))
"""A pair of -0.0, the number of 16 bits that changes no sum."""


@triton.constexpr_function
def run_length(every, tile):
    """Channels that share an entry of a field wherever a tile begins: a power of two. ``every`` 0: a row has one entry."""
    return math.gcd(every, tile)


@triton.constexpr_function
def pair(code):
    """Codes in a byte."""
    return 2 if code in ("int4", "uint4", "e2m1") else 1


@triton.jit
def _whole(codes, FLIPPED: tl.constexpr):
    """float32 of the lowest 8 bits, less ``FLIPPED``, a bit that is inverted first: as the mantissa of 2^23, and less that.

    An instruction that converts integers takes several times as long.
    """
    return ((codes & 255) ^ (0x4B000000 | FLIPPED)).to(tl.float32, bitcast=True) - (8388608.0 + FLIPPED)


@triton.constexpr_function
def both(value, dtype):
    """int32 whose halves are this number of ``dtype``, a power of two or a sum of a few."""
    mantissa, bias = (7, 127) if dtype == tl.bfloat16 else (10, 15)
    fraction, exponent = math.frexp(abs(value))
    bits = ((value < 0) << 15) | ((exponent - 1 + bias) << mantissa) | int((2 * fraction - 1) * (1 << mantissa))
    word = bits | (bits << 16)
    return word - (1 << 32) if word >> 31 else word


@triton.jit
def _single(bits, dtype: tl.constexpr):
    """float64 of the number of 16 bits in the lower half of each int32, for the interpreter: subnormals may be flushed in float32."""
    if dtype == tl.bfloat16:
        exponent, mantissa = (bits >> 7) & 255, (bits & 127).to(tl.float64)
        size = tl.where(exponent == 0, mantissa * 2.0**-133, ((bits & 0x7FFF) << 16).to(tl.float32, bitcast=True).to(tl.float64))
        return tl.where((bits & 0x8000) == 0, size, -size)
    return (bits & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float64)


@triton.jit
def _multiply_add(a, b, c, dtype: tl.constexpr):
    """``a * b + c`` of pairs of numbers of 16 bits, each rounded once; either operation has to be exact in float32."""
    if _INTERPRETED:
        low = _single(a, dtype) * _single(b, dtype) + _single(c, dtype)
        high = _single(a >> 16, dtype) * _single(b >> 16, dtype) + _single(c >> 16, dtype)
        low = low.to(tl.float32).to(dtype).to(tl.uint16, bitcast=True)
        high = high.to(tl.float32).to(dtype).to(tl.uint16, bitcast=True)
        result = low.to(tl.int32) | (high.to(tl.int32) << 16)
    elif dtype == tl.bfloat16:
        result = tl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1)
    else:
        result = tl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1)
    return result


@triton.jit
def _e2m1_pairs(bytes32, dtype: tl.constexpr):
    """Both floats of a byte as a pair of ``dtype``.

    Sign, exponent and mantissa go where ``dtype`` has them; a subnormal is one there, too. A power of two makes up for the bias.
    """
    if dtype == tl.bfloat16:
        bits = ((bytes32 * 0x01001000) & (0x80008000 - (1 << 32))) | ((bytes32 * 0x00040040) & 0x01C001C0)
        result = _multiply_add(bits, tl.full(bits.shape, both(2.0**126, dtype), tl.int32), tl.full(bits.shape, NO, tl.int32), dtype)
    else:
        bits = ((bytes32 * 0x01001000) & (0x80008000 - (1 << 32))) | ((bytes32 * 0x00200200) & 0x0E000E00)
        result = _multiply_add(bits, tl.full(bits.shape, both(2.0**14, dtype), tl.int32), tl.full(bits.shape, NO, tl.int32), dtype)
    return result


@triton.jit
def numbers(codes, CODE: tl.constexpr):
    """float32 of a tile of codes; of pairs, twice as many along the last dimension."""
    if CODE == "e4m3":
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif pair(CODE) == 1:
        values = _whole(codes.to(tl.int32), 128 if CODE == "int8" else 0)
    elif CODE == "e2m1":
        pairs = _e2m1_pairs(codes.to(tl.int32), tl.bfloat16)
        low, high = (pairs << 16).to(tl.float32, bitcast=True), (pairs & (0xFFFF0000 - (1 << 32))).to(tl.float32, bitcast=True)
        values = tl.reshape(tl.join(low, high), [codes.shape[0], 2 * codes.shape[1]])
    else:
        wide = codes.to(tl.int32)
        nibbles = tl.reshape(tl.join(wide & 15, wide >> 4), [codes.shape[0], 2 * codes.shape[1]])
        # int4 is stored plus 8.
        values = (nibbles | 0x4B000000).to(tl.float32, bitcast=True) - (8388616.0 if CODE == "int4" else 8388608.0)
    return values


@triton.jit
def _factor(entries, FLOAT8: tl.constexpr):
    """float32 of entries of a field."""
    if FLOAT8 == "e8m0":
        # 255 is NaN, and 0 a subnormal.
        bits = entries.to(tl.int32)
        bits = tl.where(bits == 255, 0x7FC00000, tl.where(bits == 0, 0x00400000, bits << 23))
        values = bits.to(tl.float32, bitcast=True)
    elif FLOAT8 == "e4m3":
        values = entries.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        values = entries.to(tl.float32)
    return values


@triton.jit
def _spread(values, COLUMNS: tl.constexpr):
    """Repeats each column of ``values`` up to ``COLUMNS`` in total."""
    RUN: tl.constexpr = COLUMNS // values.shape[1]
    if RUN > 1:
        values = tl.reshape(tl.broadcast_to(values[:, :, None], [values.shape[0], values.shape[1], RUN]), [values.shape[0], COLUMNS])
    return values


@triton.jit
def _entries(field, columns, group_of, inputs, row, start, GROUP: tl.constexpr, PER: tl.constexpr, TILE_K: tl.constexpr):
    """Entries ``[rows, n]`` of a field for ``TILE_K`` channels from ``start``, each of as many channels; past the last one, 0."""
    if GROUP == 0 or PER == 0:
        column = tl.zeros([1], tl.int32)
    elif group_of is None:
        RUN: tl.constexpr = run_length(GROUP * PER, TILE_K)
        column = (start + tl.arange(0, TILE_K // RUN) * RUN) // (GROUP * PER)
    else:
        channel = start + tl.arange(0, TILE_K)
        column = tl.load(group_of + channel, mask=channel < inputs, other=0) // PER
    return tl.load(field + row[:, None] * columns + column[None, :], mask=(column < columns)[None, :], other=0)


@triton.jit
def fields_from(
    held, fields, row, start, GROUP: tl.constexpr, SUPER: tl.constexpr, SUPER_MINIMUM: tl.constexpr, TILE_K: tl.constexpr
):  # fmt: skip
    """What :func:`dequantised` needs of the fields for the tile from ``start``: their entries as loaded; 0 for a field that is None.

    Args:
        held: the result for another tile of the row, whose entries are kept where a row has one; None: there is none yet.
        fields: scales, super scales, zeros, minimums, super minimums and group_of of :class:`~graphspec.kernels.linear.packed.Packed`;
            columns of scales, super scales and super minimums; number of channels.
        row: int64, of the fields.
        start: channel.
        GROUP: channels of a scale; 0: all.
        SUPER, SUPER_MINIMUM: scales, or minimums, of a super one; 0: all.
        TILE_K: channels of the tile.
    """
    scales, super_scales, zeros, minimums, super_minimums, group_of, columns, super_columns, super_minimum_columns, inputs = fields
    if held is None:
        scale = _entries(scales, columns, group_of, inputs, row, start, GROUP, 1, TILE_K)
        zero = 0 if zeros is None else _entries(zeros, columns, group_of, inputs, row, start, GROUP, 1, TILE_K)
        minimum = 0 if minimums is None else _entries(minimums, columns, group_of, inputs, row, start, GROUP, 1, TILE_K)
        super_scale, super_minimum = 0, 0
        if super_scales is not None:
            super_scale = _entries(super_scales, super_columns, group_of, inputs, row, start, GROUP, SUPER, TILE_K)
        if super_minimums is not None:
            super_minimum = _entries(super_minimums, super_minimum_columns, group_of, inputs, row, start, GROUP, SUPER_MINIMUM, TILE_K)
    else:
        scale, super_scale, zero, minimum, super_minimum = held
        if GROUP > 0:
            scale = _entries(scales, columns, group_of, inputs, row, start, GROUP, 1, TILE_K)
            if zeros is not None:
                zero = _entries(zeros, columns, group_of, inputs, row, start, GROUP, 1, TILE_K)
            if minimums is not None:
                minimum = _entries(minimums, columns, group_of, inputs, row, start, GROUP, 1, TILE_K)
            if super_scales is not None and SUPER > 0:
                super_scale = _entries(super_scales, super_columns, group_of, inputs, row, start, GROUP, SUPER, TILE_K)
            if super_minimums is not None and SUPER_MINIMUM > 0:
                super_minimum = _entries(super_minimums, super_minimum_columns, group_of, inputs, row, start, GROUP, SUPER_MINIMUM, TILE_K)
    return scale, super_scale, zero, minimum, super_minimum


@triton.constexpr_function
def exact_in(dtype, code, float8, scale_type, zero_bits, others, group):
    """Whether 16 bits suffice for :func:`dequantised`: its only operation that rounds is the last product, and both factors are exact.

    So it may round to ``dtype`` at once.

    Args:
        dtype: of the result.
        code, float8, group: as there.
        scale_type: of a scale in memory.
        zero_bits: of a zero; 0: there are none.
        others: there are super scales or minimums.
    """
    if pair(code) == 1 or others or zero_bits > 8 or group % 2:
        return False
    if dtype == tl.bfloat16:
        return scale_type in (tl.bfloat16, tl.uint8, tl.int8)
    return dtype == tl.float16 and (scale_type == tl.float16 or (scale_type in (tl.uint8, tl.int8) and float8 != "e8m0"))


@triton.jit
def _twice(numbers16):
    """int32 of 16 bits, in both halves."""
    bits = numbers16.to(tl.uint16, bitcast=True).to(tl.int32)
    return bits | (bits << 16)


@triton.jit
def _products(codes, scale, zero, CODE: tl.constexpr, FLOAT8: tl.constexpr, ZEROS: tl.constexpr, dtype: tl.constexpr):
    """:func:`dequantised` where :func:`exact_in` holds, two numbers at a time."""
    wide = codes.to(tl.int32)
    one, nothing = tl.full(wide.shape, both(1.0, dtype), tl.int32), tl.full(wide.shape, NO, tl.int32)
    if CODE == "e2m1":
        pairs = _e2m1_pairs(wide, dtype)
    else:
        # As the mantissa of a power of two, and less that. The lower code stays, the upper one goes to the upper half.
        BASE: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
        pairs = ((wide * 0x1001) & 0x000F000F) | both(BASE, dtype)
        pairs = _multiply_add(pairs, one, tl.full(wide.shape, both(-BASE - (8.0 if CODE == "int4" else 0.0), dtype), tl.int32), dtype)
    if ZEROS:
        pairs = _multiply_add(pairs, one, _spread(_twice((-zero.to(tl.float32)).to(dtype)), pairs.shape[1]), dtype)
    pairs = _multiply_add(pairs, _spread(_twice(_factor(scale, FLOAT8).to(dtype)), pairs.shape[1]), nothing, dtype)
    low = (pairs & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    high = ((pairs >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    return tl.reshape(tl.join(low, high), [codes.shape[0], 2 * codes.shape[1]])


@triton.jit
def dequantised(
    codes, entries, fields, CODE: tl.constexpr, FLOAT8: tl.constexpr, GROUP: tl.constexpr, DIVIDES: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """A tile of codes as numbers of ``dtype``.

    Args:
        codes: ``[rows, channels / codes in a byte]``.
        entries: of ``fields``, by :func:`fields_from`.
        fields: as there.
        CODE: a key of :data:`~graphspec.kernels.linear.packed.CODES`.
        FLOAT8: what the bytes of scales are, ``e4m3`` or ``e8m0``; empty: they are numbers.
        GROUP: channels of a scale; 0: all.
        DIVIDES: scales are divided by the super scales.
        dtype: of the result.
    """
    scale, super_scale, zero, minimum, super_minimum = entries
    ZEROS: tl.constexpr = fields[2] is not None
    ZERO_BITS: tl.constexpr = zero.dtype.primitive_bitwidth if ZEROS else 0
    OTHERS: tl.constexpr = fields[1] is not None or fields[3] is not None
    if exact_in(dtype, CODE, FLOAT8, scale.dtype, ZERO_BITS, OTHERS, 1 if fields[5] is not None else GROUP):
        result = _products(codes, scale, zero, CODE, FLOAT8, ZEROS, dtype)
    else:
        values = numbers(codes, CODE)
        if ZEROS:
            values = values - _spread(zero.to(tl.float32), values.shape[1])
        factor = _factor(scale, FLOAT8)
        if fields[1] is not None:
            super_factor = _spread(super_scale.to(tl.float32), factor.shape[1])
            factor = tl.div_rn(factor, super_factor) if DIVIDES else factor * super_factor
        values = values * _spread(factor, values.shape[1])
        if fields[3] is not None:
            minimum = minimum.to(tl.float32)
            if fields[4] is not None:
                minimum = minimum * _spread(super_minimum.to(tl.float32), minimum.shape[1])
            values = values + _spread(minimum, values.shape[1])
        result = values.to(dtype)
    return result

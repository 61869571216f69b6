"""Tiles of weights of low precision in a kernel: :func:`graphspec.kernels.packed.dequantise`, element by element and rounding by rounding.

Every code becomes its number in float32 by shifts and one exact operation, without a branch or a table; tensors of 8-bit floats are passed
as bytes. Codes of 4 bits are loaded as they are stored, a pair in a byte, and spread along the channels in registers.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl


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


@triton.jit
def numbers(codes, CODE: tl.constexpr):
    """float32 of a tile of codes; of pairs, twice as many along the last dimension."""
    if CODE == "e4m3":
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif pair(CODE) == 1:
        values = _whole(codes.to(tl.int32), 128 if CODE == "int8" else 0)
    else:
        wide = codes.to(tl.int32)
        nibbles = tl.reshape(tl.join(wide & 15, wide >> 4), [codes.shape[0], 2 * codes.shape[1]])
        if CODE == "e2m1":
            # Sign, exponent and mantissa where float32 has them; subnormals are subnormal there, too. The biases differ by 126.
            values = (((nibbles & 8) << 28) | ((nibbles & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37
        elif CODE == "int4":
            # Stored plus 8.
            values = (nibbles | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
        else:
            values = _whole(nibbles, 0)
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
    """As many columns, each of ``values`` repeated."""
    RUN: tl.constexpr = COLUMNS // values.shape[1]
    if RUN == 1:
        return values
    else:
        repeated = tl.broadcast_to(values[:, :, None], [values.shape[0], values.shape[1], RUN])
        return tl.reshape(repeated, [values.shape[0], COLUMNS])


@triton.jit
def _entries(field, row, start, columns, EVERY: tl.constexpr, TILE_K: tl.constexpr):
    """Entries ``[rows, n]`` of a field for ``TILE_K`` channels from ``start``: one per :func:`run_length`; past the last one, 0."""
    RUN: tl.constexpr = run_length(EVERY, TILE_K)
    first = tl.arange(0, TILE_K // RUN) * RUN
    column = first if EVERY == 0 else (start + first) // EVERY
    return tl.load(field + row[:, None] * columns + column[None, :], mask=(column < columns)[None, :], other=0)


@triton.jit
def fields_from(
    held, scales, super_scales, zeros, minimums, super_minimums, row, start, columns, super_columns, super_minimum_columns,
    GROUP: tl.constexpr, SUPER: tl.constexpr, SUPER_MINIMUM: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """What :func:`dequantised` needs of the fields for the tile from ``start``, as loaded.

    Args:
        held: the result for another tile of the row, whose entries are kept where a row has one; None: there is none yet.
        scales, super_scales, zeros, minimums, super_minimums: as :class:`~graphspec.kernels.packed.Packed` has them, or None.
        row: int64, of the fields.
        start: channel.
        columns, super_columns, super_minimum_columns: of the fields.
        GROUP, SUPER, SUPER_MINIMUM: channels of an entry. 0: all.
        TILE_K: channels of the tile.
    """
    scale, super_scale, zero, minimum, super_minimum = (None, None, None, None, None) if held is None else held
    if held is None or GROUP > 0:
        scale = _entries(scales, row, start, columns, GROUP, TILE_K)
        if zeros is not None:
            zero = _entries(zeros, row, start, columns, GROUP, TILE_K)
        if minimums is not None:
            minimum = _entries(minimums, row, start, columns, GROUP, TILE_K)
    if super_scales is not None and (held is None or SUPER > 0):
        super_scale = _entries(super_scales, row, start, super_columns, SUPER, TILE_K)
    if super_minimums is not None and (held is None or SUPER_MINIMUM > 0):
        super_minimum = _entries(super_minimums, row, start, super_minimum_columns, SUPER_MINIMUM, TILE_K)
    return scale, super_scale, zero, minimum, super_minimum


@triton.jit
def dequantised(codes, fields, CODE: tl.constexpr, FLOAT8: tl.constexpr, dtype: tl.constexpr):
    """A tile of codes as numbers of ``dtype``.

    Args:
        codes: ``[rows, channels / codes in a byte]``.
        fields: of :func:`fields_from`.
        CODE: a key of :data:`~graphspec.kernels.packed.CODES`.
        FLOAT8: what the bytes of scales are, ``e4m3`` or ``e8m0``; empty: they are numbers.
        dtype: of the result.
    """
    scale, super_scale, zero, minimum, super_minimum = fields
    values = numbers(codes, CODE)
    if zero is not None:
        values = values - _spread(zero.to(tl.float32), values.shape[1])
    factor = _factor(scale, FLOAT8)
    if super_scale is not None:
        factor = factor * _spread(super_scale.to(tl.float32), factor.shape[1])
    values = values * _spread(factor, values.shape[1])
    if minimum is not None:
        least = minimum.to(tl.float32)
        if super_minimum is not None:
            least = least * _spread(super_minimum.to(tl.float32), least.shape[1])
        values = values + _spread(least, values.shape[1])
    return values.to(dtype)

"""Weights as the products in ``product.h`` read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import ConfigError
from ..linear.packed import Packed, check_packed, effective_minimums, effective_scales
from .call import require

BLOCK = 32
"""Outputs whose weights of a channel lie side by side."""
CODE = {
    "segments": 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3,
    "int4": 4, "uint4": 5, "e2m1": 6, "int8": 7, "uint8": 8, "e4m3": 9,
}  # fmt: skip
"""``Code`` in C++."""
NONE, ZERO, MINIMUM, MINIMUM_APART = range(4)
"""``Offset`` in C++."""
ALIGNMENT = 64
"""Alignment of tensors that C++ streams, in bytes."""
E4M3_FACTOR = 256.0
"""By which C++ reads codes of this kind too small."""


def _blocks(rows: Tensor) -> Tensor:
    """``[ceil(N / 32), 32, ...]``, padded with zeros."""
    padding = (0, 0) * (rows.dim() - 1) + (0, -rows.shape[0] % BLOCK)
    return torch.nn.functional.pad(rows, padding).unflatten(0, (-1, BLOCK))


def _narrowest(*tensors: Tensor, stored: torch.dtype | None = None) -> torch.dtype:
    """The 16-bit dtype that has every value, else float32; on ``meta``, where there are no values, ``stored``."""
    if tensors[0].is_meta:
        return stored or torch.float32
    for narrow in (torch.bfloat16, torch.float16):
        # Compared as bits: as numbers, flushed denormals would all be equal.
        if all(torch.equal(x.to(narrow).float().view(torch.int32), x.view(torch.int32)) for x in tensors):
            return narrow
    return torch.float32


def pack_linear(weight: Tensor, stored: torch.dtype | None = None) -> Tensor:
    """``[ceil(out / 32), in, 32]`` from a float32 weight ``[out, in]``; the last block is padded with zeros.

    Where every value is a bfloat16, or every value a float16, the result is of that dtype: half the bytes, the same products to the bit. In
    bfloat16 the outputs of each half of a block take turns.

    Args:
        weight: float32 ``[out, in]``.
        stored: for weights on the device ``meta``, which have no values: the 16-bit dtype of the checkpoint, None: a wider one.

    Raises:
        ConfigError: another dtype.
    """
    require("weight", weight, torch.float32)
    weight = weight.detach()
    blocks = _blocks(weight.to(_narrowest(weight, stored=stored))).transpose(1, 2)
    if blocks.dtype is torch.bfloat16:
        blocks = blocks.unflatten(2, (2, BLOCK // 2)).transpose(2, 3).flatten(2)
    return blocks.contiguous()


def _codes(weight: Packed) -> Tensor:
    """uint8 ``[blocks, K, bytes]``: the 32 codes of each channel. Those of 4 bits share bytes with those of the block's other half."""
    if weight.bits == 8:
        return _blocks(weight.codes.view(torch.uint8)).transpose(1, 2)
    codes = _blocks(torch.stack((weight.codes & 15, weight.codes >> 4), -1).flatten(1))
    low, high = codes.unflatten(1, (2, BLOCK // 2)).unbind(1)
    return (low | high << 4).transpose(1, 2)


def _segment(weight: Packed) -> tuple[Tensor, list[int]]:
    """The data of a segment, and its description without the place."""
    check_packed(weight, "native products: weight")
    outputs, channels = weight.shape
    scales, minimums = effective_scales(weight), effective_minimums(weight)
    zeros, group = None if weight.zeros is None else weight.zeros.float(), weight.group
    if weight.code == "e4m3":
        if not weight.codes.is_meta and bool((weight.codes.view(torch.uint8) & 127 == 127).any()):
            raise ConfigError("native products: weight", "codes that are numbers", "NaN")
        scales, zeros = scales * E4M3_FACTOR, None if zeros is None else zeros / E4M3_FACTOR
    offsets, kind = (zeros, ZERO) if zeros is not None else (minimums, NONE if minimums is None else MINIMUM)
    tables = [scales] if offsets is None else [scales, offsets]
    stored = weight.scales.dtype if weight.super_scales is None and weight.scales.element_size() == 2 else None
    dtype = _narrowest(*tables, stored=stored)
    # A code times a scale is exact if their significant bits fit into float32's.
    if kind == MINIMUM and not scales.is_meta and bool((scales.view(torch.int32) & ((1 << weight.bits) - 1)).any()):
        kind = MINIMUM_APART
    if weight.group_of is not None:
        # Groups that are no runs of channels: a scale for each channel.
        tables, group = [table[:, weight.group_of] for table in tables], 1
    table = torch.cat([_blocks(each.to(dtype)).transpose(1, 2).contiguous().view(torch.uint8) for each in tables], -1)
    codes, whole = _codes(weight), channels // group
    body = torch.cat((table[:, :whole], codes[:, : whole * group].unflatten(1, (whole, group)).flatten(2)), -1).flatten(1)
    rest = (table[:, whole:].flatten(1), codes[:, whole * group :].flatten(1))
    return torch.cat((body, *rest), -1), [CODE[weight.code], CODE[dtype], kind, group, outputs]


def _dense_segment(weight: Tensor, stored: torch.dtype | None) -> tuple[Tensor, list[int]]:
    packed = pack_linear(weight, stored)
    return packed.view(torch.uint8), [CODE[packed.dtype], CODE[packed.dtype], NONE, weight.shape[1], weight.shape[0]]


def pack_segments(segments: Sequence[Packed | Tensor], stored: torch.dtype | None = None) -> Tensor:
    """uint8, one-dimensional: a weight whose output rows are stored in these formats, top to bottom, as it describes itself.

    Each group of channels has its scales next to its codes, so a product reads one stream.

    Args:
        segments: codes, or float32 ``[out, in]``.
        stored: as of :func:`pack_linear`.

    Raises:
        ConfigError: a tensor of another dtype or shape, NaN among codes of 8-bit floats, or rows of different length.
    """
    lengths = {segment.shape[1] for segment in segments}
    if len(lengths) != 1:
        raise ConfigError("native products: weight", "rows of one length", sorted(lengths))
    made = [_segment(segment) if isinstance(segment, Packed) else _dense_segment(segment, stored) for segment in segments]
    words = [len(made), *lengths]
    size = _aligned(8 * (len(words) + 6 * len(made)))
    for data, description in made:
        words += [size, *description]
        size += _aligned(data.numel())
    parts = [torch.tensor(words, dtype=torch.int64, device=made[0][0].device).view(torch.uint8), *(data.flatten() for data, _ in made)]
    return torch.cat([torch.nn.functional.pad(part, (0, -part.numel() % ALIGNMENT)) for part in parts])


def pack_codes(weight: Packed) -> Tensor:
    """:func:`pack_segments` of one segment: the products are those of the float32 weight that it stands for, bit for bit."""
    return pack_segments([weight])


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT


def channels_of(packed: Tensor) -> int:
    """Channels of a packed weight of either form."""
    return packed.shape[1] if packed.dim() == 3 else int(packed[8:16].view(torch.int64))


def outputs_of(packed: Tensor) -> int:
    """Output rows of a weight of :func:`pack_segments`."""
    words = packed[: len(packed) // 8 * 8].view(torch.int64)
    return int(words[7 : 2 + 6 * int(words[0]) : 6].sum())


def code_of(packed: Tensor) -> int:
    """``Code`` of a packed weight of either form."""
    return CODE[packed.dtype if packed.dim() == 3 else "segments"]

"""Weights of low precision: codes of 4 or 8 bits with scales per group of channels, and the numbers they stand for.

Published formats differ in file layout, not in arithmetic. Each is read into this one form, so a kernel implements the arithmetic once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import ConfigError

CODES = {
    "int4": torch.uint8, "uint4": torch.uint8, "e2m1": torch.uint8,
    "int8": torch.int8, "uint8": torch.uint8, "e4m3": torch.float8_e4m3fn,
}  # fmt: skip
"""The kinds of codes, and the dtype they are stored in. Those of 4 bits are stored in pairs: the lower half of a byte is the even channel.
``int4`` is stored plus 8. ``e2m1`` and ``e4m3`` are floats, named after their bits of exponent and mantissa (OCP Microscaling Formats,
section 5.3); the magnitudes of ``e2m1`` are 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""


def code_bits(code: str) -> int:
    """Bits of a code of this kind."""
    return 4 if code in ("int4", "uint4", "e2m1") else 8


class Packed(NamedTuple):
    """A weight ``[N, K]`` as codes. :func:`dequantise` specifies its values."""

    codes: Tensor
    """``[N, K]``, or ``[N, K / 2]`` bytes for codes of 4 bits; dtype by :data:`CODES`."""
    scales: Tensor
    """``[N, ceil(K / group)]``, any dtype that converts to float32 exactly: float32, float16, bfloat16, integers, e4m3, e8m0."""
    code: str
    """A key of :data:`CODES`."""
    group: int
    """Channels that share a scale."""
    super_scales: Tensor | None = None
    """``[N, S]``, S a divisor of the number of groups: factors of the scales, each of as many consecutive ones."""
    zeros: Tensor | None = None
    """Shape of ``scales``, integers: subtracted from the codes."""
    minimums: Tensor | None = None
    """Shape of ``scales``: added to the scaled codes. Not together with ``zeros``."""
    super_minimums: Tensor | None = None
    """``[N, S]``: factors of the minimums."""
    group_of: Tensor | None = None
    """int32 ``[K]``: the group of each channel, where groups are no runs of channels (GPTQ's ``desc_act``); None: they are."""
    divides: bool = False
    """Scales are divided by the super scales (compressed-tensors' NVFP4) in place of multiplied: their reciprocals have other bits."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return code_bits(self.code)

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        return self.codes.shape[0], self.codes.shape[1] * (8 // self.bits)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by field; fields that are None are left out."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Packed:
        """The same format with other tensors, by field."""
        return Packed(**{**self._asdict(), **tensors})

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def as_bytes(tensor: Tensor) -> Tensor:
    """8-bit floats and integers as bytes, which every op takes; others as they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def take_rows(weight: Packed, row: Tensor) -> Packed:
    """These output rows of a weight.

    Args:
        weight: ``[N, K]``.
        row: int64 ``[M]``.
    """
    by_row = {name: tensor for name, tensor in weight.tensors.items() if name != "group_of"}
    return weight.with_tensors({name: as_bytes(tensor)[row].view(tensor.dtype) for name, tensor in by_row.items()})


def check_packed(weight: Packed, key: str) -> None:
    """Check that the fields fit together.

    Args:
        weight: to check.
        key: what it is, for the message.

    Raises:
        ConfigError: an unknown code, or a tensor of another dtype or shape than the codes demand.
    """
    if weight.code not in CODES:
        raise ConfigError(key, "codes of " + ", ".join(CODES), weight.code)
    if weight.codes.dim() != 2 or weight.codes.dtype != CODES[weight.code]:
        expected = f"two-dimensional codes of {CODES[weight.code]}"
        raise ConfigError(key, expected, f"{weight.codes.dtype} of shape {list(weight.codes.shape)}")
    if weight.zeros is not None and weight.minimums is not None:
        raise ConfigError(key, "zeros or minimums", "both")
    rows, channels = weight.shape
    groups = -(-channels // weight.group)
    if weight.group_of is not None and tuple(weight.group_of.shape) != (channels,):
        raise ConfigError(f"{key}: group_of", f"shape {[channels]}", f"shape {list(weight.group_of.shape)}")
    for name in ("scales", "zeros", "minimums"):
        tensor = getattr(weight, name)
        if tensor is not None and tuple(tensor.shape) != (rows, groups):
            raise ConfigError(f"{key}: {name}", f"shape {[rows, groups]}", f"shape {list(tensor.shape)}")
    for name in ("super_scales", "super_minimums"):
        tensor = getattr(weight, name)
        if tensor is not None and (tensor.dim() != 2 or tensor.shape[0] != rows or groups % tensor.shape[1]):
            raise ConfigError(f"{key}: {name}", f"shape [{rows}, a divisor of {groups}]", f"shape {list(tensor.shape)}")


def code_values(weight: Packed) -> Tensor:
    """The numbers of the codes alone, exact in float32 ``[N, K]``."""
    if weight.bits == 8:
        return weight.codes.float()
    nibbles = torch.stack((weight.codes & 15, weight.codes >> 4), -1).flatten(1)
    if weight.code == "e2m1":
        mantissa, exponent = (nibbles & 1).float(), (nibbles >> 1) & 3
        scale = torch.bitwise_left_shift(torch.ones_like(exponent), exponent).float() / 4
        magnitude = torch.where(exponent > 0, (2 + mantissa) * scale, mantissa / 2)
        return torch.where(nibbles > 7, -magnitude, magnitude)
    return nibbles.float() - (8.0 if weight.code == "int4" else 0.0)


@torch.library.custom_op("graphspec::powers_of_two", mutates_args=())
def _powers_of_two(exponent: Tensor) -> Tensor:
    """float32 of e8m0 numbers. An op of its own, since Inductor's C++ has no type for them (torch 2.11 to 2.13)."""
    return exponent.float()


@_powers_of_two.register_fake
def _(exponent: Tensor) -> Tensor:
    return torch.empty_like(exponent, dtype=torch.float32)


def _as_float32(values: Tensor) -> Tensor:
    return _powers_of_two(values) if values.dtype == torch.float8_e8m0fnu else values.float()


def _scaled(values: Tensor, factors: Tensor | None, divides: bool = False) -> Tensor:
    """float32 of ``values``, each times its factor or divided by it."""
    numbers = _as_float32(values)
    if factors is None:
        return numbers
    factors = factors.float().repeat_interleave(values.shape[1] // factors.shape[1], 1)
    return numbers / factors if divides else numbers * factors


def effective_scales(weight: Packed) -> Tensor:
    """float32 ``[N, groups]``: what the codes of a group are multiplied by."""
    return _scaled(weight.scales, weight.super_scales, weight.divides)


def effective_minimums(weight: Packed) -> Tensor | None:
    """float32 ``[N, groups]``: what is added to the scaled codes of a group; None: nothing."""
    return None if weight.minimums is None else _scaled(weight.minimums, weight.super_minimums)


def dequantise(weight: Packed, dtype: torch.dtype) -> Tensor:
    """The weight as a tensor ``[N, K]`` of ``dtype``, elementwise. This is the specification of every format.

    ``(code - zero) * (scale * super_scale) + minimum * super_minimum``, each op rounded to float32 in this order, then to ``dtype``. In the
    formats that have minimums the product is exact, so a fused multiply-add gives the same bits.
    """
    values = code_values(weight)
    channels = values.shape[1]

    group_of = weight.group_of
    if group_of is None:
        # Indices: of repeated entries, cut off where the last group is not full, Inductor's C++ reads beyond the end.
        group_of = torch.arange(channels, device=values.device) // weight.group

    def spread(per_group: Tensor) -> Tensor:
        return per_group[:, group_of]

    if weight.zeros is not None:
        values = values - spread(weight.zeros.float())
    values = values * spread(effective_scales(weight))
    if (minimums := effective_minimums(weight)) is not None:
        values = values + spread(minimums)
    return values.to(dtype)

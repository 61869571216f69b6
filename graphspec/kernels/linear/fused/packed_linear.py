"""Triton implementation of :mod:`graphspec.kernels.linear.packed_linear`: the fused product, whose kernel converts codes as it loads them.

Only the sizes of tiles differ from those of a weight of numbers. Where a product has enough rows to be left to cuBLAS, the weight
is dequantised first, in one launch and into memory of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...fused.launch import AotCase, launch, operator
from ...op import Signature
from ..linear import Hidden
from ..packed import CODES, Packed, code_bits
from ._linear import _dequantise
from .linear import MATMUL, Products, fused_linear, linear, linear_summed, stored
from .linear_choice import LinearTable

TILE_OUTPUTS, TILE_INPUTS = 32, 128
"""Of a program that dequantises."""


packed_linear, packed_linear_summed = linear, linear_summed
"""Launchers take both kinds of weights; an operator of each takes one."""


def dequantised(weight: Packed, like: Tensor) -> Tensor:
    """:func:`~graphspec.kernels.linear.packed.dequantise` to the dtype of ``like`` in one launch."""
    (outputs, inputs), held = weight.shape, stored(weight)
    out = torch.empty(outputs, inputs, dtype=like.dtype, device=like.device)
    launch(
        _dequantise, (triton.cdiv(inputs, TILE_INPUTS), triton.cdiv(outputs, TILE_OUTPUTS)),
        held.rows, *held.fields, out, outputs, inputs, *held.columns, held.rows.stride(0),
        **held.options, TILE_O=TILE_OUTPUTS, TILE_K=TILE_INPUTS, num_warps=4,
    )  # fmt: skip
    return out


OP = operator("packed_linear", linear, Signature(linear, weight=Packed))
SUMMED = operator("packed_linear_summed", linear_summed, Signature(linear_summed, weight=Packed))
DEQUANTISED = operator("dequantised", dequantised)


def matmul(x: Tensor, weight: Packed, bias: Tensor | None = None, float32: bool = False) -> Tensor:
    """:func:`.linear.matmul` of the dequantised weight."""
    return MATMUL(x, DEQUANTISED(weight, x), bias, float32)


OPERATORS = Products(OP, SUMMED, matmul)


def fused_packed_linear(numerics: str = "fast", table: LinearTable | None = None, products: Products = OPERATORS) -> Callable[..., Hidden]:
    """:func:`.linear.fused_linear` of packed weights."""
    return fused_linear(numerics, table, products)


class Format(NamedTuple):
    """A published format, as far as a kernel depends on it: code, channels of a scale (0: all) and dtypes of its fields."""

    code: str
    group: int
    scales: torch.dtype
    zeros: torch.dtype | None = None
    minimums: torch.dtype | None = None
    supers: torch.dtype | None = None
    super_channels: int = 0
    divides: bool = False

    def without_data(self, outputs: int, inputs: int) -> Packed:
        """A weight of ``meta`` tensors."""

        def meta(columns: int, dtype: torch.dtype | None) -> Tensor | None:
            return None if dtype is None else torch.empty(outputs, columns, dtype=dtype, device="meta")

        group = self.group or inputs
        groups, supers = inputs // group, inputs // (self.super_channels or inputs)
        codes, scales = meta(inputs * code_bits(self.code) // 8, CODES[self.code]), meta(groups, self.scales)
        assert codes is not None and scales is not None
        return Packed(
            codes, scales, self.code, group, meta(supers, self.supers), meta(groups, self.zeros), meta(groups, self.minimums),
            meta(supers, self.supers if self.minimums is not None else None), divides=self.divides,
        )  # fmt: skip


FORMATS = {
    "int4": Format("int4", 128, torch.bfloat16),
    "int4-zeros": Format("uint4", 128, torch.float16, zeros=torch.uint8),
    "fp8-channel": Format("e4m3", 0, torch.float32),
    "fp8-block": Format("e4m3", 128, torch.float32),
    "mxfp4": Format("e2m1", 32, torch.float8_e8m0fnu),
    "nvfp4": Format("e2m1", 16, torch.float8_e4m3fn, supers=torch.float32, divides=True),
    "q8-0": Format("int8", 32, torch.float16),
    "q4-1": Format("uint4", 32, torch.float16, minimums=torch.float16),
    "q4-k": Format("uint4", 32, torch.uint8, minimums=torch.uint8, supers=torch.float16, super_channels=256),
    "q6-k": Format("int8", 16, torch.int8, supers=torch.float16, super_channels=256),
}
"""As the readers of checkpoints make them."""


def _call(kind: Format, rows: int, outputs: int, inputs: int, gated: bool) -> dict[str, Any]:
    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    made: dict[str, Any] = {"x": meta(rows, inputs), "weight": kind.without_data(outputs, inputs), "gated": gated}
    return made | ({"norm_weight": meta(inputs), "norm_eps": 1e-5} if gated else {"residual": meta(rows, outputs)})


def _cases(name: str, kind: Format) -> tuple[AotCase, ...]:
    down = [AotCase(f"{name}-down-m{rows}", packed_linear_summed, partial(_call, kind, rows, 4096, 14336, False)) for rows in (1, 8, 32)]
    gate_up = AotCase(f"{name}-gate-up-m8", packed_linear, partial(_call, kind, 8, 28672, 4096, True))
    whole = AotCase(
        f"{name}-numbers",
        dequantised,
        lambda: {"weight": kind.without_data(4096, 14336), "like": torch.empty(0, dtype=torch.bfloat16, device="meta")},
    )
    return *down, gate_up, whole


AOT = tuple(case for name, kind in FORMATS.items() for case in _cases(name, kind))

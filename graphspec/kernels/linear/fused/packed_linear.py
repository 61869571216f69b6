"""Triton implementation of :mod:`graphspec.kernels.linear.packed_linear`: the fused product, whose kernel converts codes as it loads them.

Only the sizes of tiles differ from those of a weight of numbers. Where a product has enough rows to be left to cuBLAS, the weight
is dequantised first, in one launch and into memory of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
from torch import Tensor

from ...fused.launch import launch, operator
from ..linear import Hidden
from ..packed import Packed
from ._linear import _dequantise
from .linear import MATMUL, Products, fused_linear, multiplied, stored
from .linear_choice import LinearTable

TILE_OUTPUTS, TILE_INPUTS = 32, 128
"""Of a program that dequantises."""


def packed_linear(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: bool = False,
    residual: Tensor | None = None,
    gated: bool = False,
    float32: bool = False,
    squares: Tensor | None = None,
    config: Sequence[int] | None = None,
) -> Tensor:
    """:func:`.linear.linear` of a packed weight."""
    return multiplied(x, weight, bias, norm_weight, norm_eps, norm_offset, residual, gated, float32, squares, config, summed=False)[0]


def packed_linear_summed(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: bool = False,
    residual: Tensor | None = None,
    gated: bool = False,
    float32: bool = False,
    squares: Tensor | None = None,
    config: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`.linear.linear_summed` of a packed weight."""
    out, sums = multiplied(x, weight, bias, norm_weight, norm_eps, norm_offset, residual, gated, float32, squares, config, summed=True)
    assert sums is not None
    return out, sums


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


OP = operator("packed_linear", packed_linear)
SUMMED = operator("packed_linear_summed", packed_linear_summed)
DEQUANTISED = operator("dequantised", dequantised)


def matmul(x: Tensor, weight: Packed, bias: Tensor | None = None, float32: bool = False) -> Tensor:
    """:func:`.linear.matmul` of the dequantised weight."""
    return MATMUL(x, DEQUANTISED(weight, x), bias, float32)


OPERATORS = Products(OP, SUMMED, matmul)


def fused_packed_linear(numerics: str = "fast", table: LinearTable | None = None, products: Products = OPERATORS) -> Callable[..., Hidden]:
    """:func:`.linear.fused_linear` of packed weights."""
    return fused_linear(numerics, table, products)

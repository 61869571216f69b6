"""Triton implementation of :mod:`graphspec.kernels.linear.packed_linear`: the fused product, whose kernel converts codes as it loads them.

Only the sizes of tiles differ from those of a weight of numbers. Where a product has enough rows to be left to cuBLAS, the weight
is dequantised first, in one launch and into memory of the call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from ...fused.launch import launch, operator
from ...op import Signature
from ..linear import Hidden
from ..packed import Packed
from ._linear import _dequantise
from .linear import MATMUL, Products, fused_linear, linear, linear_summed, stored
from .linear_choice import LinearTable

TILE_OUTPUTS, TILE_INPUTS = 32, 128
"""Tile of a program that dequantises."""


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

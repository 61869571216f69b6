"""``linear`` and ``rope_kv_write`` in one launch: projections whose programs rotate queries and keys, and write keys and values.

A program multiplies channels of one head and those that they rotate with, so that a tile has whole pairs. Products, tiles, splits and
rounding are those of the two ops called one after the other, and so are the bits. Where heads are normed, the last program of a head puts
its tiles together as it does with splits, and only the order of the norm's sum is another. It saves a layer one launch of its six.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...fused.launch import operator
from ...groups import Heads
from ...op import Signature
from ..linear import Hidden, ResidualStream
from ..packed import Packed
from .linear import format_of, multiplied
from .linear_choice import LinearShape, LinearTable


def linear_kv_write(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    norm_offset: bool,
    squares: Tensor | None,
    config: Sequence[int],
    heads: Heads,
) -> Tensor:
    """Project, norm, rotate, and write one layer's keys and values.

    Args:
        x: ``[B, T, in]``.
        weight: ``[(Q + 2 G) * D, in]``: heads of queries, keys and values.
        bias, norm_weight, norm_eps, norm_offset: of :func:`graphspec.kernels.linear.linear.linear`.
        squares, config: of :func:`.linear.linear`; the tile's outputs divide D.
        heads: every channel of a head rotates; D is a power of two if heads are normed.

    Returns:
        The rotated queries, ``[B, T, Q, D]`` contiguous, dtype of ``x``.
    """
    query_BTE, _ = multiplied(x, weight, bias, norm_weight, norm_eps, norm_offset, None, False, False, squares, config, False, heads)
    return query_BTE.unflatten(-1, (-1, heads.sizes[1]))


OP = operator("linear_kv_write", linear_kv_write)
OF_CODES = operator("packed_linear_kv_write", linear_kv_write, Signature(linear_kv_write, weight=Packed))

Project = Callable[..., Tensor | None]


def fused_linear_kv_write(
    numerics: str = "fast",
    table: LinearTable | None = None,
    operators: tuple[Callable[..., Tensor], Callable[..., Tensor]] = (OP, OF_CODES),
) -> Project:
    """``linear_kv_write`` of a :class:`~graphspec.kernels.registry.KernelSet`, which chooses tiles like :func:`.linear.fused_linear`.

    Args:
        numerics, table: as there, of the same products.
        operators: what it calls for a weight of numbers, and for codes; replaceable, to find out what would be launched.
    """
    chosen = LinearTable() if table is None else table

    @torch.compiler.assume_constant_result
    def choose(dim: int, *shape: Any) -> tuple[int, ...]:
        # A norm of heads sums in the layout of a tile, which in narrow ones follows the number of rows.
        config = chosen.choose(LinearShape(*shape), numerics, narrow=False)
        return () if config is None or dim % config.tile_outputs else config.encoded()

    def project(
        x: Hidden, weight: Any, bias: Tensor | None, norm_weight: Tensor | None, norm_eps: float, norm_offset: bool, heads: Heads
    ) -> Tensor | None:
        x, squares = x if isinstance(x, ResidualStream) else (x, None)
        rows, dim = x.numel() // x.shape[-1], heads.sizes[1]
        if heads.rope_LD.shape[1] != dim or (heads.query_norm is not None and dim & (dim - 1)):
            return None
        summed = norm_weight is not None and squares is not None
        parts = (norm_weight is not None, False, False, bias is not None, False, summed)
        config = choose(dim, rows, *weight.shape, str(x.dtype).removeprefix("torch."), *parts, *format_of(weight))
        if not config:
            return None
        call = operators[isinstance(weight, Packed)]
        return call(x, weight, bias, norm_weight, norm_eps, norm_offset, squares if summed else None, config, heads)

    return project

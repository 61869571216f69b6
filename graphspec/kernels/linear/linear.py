"""Linear layer of a few rows, with the norm before it and the ops after it: most of the time of a decode cycle."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formulas import rms_norm, silu_mul
from ..op import kernel_op


class ResidualStream(NamedTuple):
    """A residual stream between two products."""

    hidden: Tensor
    """``[..., H]``."""
    squares: Tensor | None = None
    """float32 ``[..., P]``: sums of squares of P parts of each row of ``hidden``, from which the next norm may compute its factor. None: no
    product has computed them."""


Hidden = Tensor | ResidualStream
"""Input or residual of a product: a tensor, or a stream, which then stays a stream."""


def hidden_of(x: Hidden) -> Tensor:
    """The values of a stream; a tensor as it is."""
    return x.hidden if isinstance(x, ResidualStream) else x


def stream_rows(x: Hidden, begin: int, end: int) -> Hidden:
    """Tokens ``begin .. end`` of ``[B, T, H]``; of a stream with their sums of squares, contiguous as products need them."""
    if isinstance(x, ResidualStream):
        squares = None if x.squares is None else x.squares[:, begin:end].contiguous()
        return ResidualStream(x.hidden[:, begin:end], squares)
    return x[:, begin:end]


@kernel_op(fused=None, invariant="sum_squares:OP", exact=False)
def sum_squares(x: Tensor) -> Tensor:
    """Sums of squares along the last dimension, from which an RMSNorm (arXiv 1910.07467) that no product makes computes its factor.

    What follows is elementwise and becomes part of the kernels around it. With ``fast`` numerics so does this sum, which the compiler may
    then split by the number of rows; with ``batch_invariant`` ones it is a launch of its own, whose order depends on the width alone.

    Args:
        x: ``[..., channels]``, any strides.

    Returns:
        ``[..., 1]``, float32.
    """
    # float64 appears in oracles only
    wide = x if x.dtype == torch.float64 else x.float()
    return wide.pow(2).sum(-1, keepdim=True)


@kernel_op(native="native", exact=False)
def linear(
    x: Hidden,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: bool = False,
    residual: Hidden | None = None,
    gated: bool = False,
    float32: bool = False,
) -> Hidden:
    """``residual + act(norm(x) @ weight.T + bias)``: every linear layer of target and drafter, projections of one input fused.

    A decode cycle calls it with a few rows, so it streams the weights once and is bound by memory, not by arithmetic. Norm, gate and
    residual are part of the op because separate launches would take longer than their computation.

    Args:
        x: ``[..., in]``, or a stream of that shape.
        weight: ``[out, in]``, dtype of ``x``.
        bias: ``[out]``.
        norm_weight: ``[in]``; RMSNorm of ``x`` first, see :func:`~graphspec.kernels.formulas.rms_norm`. None: ``x`` is not normed.
        norm_eps, norm_offset: of that norm.
        residual: shape and dtype of the result; added last. With a stream, the result is the stream after this product.
        gated: the rows of ``weight`` are gate and up, one half each; the result is ``silu(gate) * up``.
        float32: return float32, from the accumulator where an implementation has one.

    Returns:
        ``[..., out]``, or ``[..., out / 2]`` if gated; dtype of ``x`` or float32. A stream if ``residual`` is one, with or without squares.
    """
    x = hidden_of(x)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, norm_eps, norm_offset)
    return finish(F.linear(x, weight, bias), residual, gated, float32)


def finish(out: Tensor, residual: Hidden | None, gated: bool, float32: bool) -> Hidden:
    """The ops after the product."""
    if gated:
        out = silu_mul(out)
    if residual is not None:
        out = hidden_of(residual) + out
    # float64 appears in oracles only
    out = out.float() if float32 and out.element_size() < 4 else out
    return ResidualStream(out) if isinstance(residual, ResidualStream) else out

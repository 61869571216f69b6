"""Linear layer of a few rows whose weight has low precision."""

from __future__ import annotations

from torch import Tensor

from ..op import kernel_op
from .linear import Hidden, linear
from .packed import Packed, dequantise


@kernel_op(native="native", exact=False)
def packed_linear(
    x: Hidden,
    weight: Packed,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: bool = False,
    residual: Hidden | None = None,
    gated: bool = False,
    float32: bool = False,
) -> Hidden:
    """:func:`~graphspec.kernels.linear.linear.linear` of the weight that :func:`~graphspec.kernels.linear.packed.dequantise` gives.

    An implementation converts codes where it uses them and computes exactly what its own product of the dequantised weight does, bit for
    bit: every value is rounded once to the dtype of ``x``, and products are added in the same order.

    Args:
        x: ``[..., K]``, or a stream of that shape.
        weight: ``[N, K]``.
        bias, norm_weight, norm_eps, norm_offset, residual, gated, float32: as of ``linear``.

    Returns:
        As ``linear``.
    """
    values = dequantise(weight, (x if isinstance(x, Tensor) else x.hidden).dtype)
    return linear(x, values, bias, norm_weight, norm_eps, norm_offset, residual, gated, float32)

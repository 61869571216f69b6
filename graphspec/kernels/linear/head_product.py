"""Product of every head with a matrix of its own: the two around latent attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import kernel_op


@kernel_op(fused=None, invariant="head_product:OP", exact=False)
def head_product(x_BTQK: Tensor, weight_QKO: Tensor) -> Tensor:
    """``x[..., q, :] @ weight[q]`` for each head q: ``W_UK`` and ``W_UV`` of absorbed latent attention (arXiv 2405.04434, section 2.1).

    The first turns a query into one over latent rows, the second a mixture of latent rows into a mixture of values. With ``fast`` numerics
    they are batched products of the library, which may choose its kernel by the number of rows; with ``batch_invariant`` ones a tile always
    has 64 rows, and its order of summation follows from the shape of the weight.

    Args:
        x_BTQK: any strides.
        weight_QKO: dtype of ``x``; K or O has stride 1.

    Returns:
        ``[B, T, Q, O]``, contiguous, dtype of ``x``.
    """
    return torch.einsum("btqk,qko->btqo", x_BTQK, weight_QKO).contiguous()

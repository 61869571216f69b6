"""The sum of squares of a norm that no product computes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import kernel_op


@kernel_op(fused=None, invariant="sum_squares:OP", exact=False)
def sum_squares(x: Tensor) -> Tensor:
    """Sums of squares along the last dimension, from which an RMSNorm (arXiv 1910.07467) computes its factor.

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

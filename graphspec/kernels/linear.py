"""Linear layer: the matrix product of a few rows, which is where a small model on a CPU spends its time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .op import Case, KernelOp


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``: every linear layer of target and drafter, projections of one input fused into one weight.

    A decode cycle calls it with a handful of rows, so it streams the weights once and is bound by memory, not by arithmetic.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``, dtype of ``x``.

    Returns:
        ``[..., out]``.
    """
    return F.linear(x, weight)


def _cases(generator: torch.Generator) -> list[Case]:
    shapes = (((1,), 33, 17), ((2, 3), 48, 40), ((16,), 20, 130), ((7,), 8, 16), ((1,), 64, 1100), ((13,), 96, 900))
    return [
        {
            "x": torch.randn(*rows, channels, generator=generator),
            "weight": torch.randn(outputs, channels, generator=generator) / channels**0.5,
        }
        for rows, channels, outputs in shapes
    ]


OP = KernelOp(
    name="linear",
    contract=linear.__doc__ or "",
    reference=linear,
    cases=_cases,
    implementations={"native": "graphspec.kernels.native:linear"},
    exact=False,
)

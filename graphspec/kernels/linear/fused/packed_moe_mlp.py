"""Triton implementation of :mod:`graphspec.kernels.linear.packed_moe_mlp`: the kernels of ``moe_mlp.py``, which convert codes they load."""

from __future__ import annotations

from torch import Tensor

from ...fused.launch import register
from ..packed import Packed
from .moe_mlp import experts_of


def packed_moe_mlp(
    x_TH: Tensor,
    index_TK: Tensor,
    weight_TK: Tensor,
    gate_up: Packed,
    down: Packed,
    gate_up_bias_EF: Tensor | None = None,
    down_bias_EH: Tensor | None = None,
    alpha: float = 1.0,
    limit: float = 0.0,
    gelu: bool = False,
) -> Tensor:
    return experts_of(x_TH, index_TK, weight_TK, gate_up, down, gate_up_bias_EF, down_bias_EH, alpha, limit, gelu)


OP = register(packed_moe_mlp)
"""``packed_moe_mlp`` as an operator."""

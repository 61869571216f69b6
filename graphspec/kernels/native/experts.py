"""Experts of a mixture in C++ for the CPU, float32. Only experts that a token chose are read, from numbers or codes alike."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ConfigError
from ..linear.packed import Packed
from . import channels_of, define_op, pack_segments
from .call import bits, call, dense, require

__all__ = ["mix", "moe_mlp", "pack_experts", "packed_moe_mlp"]


def pack_experts(weight: Tensor | Packed, experts: int, stored: torch.dtype | None = None, activations: str = "full") -> Tensor:
    """uint8 ``[E, bytes]``: the weight of each expert as :func:`.pack_segments` has it.

    Args:
        weight: float32 or codes ``[E * N, K]``.
        experts: E.
        stored: as of :func:`.pack_linear`.
        activations: as of :func:`.pack_segments`.

    Raises:
        ConfigError: as :func:`.pack_segments`.
    """
    rows = weight.shape[0] // experts
    tensors = weight.tensors if isinstance(weight, Packed) else {"values": weight.detach()}

    def own(expert: int) -> Tensor:
        part = {name: x if name == "group_of" else x[expert * rows : (expert + 1) * rows] for name, x in tensors.items()}
        return pack_segments([weight.with_tensors(part) if isinstance(weight, Packed) else part["values"]], stored, activations)

    # Without data all are alike. Otherwise the dtypes of numbers and scales may differ: the narrowest that has all of an expert's.
    made = [own(expert) for expert in range(1 if next(iter(tensors.values())).is_meta else experts)]
    packed = made[0].new_zeros(experts, max(one.numel() for one in made))
    for to, one in zip(packed, made, strict=False):
        to[: one.numel()] = one
    return packed


def _mix(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    width: int,
    gated: bool,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    alpha: float,
    limit: float,
    gelu: bool,
) -> Tensor:
    """:func:`graphspec.kernels.linear.moe_mlp.moe_mlp` of weights of :func:`pack_experts`; ``gated``: they have gates.

    Raises:
        ConfigError: a tensor of another dtype, or another number of channels.
    """
    for name, tensor in (("x", x), ("weight", weight), ("gate_up_bias", gate_up_bias), ("down_bias", down_bias)):
        if tensor is not None:
            require(name, tensor, torch.float32)
    require("index", index, torch.int64)
    hidden = x.shape[1]
    if channels_of(gate_up[0]) != hidden or channels_of(down[0]) != width:
        raise ConfigError("native experts: x", f"{channels_of(gate_up[0])} channels", hidden)
    rows = x if x.stride(1) == 1 else dense(x)
    out = torch.empty(x.shape, dtype=torch.float32)
    biases = (None if bias is None else dense(bias) for bias in (gate_up_bias, down_bias))
    tensors = (out, rows, dense(index), dense(weight), dense(gate_up), dense(down), *biases)
    sizes = (gate_up.stride(0), down.stride(0), *index.shape, gate_up.shape[0], hidden, width, gated, gelu, rows.stride(0))
    call("experts", tensors, *sizes, bits(alpha), bits(limit))
    return out


def _mix_shape(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


mix = define_op("experts", _mix, _mix_shape)


def moe_mlp(
    x_TH: Tensor,
    index_TK: Tensor,
    weight_TK: Tensor,
    gate_up_EFH: Tensor,
    down_EHF: Tensor,
    gate_up_bias_EF: Tensor | None = None,
    down_bias_EH: Tensor | None = None,
    alpha: float = 1.0,
    limit: float = 0.0,
    gelu: bool = False,
) -> Tensor:
    """:func:`graphspec.kernels.linear.moe_mlp.moe_mlp` with packing and experts in C++."""
    numbers = gate_up_EFH.flatten(0, 1), down_EHF.flatten(0, 1)
    return _packing(x_TH, index_TK, weight_TK, *numbers, gate_up_bias_EF, down_bias_EH, alpha, limit, gelu)


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
    """:func:`graphspec.kernels.linear.packed_moe_mlp.packed_moe_mlp`, likewise."""
    return _packing(x_TH, index_TK, weight_TK, gate_up, down, gate_up_bias_EF, down_bias_EH, alpha, limit, gelu)


def _packing(
    x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor | Packed, down: Tensor | Packed, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, alpha: float, limit: float, gelu: bool,
) -> Tensor:  # fmt: skip
    width, experts = down.shape[1], down.shape[0] // x.shape[1]
    packed = pack_experts(gate_up, experts), pack_experts(down, experts)
    gated = gate_up.shape[0] == 2 * experts * width
    mixed: Tensor = mix(x, index, weight, *packed, width, gated, gate_up_bias, down_bias, alpha, limit, gelu)
    return mixed

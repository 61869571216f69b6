"""Weights rounded to the nearest codes, and these as compressed-tensors stores them, which transformers and vLLM load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.linear.packed import Packed, as_bytes


@dataclass(frozen=True, slots=True)
class Rounded:
    """How a format rounds.

    Attributes:
        code: of :data:`graphspec.kernels.linear.packed.CODES`.
        layout: ``format`` of compressed-tensors.
        top: the number that the largest magnitude of a group becomes, before it is rounded and clamped.
        group: channels of a group, where the format fixes them; 0: a row has one scale; None: it is chosen.
        scale: dtype of the scales; None: that of the weight.
        as_gguf: codes are the nearest for scales that are not rounded yet, halves away from zero.
    """

    code: str
    layout: str
    top: float
    group: int | None = None
    scale: torch.dtype | None = None
    as_gguf: bool = False


ROUNDED = {
    "int4": Rounded("int4", "pack-quantized", 7.5),
    "int8": Rounded("int8", "pack-quantized", 127.5),
    "fp8": Rounded("e4m3", "float-quantized", 448.0, 0, torch.float32),
    "q8_0": Rounded("int8", "pack-quantized", 127.0, 32, torch.float16, as_gguf=True),
}
"""By name. Scales are those of compressed-tensors' ``calculate_qparams``, and for ``q8_0`` those of GGUF's type of this name; other
:data:`OBSERVERS` choose others."""
MINMAX, MSE = "minmax", "mse"
OBSERVERS = (MINMAX, MSE)
"""How scales are chosen, by the names of llm-compressor. minmax: the largest magnitude of a group is the largest code; mse: of
:data:`SHARES` of that scale, the one with the smallest squared error, which cuts off the largest numbers where that pays."""
SHARES = tuple(30 / fourths for fourths in range(24, 61))
"""With them the largest magnitude of a group of ``int4`` is 6 to 15 steps in fourths of a step, 7 and 8 among them: what was ``int4`` once
is found again."""


def round_to(weight: Tensor, row: Rounded, group: int, observer: str = MINMAX, shares: Sequence[float] = SHARES) -> Packed:
    """The nearest codes of a weight.

    Args:
        weight: ``[N, K]``, finite.
        row: of :data:`ROUNDED`; with an observer other than ``minmax``, not ``as_gguf``.
        group: a divisor of K.
        observer: one of :data:`OBSERVERS`.
        shares: what ``mse`` chooses from, next to 1.

    Unless ``as_gguf``, scales are rounded to their dtype first: codes are the nearest ones for what is stored.
    """
    outputs, channels = weight.shape
    values = weight.float().view(outputs, channels // group, group)
    exact = values.abs().amax(-1, keepdim=True) / row.top
    scales = _stored_scales(exact, row, weight.dtype)
    if observer == MSE:
        best = _squared_error(values, scales, row)
        for share in shares:
            other = _stored_scales(exact * share, row, weight.dtype)
            error = _squared_error(values, other, row)
            scales, best = torch.where(error < best, other, scales), torch.minimum(error, best)
    if row.as_gguf:
        codes = values * torch.where(exact > 0, 1 / exact, 0)
        codes = (codes.abs() + 0.5).floor().copysign(codes)
    else:
        codes = _rounded(values / scales.float(), row)
    codes, scales = codes.view(outputs, channels), scales.view(outputs, -1)
    if row.code != "int4":
        return Packed(codes.to(torch.float8_e4m3fn if row.code == "e4m3" else torch.int8), scales, row.code, group)
    stored = (codes + 8).to(torch.uint8)
    return Packed(stored[:, ::2] | stored[:, 1::2] << 4, scales, "int4", group)


def _stored_scales(exact: Tensor, row: Rounded, dtype: torch.dtype) -> Tensor:
    """Scales in their dtype; a group of zeros has one too, unless ``as_gguf``."""
    scales = exact.to(row.scale or dtype)
    return scales if row.as_gguf else torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales)


def _rounded(scaled: Tensor, row: Rounded) -> Tensor:
    """The numbers nearest to ``scaled`` that the codes of a format have, float32."""
    if row.code == "e4m3":
        return scaled.clamp(-row.top, row.top).to(torch.float8_e4m3fn).float()
    lowest = -8 if row.code == "int4" else -128
    return scaled.round().clamp(lowest, -lowest - 1)


def _squared_error(values: Tensor, scales: Tensor, row: Rounded) -> Tensor:
    """Of each group, ``[N, G, 1]``."""
    steps = scales.float()
    return (_rounded(values / steps, row) * steps - values).square().sum(-1, keepdim=True)


def stored(packed: Packed, row: Rounded) -> dict[str, Tensor]:
    """The tensors of a layer by what stands after its prefix."""
    if row.layout == "float-quantized":
        return {"weight": packed.codes, "weight_scale": packed.scales}
    # Words of the lowest bits first; 8 bits are stored plus 128.
    codes = packed.codes if packed.bits == 4 else as_bytes(packed.codes) ^ 128
    shape = torch.tensor(packed.shape)
    return {"weight_packed": codes.contiguous().view(torch.int32), "weight_scale": packed.scales, "weight_shape": shape}


def quantization_config(row: Rounded, group: int, ignore: list[str]) -> dict[str, Any]:
    """``quantization_config`` of ``config.json``.

    Args:
        row: of :data:`ROUNDED`.
        group: channels of a group; 0: all of a row.
        ignore: linear layers that keep their numbers.
    """
    weights: dict[str, Any] = {
        "num_bits": 4 if row.code == "int4" else 8, "type": "float" if row.code == "e4m3" else "int", "symmetric": True,
        "strategy": "group" if group else "channel", "group_size": group or None, "dynamic": False, "actorder": None,
    }  # fmt: skip
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None, "format": row.layout}
    return {
        "quant_method": "compressed-tensors", "format": row.layout, "quantization_status": "compressed",
        "config_groups": {"group_0": scheme}, "ignore": ignore, "kv_cache_scheme": None,
    }  # fmt: skip

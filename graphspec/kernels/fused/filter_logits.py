"""Triton kernel of :mod:`graphspec.kernels.filter_logits`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ._thresholds import BLOCK, thresholds
from ._vocabulary import is_finite
from .launch import AotCase, launch, register


@triton.jit
def _apply_least(logits, temperature, least, out, vocab, rows_per_lane, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Entries below the row's threshold become -inf; greedy rows are copied."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    hot = tl.load(temperature + row // rows_per_lane) > 0
    bound = tl.load(least + row, mask=hot, other=0.0)
    x = tl.load(logits + row * vocab + column, mask=column < vocab, other=0.0)
    kept = tl.where(is_finite(x) & (x >= bound), x, float("-inf"))
    tl.store(out + row * vocab + column, tl.where(hot, kept, x), mask=column < vocab)


def filter_logits(logits_BTV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor) -> Tensor:
    logits_BTV = logits_BTV.contiguous()
    least_BT, _ = thresholds(logits_BTV, temperature_B, top_k_B, top_p_B, min_p_B, True)
    lanes, rows_per_lane, vocab = logits_BTV.shape
    out_BTV = torch.empty_like(logits_BTV)
    grid = (triton.cdiv(vocab, BLOCK), lanes * rows_per_lane)
    launch(_apply_least, grid, logits_BTV, temperature_B, least_BT, out_BTV, vocab, rows_per_lane, BLOCK=BLOCK)
    return out_BTV


def _fake(logits_BTV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor) -> Tensor:
    return torch.empty(logits_BTV.shape, dtype=logits_BTV.dtype, device=logits_BTV.device)


OP = register("filter_logits", filter_logits, _fake)


def _call(lanes: int, rows: int, vocab: int) -> dict[str, Any]:
    meta = torch.device("meta")
    return {
        "logits_BTV": torch.empty(lanes, rows, vocab, dtype=torch.float32, device=meta),
        "temperature_B": torch.empty(lanes, dtype=torch.float32, device=meta),
        "top_k_B": torch.empty(lanes, dtype=torch.int64, device=meta),
        "top_p_B": torch.empty(lanes, dtype=torch.float32, device=meta),
        "min_p_B": torch.empty(lanes, dtype=torch.float32, device=meta),
    }


AOT = (AotCase("vd32000", filter_logits, lambda: _call(1, 1, 32000)), AotCase("v128256-t8", filter_logits, lambda: _call(8, 8, 128256)))

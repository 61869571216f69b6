"""Triton kernel of :mod:`graphspec.kernels.sampling.filter_logits`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register
from ._thresholds import BLOCK, thresholds
from ._vocabulary import is_finite


@triton.jit
def _apply_least(logits, temperature, threshold, out, vocab, rows_per_lane, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Set entries below the row's threshold to -inf; copy greedy rows."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sampled = tl.load(temperature + row // rows_per_lane) > 0
    row_threshold = tl.load(threshold + row, mask=sampled, other=0.0)
    x = tl.load(logits + row * vocab + column, mask=column < vocab, other=0.0)
    kept = tl.where(is_finite(x) & (x >= row_threshold), x, float("-inf"))
    tl.store(out + row * vocab + column, tl.where(sampled, kept, x), mask=column < vocab)


def filter_logits(logits_BTV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor) -> Tensor:
    logits_BTV = logits_BTV.contiguous()
    threshold_BT, _ = thresholds(logits_BTV, temperature_B, top_k_B, top_p_B, min_p_B, True)
    lanes, rows_per_lane, vocab = logits_BTV.shape
    out_BTV = torch.empty_like(logits_BTV)
    grid = (triton.cdiv(vocab, BLOCK), lanes * rows_per_lane)
    launch(_apply_least, grid, logits_BTV, temperature_B, threshold_BT, out_BTV, vocab, rows_per_lane, BLOCK=BLOCK)
    return out_BTV


OP = register(filter_logits)

"""Triton kernel of :mod:`graphspec.kernels.tree.draft_window`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register

BLOCK = 1024


@triton.jit
def _take_last(hidden, known, out, entries, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < size
    last = tl.maximum(tl.load(known + lane) - 1, 0)
    tl.store(out + lane * size + channel, tl.load(hidden + (lane * entries + last) * size + channel, mask=inside), mask=inside)


def take_last(hidden_BTH: Tensor, known_B: Tensor, out_BH: Tensor) -> None:
    lanes, entries, size = hidden_BTH.shape
    launch(_take_last, (lanes, triton.cdiv(size, BLOCK)), hidden_BTH, known_B, out_BH, entries, size, BLOCK=BLOCK)


OP = register(take_last)

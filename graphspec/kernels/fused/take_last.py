"""Triton kernel of :mod:`graphspec.kernels.take_last`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .launch import AotCase, launch, register

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


OP = register("take_last", take_last, mutates=("out_BH",))


def _call(lanes: int) -> dict[str, Any]:
    meta = torch.device("meta")
    return {
        "hidden_BTH": torch.empty(lanes, 6, 4096, dtype=torch.bfloat16, device=meta),
        "known_B": torch.empty(lanes, dtype=torch.int64, device=meta),
        "out_BH": torch.empty(lanes, 4096, dtype=torch.bfloat16, device=meta),
    }


AOT = (AotCase("llama-8b-a6", take_last, lambda: _call(1)), AotCase("llama-8b-b8-a6", take_last, lambda: _call(8)))

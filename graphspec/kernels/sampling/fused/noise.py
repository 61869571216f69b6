"""Triton kernel of :mod:`graphspec.kernels.sampling.noise`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register
from ._vocabulary import counter_hash, gumbel, hash_words

CHUNK = 1024


@triton.jit
def _gumbel_noise(seed, position, token, out, positions, vocab, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """One program per chunk of the vocabulary and position."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    a, b = hash_words(tl.load(seed + row // positions), tl.load(position + row))
    noise = gumbel(counter_hash(a, b, tl.load(token + column, mask=column < vocab, other=0)))
    tl.store(out + row * vocab + column, noise, mask=column < vocab)


def gumbel_noise(seed_B: Tensor, position_BT: Tensor, token_V: Tensor) -> Tensor:
    lanes, positions = position_BT.shape
    vocab = token_V.shape[0]
    out_BTV = torch.empty(lanes, positions, vocab, dtype=torch.float32, device=seed_B.device)
    grid = (triton.cdiv(vocab, CHUNK), lanes * positions)
    launch(_gumbel_noise, grid, seed_B, position_BT.contiguous(), token_V, out_BTV, positions, vocab, CHUNK=CHUNK)
    return out_BTV


OP = register(gumbel_noise)

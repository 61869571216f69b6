"""Sampling one token per position from logits: greedy, or by noise that depends on seed, position and token alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.registry import KernelSet


def sample_tokens(logits_BTV: Tensor, noise_BTV: Tensor | None, temperature_B: Tensor) -> Tensor:
    """Gumbel-max sample of every position: ``argmax(logits + T * noise)``; rows at ``T == 0`` are greedy.

    Args:
        logits_BTV: float32.
        noise_BTV: Gumbel(0, 1) noise, float32; None: every row is greedy.
        temperature_B: float32.

    Returns:
        int64 ``[B, T]``.
    """
    if noise_BTV is None:
        return logits_BTV.argmax(-1)
    hot_B11 = (temperature_B > 0)[:, None, None]
    return torch.where(hot_B11, logits_BTV + temperature_B[:, None, None] * noise_BTV, logits_BTV).argmax(-1)


def target_noise(kernels: KernelSet, seed_B: Tensor, position_BT: Tensor, vocab_size: int) -> Tensor:
    """Noise of the tokens *being sampled* at ``position_BT``, float32 ``[B, T, V]``."""
    token_V = torch.arange(vocab_size, device=seed_B.device)
    return kernels.gumbel_noise(seed_B, position_BT, token_V)


def draft_noise(kernels: KernelSet, seed_B: Tensor, position_BT: Tensor, target_token_Vd: Tensor | None, vocab_size: int) -> Tensor:
    """The same noise as the target's at these positions, for the drafter's vocabulary: float32 ``[B, T, Vd]``."""
    if target_token_Vd is None:
        return target_noise(kernels, seed_B, position_BT, vocab_size)
    return kernels.gumbel_noise(seed_B, position_BT, target_token_Vd)

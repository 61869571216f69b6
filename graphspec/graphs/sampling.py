"""Sampling one token per position from logits: greedy, or by noise that depends on seed, position and token alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ..buffers import Views
from ..kernels.registry import KernelSet
from .stage import Build


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


class DraftSampler:
    """Ranks a drafter's continuations by the keys the sampler will use itself."""

    def __init__(self, build: Build) -> None:
        self.plan, self.kernels, self.shape, self.sampling = build.plan, build.kernels, build.shape, build.sampling

    def propose(
        self, v: Views, logits_BTV: Tensor, target_token_Vd: Tensor | None, position_B: Tensor, path_BTs: Tensor, level: int
    ) -> tuple[Tensor, Tensor]:
        """Top-K continuations of each draft row.

        Args:
            v: the bucket's slots.
            logits_BTV: float32 over the draft vocabulary.
            target_token_Vd: int64, draft id to target id; None where the vocabularies are one.
            position_B: position of the token being proposed, the same for all T.
            path_BTs: int64 ``[B, T, level - 1]``, tokens drafted on the way to each row, the root not among them.
            level: depth of the token being proposed, from 1; static.

        Returns:
            log-probabilities float32 and target ids int64, both ``[B, T, K]``.
        """
        row_B = v.lane_row_B
        noise, temperature_B = None, None
        if self.sampling and self.plan.coupled_noise:
            noise_B1V = draft_noise(self.kernels, v.seed_R[row_B], position_B[:, None], target_token_Vd, self.plan.target.vocab_size)
            noise, temperature_B = noise_B1V.expand(logits_BTV.shape), v.temperature_R[row_B]
        return self.kernels.draft_topk(logits_BTV, self.shape.topk, target_token_Vd, noise, temperature_B)

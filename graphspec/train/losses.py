"""Losses of a draft step against the target's full next-token distribution, row by row.

The acceptance rate of a drafted token under speculative sampling is ``sum(min(p, q))`` for the target's distribution p and the draft's q
(Leviathan et al. 2023). A draft too small to become the target gains by aiming at it (LK losses, Samarin et al. 2026, arXiv 2602.23881).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..config.train_options import CROSS_ENTROPY, LK_ALPHA

_TINY = 1e-8
"""Keeps the logarithm of no overlap finite."""
_ETA = 3.0
"""How fast cross-entropy leaves the hybrid loss as acceptance rises; that of the drafts which the authors published."""


class SoftCrossEntropy(torch.autograd.Function):
    """``-(soft * log_softmax(logits)).sum(-1)`` of float32 rows ``[M, V]``: ``[M]``, for targets that sum to 1 and have no gradient.

    Its gradient is made in the forward pass, in place of the logarithms: a vocabulary wide, every pass over memory that is saved counts.
    """

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, soft_MV: Tensor) -> Tensor:
        log_MV = logits_MV.log_softmax(-1)
        loss_M = -torch.linalg.vecdot(soft_MV, log_MV)
        ctx.save_for_backward(log_MV.exp_().sub_(soft_MV))
        return loss_M

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor, None]:
        (gradient_MV,) = ctx.saved_tensors
        return gradient_MV * grad_M[:, None], None


class CrossEntropyAndOverlap(torch.autograd.Function):
    """That of :class:`SoftCrossEntropy`, and ``minimum(soft, softmax(logits)).sum(-1)``: two of ``[M]``."""

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, soft_MV: Tensor) -> tuple[Tensor, Tensor]:
        log_MV = logits_MV.log_softmax(-1)
        loss_M = -torch.linalg.vecdot(soft_MV, log_MV)
        drafted_MV = log_MV.exp_()
        ctx.save_for_backward(drafted_MV, soft_MV)
        return loss_M, torch.minimum(drafted_MV, soft_MV).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor, overlap_grad_M: Tensor) -> tuple[Tensor, None]:
        drafted_MV, soft_MV = ctx.saved_tensors
        # Where the draft says more than the target, more of it changes nothing.
        short_MV = drafted_MV * (drafted_MV < soft_MV)
        scale_M = grad_M - overlap_grad_M * short_MV.sum(-1)
        gradient_MV = short_MV.mul_(overlap_grad_M[:, None])
        return gradient_MV.addcmul_(drafted_MV, scale_M[:, None]).addcmul_(soft_MV, grad_M[:, None], value=-1), None


def mean_loss(kind: str, logits_MV: Tensor, soft_MV: Tensor, counted_M: Tensor) -> Tensor:
    """The mean over the rows that count, 0 if none does.

    Args:
        kind: one of :data:`graphspec.config.train_options.LOSSES`.
        logits_MV: of the draft, float32.
        soft_MV: the target's distribution, float32; rows sum to 1.
        counted_M: bool.
    """
    count = counted_M.sum().clamp(min=1)
    if kind == CROSS_ENTROPY:
        cross_entropy_M: Tensor = SoftCrossEntropy.apply(logits_MV, soft_MV)  # type: ignore[no-untyped-call]
        return (cross_entropy_M * counted_M).sum() / count
    cross_entropy_M, overlap_M = CrossEntropyAndOverlap.apply(logits_MV, soft_MV)  # type: ignore[no-untyped-call]
    if kind == LK_ALPHA:
        return (-(overlap_M + _TINY).log() * counted_M).sum() / count
    share = torch.exp(-_ETA * (overlap_M.detach() * counted_M).sum() / count)
    return ((share * cross_entropy_M + (1 - share) * (1 - overlap_M)) * counted_M).sum() / count

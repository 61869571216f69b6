"""Top-k, top-p and min-p as one threshold per row, so that the kept tokens depend on values alone and not on the order of a sort."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Int64, kernel_op

MASS_BITS = 40
"""Weights count as integers in units of ``2^-40`` of the largest: their sums are exact, whatever the order of summation."""


@kernel_op(native="native.cycle")
def filter_logits(logits_BTV: Tensor, temperature_B: Tensor, top_k_B: Int64, top_p_B: Tensor, min_p_B: Tensor) -> Tensor:
    """-inf where a token is filtered out of ``softmax(logits / temperature)``; rows at temperature 0 come back as they are.

    A token stays when its logit is at least the largest of three thresholds; equal logits stay or go together:

    * top-k: the k-th largest logit;
    * top-p, over the tokens that top-k keeps: the largest logit t for which the tokens with logits of at least t have a share of at least
      ``top_p``. The share above t is less than ``top_p``, so the most likely token always stays;
    * min-p: the largest logit plus ``temperature * log(min_p)``, that is ``min_p`` times the largest probability.

    Weights ``exp((logit - max) / temperature)`` are truncated to integers of 40 bits before they are summed. Integer sums are exact, so the
    threshold does not depend on the order of summation and can be found without a sort; a token below ``2^-40`` of the largest has weight
    0. Implementations whose ``exp`` differs in the last bit may truncate a weight to a neighbouring integer; the kept tokens differ only
    where the sum passes ``top_p`` within that unit.

    Args:
        logits_BTV: float32; an entry that is not finite is a token that is excluded already.
        temperature_B: float32.
        top_k_B: int64; below 1, or from V on: off.
        top_p_B: float32 in (0, 1]; 1: off.
        min_p_B: float32 in [0, 1]; 0: off.

    Returns:
        ``[B, T, V]`` in the dtype of ``logits``.

    Source: nucleus sampling, Holtzman et al. 2020 (arXiv 1904.09751), section 3.1; min-p, Nguyen et al. 2024 (arXiv 2407.01082), section 3.
    """
    vocab = logits_BTV.shape[-1]
    temperature_B11 = torch.where(temperature_B > 0, temperature_B, 1.0)[:, None, None]
    finite_BTV = torch.where(logits_BTV.isfinite(), logits_BTV, -torch.inf)
    sorted_BTV = finite_BTV.sort(dim=-1, descending=True).values
    peak_BT1 = sorted_BTV[..., :1]
    peak_BT1 = torch.where(peak_BT1 == -torch.inf, 0.0, peak_BT1)

    limited_B11 = ((top_k_B > 0) & (top_k_B < vocab))[:, None, None]
    last_BT1 = (top_k_B - 1).clamp(0, vocab - 1)[:, None, None].expand(-1, logits_BTV.shape[1], -1)
    min_k_BT1 = torch.where(limited_B11, sorted_BTV.gather(-1, last_BT1), -torch.inf)

    weight_BTV = torch.exp((sorted_BTV - peak_BT1) / temperature_B11)
    mass_BTV = torch.where(sorted_BTV >= min_k_BT1, (weight_BTV * 2.0**MASS_BITS).to(torch.int64), 0)
    upto_BTV = mass_BTV.cumsum(-1)
    wanted_BT1 = top_p_B.double()[:, None, None] * upto_BTV[..., -1:]
    # Nothing is above the first, and rounding must not remove it.
    inside_BTV = (upto_BTV - mass_BTV < wanted_BT1) | (torch.arange(vocab, device=logits_BTV.device) == 0)
    min_p_BT1 = torch.where(inside_BTV, sorted_BTV, torch.inf).amin(-1, keepdim=True)
    min_p_BT1 = torch.where(top_p_B[:, None, None] < 1, min_p_BT1, -torch.inf)

    # log(0) is -inf: a min_p of 0 keeps everything.
    min_m_BT1 = peak_BT1 + temperature_B11 * torch.log(min_p_B)[:, None, None]
    min_BT1 = torch.maximum(torch.maximum(min_k_BT1, min_p_BT1), min_m_BT1)
    kept_BTV = torch.where(finite_BTV >= min_BT1, finite_BTV, -torch.inf)
    return torch.where((temperature_B > 0)[:, None, None], kept_BTV, logits_BTV)

"""Top-k with specified ties: ``torch.topk`` does not specify the order of equal values, so results could differ between runs."""

from __future__ import annotations

import torch
from torch import Tensor

ARGMAX_PASSES = 16
"""Largest k for which k argmax passes are used; they are faster than a full sort, and fuse into their producer when compiled."""


def stable_topk(x_BM: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest entries of the last dimension, descending, equal values by lowest index, NaN as -inf.

    Args:
        x_BM: ``[..., M]``, floating point.
        k: static, ``0 <= k <= M``.

    Returns:
        values ``[..., k]`` in the dtype of ``x`` (NaN reads as -inf) and distinct indices ``[..., k]``, int64.
    """
    # -0.0 == 0.0 must tie by index in every backend, radix sorts included.
    x_BM = torch.where(x_BM.isnan(), -torch.inf, torch.where(x_BM == 0, 0.0, x_BM))
    if k > ARGMAX_PASSES or k == 0:
        values, index = torch.sort(x_BM, dim=-1, descending=True, stable=True)
        return values[..., :k], index[..., :k]
    column_M = torch.arange(x_BM.shape[-1], device=x_BM.device)
    first_k = column_M[:k]
    taken_BK = torch.zeros(*x_BM.shape[:-1], k, dtype=torch.bool, device=x_BM.device)
    rest_BM, values_list, index_list = x_BM, [], []
    for _ in range(k):
        value_B1 = rest_BM.amax(-1, keepdim=True)
        index_B1 = rest_BM.argmax(-1, keepdim=True)
        # Taken entries read -inf; once only -inf is left, the lowest index not taken yet lies among the first k.
        free_B1 = (~taken_BK).to(torch.int32).argmax(-1, keepdim=True)
        index_B1 = torch.where(value_B1 == -torch.inf, free_B1, index_B1)
        taken_BK = taken_BK | (first_k == index_B1)
        rest_BM = torch.where(column_M == index_B1, -torch.inf, rest_BM)
        values_list.append(value_B1)
        index_list.append(index_B1)
    return torch.cat(values_list, -1), torch.cat(index_list, -1)

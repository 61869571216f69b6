"""The best of a vocabulary of which every rank scores a part: each finds its own best, then all compare these and gather no logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Int64, kernel_op
from ..sampling.noise import gumbel_noise
from ..sampling.topk import stable_topk


@kernel_op(fused="draft_topk:SHARD_OP", exact=False)
def shard_topk(
    logits_BTVr: Tensor, topk: int, token_Vr: Int64, temperature_B: Tensor | None, seed_B: Int64 | None, position_BT: Int64 | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The ``topk`` best keys of one rank's columns, and what :func:`merge_shards` needs of the others.

    Keys are those of ``draft_topk`` and ``sample_tokens``: the
    logits, or ``logits + temperature * noise`` in lanes whose temperature is positive, with the noise of
    ``gumbel_noise`` at (seed, position, token id). Ties go to the first column. Columns whose token is -1
    stand after the end of the vocabulary: their key is -inf, whatever they hold.

    Args:
        logits_BTVr: float32, the rank's columns.
        topk: K, static, at most Vr.
        token_Vr: int64, the target id of each column, -1 for none.
        temperature_B: float32, 0 is greedy; None: every row is. seed_B and position_BT are needed with it.
        seed_B: int64.
        position_BT: int64, position of the token being scored.

    Returns:
        key ``[B, T, K]`` float32, descending, -inf for an impossible token; target ids ``[B, T, K]`` int64; the sum of ``exp(key - best)``
        over all columns, ``[B, T]`` float32, 0 where every key is -inf; whether every logit is finite, ``[B, T]`` bool.

    Source: log-sum-exp by parts, Milakov and Gimelshein 2018 (arXiv 1805.02867), section 3.1.
    """
    finite_BTVr, there_Vr = logits_BTVr.isfinite(), token_Vr >= 0
    key_BTVr = torch.where(finite_BTVr & there_Vr, logits_BTVr, -torch.inf)
    if temperature_B is not None:
        assert seed_B is not None and position_BT is not None
        temperature_B11 = temperature_B[:, None, None]
        noise_BTVr = gumbel_noise(seed_B, position_BT, token_Vr)
        key_BTVr = torch.where(temperature_B11 > 0, key_BTVr + temperature_B11 * noise_BTVr, key_BTVr)
    value_BTK, index_BTK = stable_topk(key_BTVr, topk)
    total_BT = torch.exp(key_BTVr - _peak(value_BTK)).sum(-1)
    return value_BTK, token_Vr[index_BTK], total_BT, (finite_BTVr | ~there_Vr).all(-1)


def _peak(value_BTK: Tensor) -> Tensor:
    """What exponents are relative to, ``[B, T, 1]``: the best key, or 0 where there is none."""
    best_BT1 = value_BTK[..., :1]
    return torch.where(best_BT1 == -torch.inf, 0.0, best_BT1)


def pack_shard(key_BTK: Tensor, token_BTK: Tensor, total_BT: Tensor, sound_BT: Tensor) -> Tensor:
    """Results of :func:`shard_topk` as words of 32 bits, which one collective gathers: int32 ``[B, T, 2 * K + 2]``."""
    total_BT1, sound_BT1 = total_BT[..., None].view(torch.int32), sound_BT[..., None].to(torch.int32)
    return torch.cat((key_BTK.view(torch.int32), token_BTK.to(torch.int32), total_BT1, sound_BT1), -1)


def merge_shards(word_BTW: Tensor, topk: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best of all ranks. Keys and their order are those of one rank that scores all columns.

    Args:
        word_BTW: int32, what :func:`pack_shard` gives, of all ranks side by side in order of rank.
        topk: K, static.

    Returns:
        log-probabilities ``[B, T, K]`` float32 among the keys of all ranks, descending; target ids ``[B, T, K]`` int64; whether every
        logit is finite, ``[B, T]`` bool.
    """
    word_BTrW = word_BTW.unflatten(-1, (-1, 2 * topk + 2))
    key_BTrK, token_BTrK = word_BTrW[..., :topk].contiguous().view(torch.float32), word_BTrW[..., topk : 2 * topk]
    total_BTr = word_BTrW[..., 2 * topk].contiguous().view(torch.float32)
    # In order of rank, so that a tie goes to the first column of all.
    value_BTK, index_BTK = stable_topk(key_BTrK.flatten(-2), topk)
    peak_BT1 = _peak(value_BTK)
    total_BT1 = (total_BTr * torch.exp(key_BTrK[..., 0] - peak_BT1)).sum(-1, keepdim=True)
    logprob_BTK = torch.where(value_BTK == -torch.inf, -torch.inf, value_BTK - peak_BT1 - torch.log(total_BT1))
    return logprob_BTK, token_BTrK.flatten(-2).gather(-1, index_BTK).long(), (word_BTrW[..., 2 * topk + 1] != 0).all(-1)

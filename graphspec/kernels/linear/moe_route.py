"""The experts of each token, and their weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Bool, kernel_op
from ..sampling.topk import stable_topk

NORM_EPS = 1e-20
"""Added to the sum that weights are divided by, as the published code of DeepSeek-V3 does."""


@kernel_op(exact=False)
def moe_route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    valid_T: Bool,
    topk: int,
    groups: int,
    topk_groups: int,
    group_best: int,
    sigmoid: bool,
    normalize: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """The ``topk`` experts of every token, and their weights.

    ==================  =====  ======  ==========  =======  =========
    router              bias   groups  group_best  sigmoid  normalize
    ==================  =====  ======  ==========  =======  =========
    Qwen3-MoE           None   1       1           no       yes
    DeepSeek-V2, greedy None   1       1           no       no
    DeepSeek-V2, groups None   G       1           no       no
    DeepSeek-V3         yes    G       2           yes      yes
    Ernie 4.5           yes    1       1           no       yes
    ==================  =====  ======  ==========  =======  =========

    Experts are ranked by ``sigmoid(logits) + bias`` (arXiv 2412.19437, section 2.1.2), by ``softmax(logits) + bias``, or without a bias
    by their logits, which order experts as ``softmax`` does. ``groups`` are of equal size and consecutive; a group's score is the sum of
    its ``group_best`` best experts, and only experts of the ``topk_groups`` best groups can be chosen (arXiv 2405.04434, section 2.2.2).
    Ties go to the lower group and the lower expert. The weight is the score *without* bias, divided by the sum over the chosen if
    ``normalize``, times ``scaling``.

    Args:
        logits_TE: float32, E a multiple of ``groups``. A logit that is not finite counts as -inf.
        bias_E: float32 score correction, or None.
        valid_T: bool; an invalid token has no expert.
        topk: K, static, at most the experts of ``topk_groups`` groups.
        groups, topk_groups, group_best: static; ``group_best`` is 1 or 2, and 1 where ranking is by logits.
        sigmoid: static; False: softmax.
        normalize: static.
        scaling: static.

    Returns:
        index ``[T, K]`` int64, best first, distinct, -1 for an invalid token; weight ``[T, K]`` float32, 0 for an invalid token.
    """
    tokens, experts = logits_TE.shape
    logits_TE = torch.where(logits_TE.isfinite(), logits_TE, -torch.inf)
    if sigmoid:
        score_TE = torch.sigmoid(logits_TE)
        rank_TE = score_TE if bias_E is None else score_TE + bias_E
    else:
        peak_T1 = logits_TE.amax(-1, keepdim=True)
        score_TE = torch.exp(logits_TE - torch.where(peak_T1 == -torch.inf, 0.0, peak_T1))
        total_T1 = score_TE.sum(-1, keepdim=True)
        score_TE = score_TE / torch.where(total_T1 == 0, 1.0, total_T1)
        rank_TE = logits_TE if bias_E is None else score_TE + bias_E
    if topk_groups < groups:
        best_TGb, _ = stable_topk(rank_TE.view(tokens, groups, experts // groups), group_best)
        _, group_Tg = stable_topk(best_TGb.sum(-1), topk_groups)
        group_E = torch.arange(experts, device=logits_TE.device) // (experts // groups)
        rank_TE = torch.where((group_E == group_Tg[..., None]).any(1), rank_TE, -torch.inf)
    _, index_TK = stable_topk(rank_TE, topk)
    weight_TK = score_TE.gather(1, index_TK)
    if normalize:
        weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + NORM_EPS)
    return torch.where(valid_T[:, None], index_TK, -1), torch.where(valid_T[:, None], weight_TK * scaling, 0.0)


def distinct_experts(experts: int, topk: int, tokens: float) -> float:
    """Expected number of experts that ``tokens`` tokens hit if each chooses ``topk`` of ``experts`` independently and uniformly.

    ``E (1 - (1 - k/E)^T)``. Real routers are less uniform and tokens of one tree are similar, so the true number is smaller.
    """
    return experts * (1 - (1 - topk / experts) ** tokens)

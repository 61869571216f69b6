"""Log-probabilities of emitted tokens and of prompts: the target's own, before penalties, filters and temperature."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.sampling.topk import stable_topk
from ...plan.buffers import Views
from ...shapes import SamplingClass
from .sampling import Scores
from .stage import Build, Stage, TargetModel

RING = ("ring_logprob_ZBA", "ring_top_logprob_ZBAO", "ring_top_token_ZBAO")
PROMPT_RING = ("ring_prompt_logprob_ZC", "ring_prompt_top_logprob_ZCO", "ring_prompt_top_token_ZCO")
SCORED = 128
"""Positions of a prompt whose logits exist at once: 128 rows of a vocabulary of 128,000 take 64 MB."""


def ring_buffers(sampling: SamplingClass) -> tuple[str, ...]:
    """Buffers of the ring that programs of this class write."""
    logprobs = () if sampling.logprobs < 0 else RING if sampling.logprobs else RING[:1]
    return ("ring_ZBJ", *logprobs, *(PROMPT_RING if sampling.prompt_logprobs else ()))


def write_logprobs(v: Views, slot_1: Tensor, logits_BTV: Tensor, token_BT: Tensor, alternatives: int) -> None:
    """Write the first T entries of a ring slot: each token's log-probability and the most likely tokens at its position.

    Args:
        v: the bucket's slots.
        slot_1: ring slot, int64 ``[1]``.
        logits_BTV: float32, as the target gave them.
        token_BT: int64; -1 is no token, its entry has no meaning.
        alternatives: how many most likely tokens, static.
    """
    length = token_BT.shape[1]
    logprob_BTV = torch.log_softmax(logits_BTV, -1)
    chosen_BT = logprob_BTV.gather(-1, token_BT.clamp(min=0)[..., None]).squeeze(-1)
    v.ring_logprob_ZBA[:, :, :length].index_copy_(0, slot_1, chosen_BT[None])
    if alternatives:
        value_BTO, token_BTO = stable_topk(logprob_BTV, alternatives)
        v.ring_top_logprob_ZBAO[:, :, :length, :alternatives].index_copy_(0, slot_1, value_BTO[None])
        v.ring_top_token_ZBAO[:, :, :length, :alternatives].index_copy_(0, slot_1, token_BTO[None])


def write_prompt_logprobs(
    v: Views, target: TargetModel, scores: Scores, slot_1: Tensor, hidden_1CH: Tensor, token_1C: Tensor, length_1: Tensor
) -> None:
    """Write a ring slot: for every token of a prompt's chunk the log-probability of the one after it, and the most likely ones there.

    Args:
        v: the slots of one lane.
        target: the target network.
        scores: of the target.
        slot_1: ring slot, int64 ``[1]``.
        hidden_1CH: what its logits are computed from.
        token_1C: int64, the chunk; entries past ``length`` have no meaning.
        length_1: int64, its tokens. The one after the last is in ``following_token_R``; where it is -1, that entry has no meaning.
    """
    chunk = token_1C.shape[1]
    entry_C = torch.arange(chunk, device=token_1C.device)
    following_11 = v.following_token_R[v.lane_row_B][:, None]
    next_1C = torch.where(entry_C == length_1 - 1, following_11, token_1C.roll(-1, 1)).clamp(min=0)
    maximum = v.ring_prompt_top_token_ZCO.shape[-1]
    for begin in range(0, chunk, SCORED):
        end = min(begin + SCORED, chunk)
        logprob_1TV = torch.log_softmax(scores.whole(target.logits(hidden_1CH[:, begin:end])), -1)
        chosen_1T = logprob_1TV.gather(-1, next_1C[:, begin:end, None]).squeeze(-1)
        value_1TO, token_1TO = stable_topk(logprob_1TV, maximum)
        for name, found in zip(PROMPT_RING, (chosen_1T, value_1TO, token_1TO), strict=True):
            getattr(v, name)[:, begin:end].index_copy_(0, slot_1, found)


class Logprobs(Stage):
    """Before the commit: log-probabilities of the run that was accepted, into the ring slot the commit is about to fill."""

    name = "logprobs"
    reads = ("logits_BNV", "sample_BN", "path_BA", "cycle_1")

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.writes = ring_buffers(self.sampling.of_cycles)[1:]

    def forward(self, v: Views) -> None:
        logits_BAV = v.logits_BNV.gather(1, v.path_BA[..., None].expand(-1, -1, v.logits_BNV.shape[-1]))
        write_logprobs(v, v.cycle_1 % self.plan.ring_depth, logits_BAV, v.sample_BN.gather(1, v.path_BA), self.sampling.logprobs)

"""Log-probabilities of emitted tokens and of prompts: the target's own, before penalties, filters and temperature."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.groups import LogprobRing
from ...kernels.registry import KernelSet
from ...plan.buffers import Views
from ...shapes import SamplingClass
from .sampling import Scores
from .stage import Build, Stage, TargetModel

RING = LogprobRing._fields
PROMPT_RING = ("ring_prompt_logprob_ZC", "ring_prompt_top_logprob_ZCO", "ring_prompt_top_token_ZCO")
SCORED = 128
"""Positions of a prompt whose logits exist at once: 128 rows of a vocabulary of 128,000 take 64 MB."""


def ring_buffers(sampling: SamplingClass) -> tuple[str, ...]:
    """Buffers of the ring that programs of this class write."""
    logprobs = () if sampling.logprobs < 0 else RING if sampling.logprobs else RING[:1]
    return ("ring_ZBJ", *logprobs, *(PROMPT_RING if sampling.prompt_logprobs else ()))


def write_prompt_logprobs(
    kernels: KernelSet, v: Views, target: TargetModel, scores: Scores, slot_1: Tensor, hidden_1CH: Tensor, token_1C: Tensor,
    length_1: Tensor,
) -> None:  # fmt: skip
    """Write a ring slot: for every token of a prompt's chunk the log-probability of the one after it, and the most likely ones there.

    Args:
        kernels: of the target.
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
    next_1C = torch.where(entry_C == length_1 - 1, following_11, token_1C.roll(-1, 1))
    maximum = v.ring_prompt_top_token_ZCO.shape[-1]
    for begin in range(0, chunk, SCORED):
        end = min(begin + SCORED, chunk)
        logits_1TV = scores.whole(target.logits(hidden_1CH[:, begin:end]))
        found = kernels.log_probabilities(logits_1TV, next_1C[:, begin:end], maximum)
        for name, x in zip(PROMPT_RING, found, strict=True):
            getattr(v, name)[:, begin:end].index_copy_(0, slot_1, x)


class Logprobs(Stage):
    """Before the commit: log-probabilities of the run that was accepted, into the ring slot the commit is about to fill."""

    name = "logprobs"
    reads = ("logits_BNV", "sample_BN", "path_BA", "cycle_1")

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.writes = ring_buffers(self.sampling.of_cycles)[1:]

    def forward(self, v: Views) -> None:
        self.kernels.note_logprobs(v.logits_BNV, v.path_BA, v.sample_BN, v.cycle_1, v.take(LogprobRing), self.sampling.logprobs)

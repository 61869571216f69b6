"""Log-probabilities of the emitted tokens: the target's own, before penalties, filters and temperature."""

from __future__ import annotations

import torch
from torch import Tensor

from ...buffers import Views
from ...kernels.topk import stable_topk
from .stage import Build, Stage

RING = ("ring_logprob_ZBA", "ring_top_logprob_ZBAO", "ring_top_token_ZBAO")


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


class Logprobs(Stage):
    """Before the commit: log-probabilities of the run that was accepted, into the ring slot the commit is about to fill."""

    name = "logprobs"
    reads = ("logits_BNV", "sample_BN", "path_BA", "cycle_1")

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.writes = RING if self.sampling.logprobs else RING[:1]

    def forward(self, v: Views) -> None:
        logits_BAV = v.logits_BNV.gather(1, v.path_BA[..., None].expand(-1, -1, v.logits_BNV.shape[-1]))
        write_logprobs(v, v.cycle_1 % self.plan.ring_depth, logits_BAV, v.sample_BN.gather(1, v.path_BA), self.sampling.logprobs)

"""Stages that draft all levels in one pass: the distribution of a depth does not depend on what was drafted before it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..buffers import Views
from ..graphs.stages.network import NetworkStage
from ..graphs.stages.sampling import DraftSampler
from ..graphs.stages.stage import Build
from ..kernels.groups import Candidates


class MarginalStage(NetworkStage):
    """Base of these stages: fills the candidate pool from the logits of all depths."""

    reads = ("lane_row_B", "lane_table_BP", "status_R", "seq_len_R", "window_len_R", "window_token_RAc", "draft_kv", "draft_begin_1")
    writes: tuple[str, ...] = ("draft_kv", *Candidates._fields)
    feature_reads = ("window_feature_RAcF",)

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.sampler = DraftSampler(build)
        self.reads = (*self.reads, *self.sampler.reads)
        self.writes = (*self.writes, *self.sampler.writes)

    def fill_pool(self, v: Views, logits_BSV: Tensor, position_B: Tensor) -> None:
        """Write the candidates of all S levels; ``position_B`` is the position of the tokens of level 1."""
        position_BS = position_B[:, None] + torch.arange(self.shape.num_steps, device=position_B.device)
        score_BSK, token_BSK = self.sampler.propose_levels(v, logits_BSV, self.draft.target_token_Vd, position_BS)
        self.kernels.marginal_pool(score_BSK, token_BSK, v.lane_row_B, v.status_R, v.take(Candidates))

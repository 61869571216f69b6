"""Stages that draft all levels in one pass: the distribution of a depth does not depend on what was drafted before it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.groups import Candidates
from ...plan.buffers import Views
from .beams import DraftStage


class MarginalStage(DraftStage):
    """Base of these stages: fills the candidate pool from the logits of all depths."""

    def fill_pool(self, v: Views, logits_BSV: Tensor, position_B: Tensor) -> None:
        """Write the candidates of all S levels; ``position_B`` is the position of the tokens of level 1."""
        position_BS = position_B[:, None] + torch.arange(self.shape.num_steps, device=position_B.device)
        score_BSK, token_BSK = self.sampler.propose_levels(v, logits_BSV, self.draft.target_token_Vd, position_BS)
        self.kernels.marginal_pool(score_BSK, token_BSK, v.lane_row_B, v.status_R, v.take(Candidates))

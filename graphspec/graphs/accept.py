"""Stage 5, accept: sample at every node, keep the matching path."""

from __future__ import annotations

import torch

from ..buffers import Status, Views
from .rules import RULES
from .sampling import LogitShaper, node_paths
from .stage import Build, Stage


class Accept(Stage):
    """Sample, then match. What is sampled at a node is the acceptance rule's business (:mod:`graphspec.graphs.rules`); by default it is the
    target's own sample, so that the output does not depend on the draft.

    A run ends before the first token whose logits are not finite, and its row fails there, on the device; other rows, and nodes nobody
    accepted, do not matter.
    """

    name = "accept"
    writes = ("sample_BN", "path_BA", "accept_len_B", "outcome_B")

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.shaper, self.rule = LogitShaper(build), RULES[build.plan.accept.rule](build)
        base = (
            "lane_row_B", "status_R", "seq_len_R", "budget_R", "stop_id_RE", "draft_len_R",
            "logits_BNV", "node_token_BN", "node_parent_BN", "node_depth_BN", "node_ancestors_BNX",
        )  # fmt: skip
        self.reads = tuple(dict.fromkeys((*base, *self.shaper.reads, *self.rule.reads)))

    def forward(self, v: Views) -> None:
        row_B, live_B = self.rows(v)
        seq_B = v.seq_len_R[row_B]
        path_BNN = node_paths(v.node_token_BN, v.node_ancestors_BNX) if self.sampling.penalties else None
        logits_BNV = self.shaper(v, v.logits_BNV, seq_B[:, None] + 1 + v.node_depth_BN, path_BNN)
        v.sample_BN.copy_(self.rule(v, logits_BNV))

        cap_B = torch.minimum(v.draft_len_R[row_B], (self.plan.draft_context - seq_B).clamp(min=0))
        path_BA, length_B, reason_B = self.kernels.tree_walk(
            v.node_token_BN, v.node_parent_BN, v.node_depth_BN, v.node_ancestors_BNX, v.sample_BN, self.rule.depth_cap(v, cap_B),
            v.budget_R[row_B], v.stop_id_RE[row_B], self.plan.accept_width,
        )  # fmt: skip
        entry_A = torch.arange(self.plan.accept_width, device=row_B.device)
        broken_BA = (~torch.isfinite(v.logits_BNV).all(-1)).gather(1, path_BA)
        sound_B = torch.where(broken_BA, entry_A, self.plan.accept_width).amin(-1)
        failed_B = live_B & (sound_B < length_B)
        v.path_BA.copy_(torch.where(live_B[:, None], path_BA, 0))
        v.accept_len_B.copy_(torch.where(live_B, torch.minimum(length_B, sound_B), 0))
        # tree_walk's reasons 0, 1, 2 are LIVE, STOPPED, LENGTH in this order.
        outcome_B = torch.where(failed_B, Status.FAILED, torch.where(live_B, reason_B + Status.LIVE, v.status_R[row_B]))
        v.outcome_B.copy_(outcome_B)

"""Stages 1 and 2 without a network: candidates from the row's own history, or from the host."""

from __future__ import annotations

import torch

from ...buffers import Views
from ...kernels.groups import Candidates
from .mailbox import MailLayout
from .stage import Build, Stage


class NgramMatch(Stage):
    """Continuations of earlier occurrences of the row's last tokens (prompt lookup), matched on the device."""

    name = "ngram_match"
    reads = ("lane_row_B", "status_R", "seq_len_R", "history_RL")
    writes = Candidates._fields

    def forward(self, v: Views) -> None:
        settings = self.plan.ngram
        self.kernels.ngram_match(
            v.history_RL, v.lane_row_B, v.status_R, v.seq_len_R, v.take(Candidates),
            self.shape.topk, self.shape.num_steps, settings.min_window, settings.max_window,
        )  # fmt: skip


class HostTree(Stage):
    """The trees that came with the message: what the host proposes knowing every token up to the root."""

    name = "host_tree"
    reads = ("mail", "lane_row_B", "status_R")
    writes = NgramMatch.writes

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.layout = MailLayout.of(build.plan)

    def forward(self, v: Views) -> None:
        _, live_B = self.rows(v)
        at, lanes, nodes = self.layout, v.lane_row_B.shape[0], self.shape.num_draft_tokens - 1
        token_BM, parent_BM = v.mail[at.trees : at.trees + at.max_lanes * 2 * nodes].view(at.max_lanes, 2, nodes)[:lanes].unbind(1)
        used_BM = live_B[:, None] & (token_BM >= 0)
        # Equal scores keep the host's order; all candidates become nodes.
        v.candidate_score_BM.copy_(torch.where(used_BM, 0.0, float("-inf")))
        v.candidate_token_BM.copy_(torch.where(used_BM, token_BM, -1))
        v.candidate_parent_BM.copy_(torch.where(used_BM, parent_BM, -1))

"""Stage 1 where the host drafts: candidates from the message."""

from __future__ import annotations

import torch

from ...graphs.stages.mailbox import MailLayout
from ...graphs.stages.stage import Build, Stage
from ...kernels.groups import Candidates
from ...plan.buffers import Views


class HostTree(Stage):
    """Copies the trees of the message, which the host proposes from every token up to the root, into the candidate pool."""

    name = "host_tree"
    reads = ("mail", "lane_row_B", "status_R")
    writes = Candidates._fields

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.layout = MailLayout.of(build.plan)

    def forward(self, v: Views) -> None:
        _, live_B = self.rows(v)
        at, lanes, nodes = self.layout, v.lane_row_B.shape[0], self.shape.num_draft_tokens - 1
        trees_B2M = v.mail[at.trees : at.trees + at.max_lanes * 2 * at.max_nodes].view(at.max_lanes, 2, at.max_nodes)[:lanes, :, :nodes]
        token_BM, parent_BM = trees_B2M.unbind(1)
        used_BM = live_B[:, None] & (token_BM >= 0)
        # Equal scores keep the host's order; all candidates become nodes.
        v.candidate_score_BM.copy_(torch.where(used_BM, 0.0, float("-inf")))
        v.candidate_token_BM.copy_(torch.where(used_BM, token_BM, -1))
        v.candidate_parent_BM.copy_(torch.where(used_BM, parent_BM, -1))


def stages(build: Build) -> list[Stage]:
    """See :attr:`graphspec.config.catalog.Variant.stages`."""
    return [HostTree(build)]

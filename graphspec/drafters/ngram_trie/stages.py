"""Stage 1 where the host drafts: candidates from the message."""

from __future__ import annotations

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
        self.kernels.host_tree(v.mail, self.layout.trees, self.layout.max_nodes, v.lane_row_B, v.status_R, v.take(Candidates))


def stages(build: Build) -> list[Stage]:
    """See :attr:`graphspec.config.catalog.Variant.stages`."""
    return [HostTree(build)]

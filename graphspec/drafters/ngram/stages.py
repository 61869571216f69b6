"""Stage 1 without a network: candidates from the row's own history."""

from __future__ import annotations

from ...buffers import Views
from ...graphs.stages.stage import Build, Stage
from ...kernels.groups import Candidates


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


def stages(build: Build) -> list[Stage]:
    """See :attr:`graphspec.catalog.Variant.stages`."""
    return [NgramMatch(build)]

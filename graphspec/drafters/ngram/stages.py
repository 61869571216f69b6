"""Stage 1 without a network: candidates from the row's own history."""

from __future__ import annotations

from ...graphs.stages.stage import Build, Stage
from ...kernels.groups import Candidates
from ...plan.buffers import Views


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


class ForcedPath(Stage):
    """Makes the run that a grammar forces the best path of its lane."""

    name = "forced_path"
    reads = ("forced_token_BS", *Candidates._fields)
    writes = Candidates._fields

    def forward(self, v: Views) -> None:
        self.kernels.forced_run(v.forced_token_BS, v.take(Candidates))


def stages(build: Build) -> list[Stage]:
    """See :attr:`graphspec.config.catalog.Variant.stages`."""
    return [NgramMatch(build), *([ForcedPath(build)] if build.sampling.grammar else [])]

"""Stages 6 and 7: the accepted path's KV moves to where it belongs, and the row is committed."""

from __future__ import annotations

from ...kernels.groups import Progress, Run
from ...models.recurrence import NodeRecords, RecurrentStates, commit_path
from ...plan.buffers import Views, pool_names
from .stage import Build, Stage


class CommitState(Stage):
    """Keep the accepted path: its KV moves to consecutive slots, all layers of a pool at once. Chains need no move."""

    name = "commit_state"

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.pools = pool_names("target_kv", self.plan.target)
        self.reads = ("lane_row_B", "seq_len_R", "page_table_RP", "path_BA", "accept_len_B", *self.pools)
        self.writes = self.pools

    def forward(self, v: Views) -> None:
        for pool in v.several(self.pools):
            self.kernels.kv_move(pool, v.page_table_RP, v.seq_len_R, v.path_BA, v.accept_len_B, v.lane_row_B)


class CommitRecurrent(Stage):
    """The accepted path's tokens enter the states of the recurrent layers, in trees and chains alike."""

    name = "commit_recurrent"
    reads = ("lane_row_B", "path_BA", "accept_len_B", *NodeRecords._fields, *RecurrentStates._fields)
    writes = RecurrentStates._fields

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        recurrent = self.plan.target.recurrent
        assert recurrent is not None, "a target with recurrent layers"
        self.selective = recurrent.ssm is not None
        self.convolution = build.target.stacked_convolution()

    def forward(self, v: Views) -> None:
        states, records = v.take(RecurrentStates), v.take(NodeRecords)
        rows = (v.lane_row_B, v.path_BA, v.accept_len_B)
        commit_path(self.kernels, states, records, self.convolution, *rows, selective=self.selective)


class Commit(Stage):
    """``seq_len += accept_len``, the next window along the path, the output ring, the status; history and token counts where kept.

    Args:
        build: what every stage gets.
        append: the run is appended to the window instead of replacing it, for a drafter that has not read the window yet.
    """

    name = "commit"

    def __init__(self, build: Build, *, append: bool = False) -> None:
        super().__init__(build)
        self.append = append
        self.saves = self.plan.keeps_page_features
        features = ("feature_BNF", "window_feature_RAcF") if self.plan.feature_width else ()
        lookback = ("lookback_token_RY", "lookback_feature_RYF") if self.plan.lookback else ()
        history = ("history_RL",) if self.plan.keeps_history else ()
        counts = ("output_count_RV",) if self.sampling.penalties else ()
        state = ("seq_len_R", "window_token_RAc", "window_len_R", "budget_R", "cycle_1", *lookback, *history)
        self.reads = ("lane_row_B", "sample_BN", "path_BA", "accept_len_B", "outcome_B", *state, *features)
        if self.saves:
            self.reads, features = (*self.reads, "lane_table_BP"), (*features, "page_feature")
        # Counts are added to, whatever they are.
        self.writes = (*state, "status_R", *counts, *features[1:], "ring_ZBJ")

    def forward(self, v: Views) -> None:
        plan = self.plan
        if self.saves:
            self.kernels.page_feature_write(
                v.page_feature, plan.page_size, v.lane_table_BP, v.seq_len_R, v.accept_len_B, v.feature_BNF, v.path_BA, v.lane_row_B
            )
        self.kernels.commit_rows(
            v.lane_row_B, v.take(Run), v.feature_BNF if plan.feature_width else None, v.cycle_1, v.ring_ZBJ,
            self.window_slots(v), v.take(Progress),
            v.history_RL if plan.keeps_history else None, v.output_count_RV if self.sampling.penalties else None, self.append,
        )  # fmt: skip

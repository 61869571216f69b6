"""Runs before a cycle of depth 0: the drafter reads the tokens that were decoded without it."""

from __future__ import annotations

import math

from ...plan.buffers import Views
from ...shapes import WORD_BITS
from .stage import Build, NetworkStage


class CatchUp(NetworkStage):
    """The drafter over the whole window, for its KV alone: its last layer ends there. What the cycle commits then replaces the window, as
    after any draft-extend.

    Entries, slots and positions are those of ``DraftExtend``, in up to ``Ac`` instead of ``A`` entries.
    """

    name = "catch_up"
    reads: tuple[str, ...] = ("lane_row_B", "lane_table_BP", "status_R", "seq_len_R", "window_len_R", "window_token_RAc")
    feature_reads = ("window_feature_RAcF",)

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        width = self.plan.window_capacity
        self.bound = None
        if self.plan.draft_attends:
            self.reads = (*self.reads, "draft_begin_1")
            self.bound = self.bind_call("draft", "window", width, width)

    def pools_read(self) -> tuple[str, ...]:
        """None where writing a token's KV takes no attention."""
        return super().pools_read() if self.plan.draft_attends else ()

    def forward(self, v: Views) -> None:
        width = self.plan.window_capacity
        found = self.window(v, width, math.ceil(width / WORD_BITS))
        token_BAc, valid_BAc, slot_BAc, position_BAc, begin_B, ancestors_BAcX, _, _, feature_BAcF = found
        attention = self.attend(v, position_BAc, valid_BAc, slot_BAc, begin_B, ancestors_BAcX, bound=self.bound)
        self.draft.write_kv(token_BAc, self.draft.fuse(feature_BAcF) if self.plan.feature_width else None, attention)

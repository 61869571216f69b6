"""Tokens that a row must not sample because they would end a bad word.

A row keeps its last committed tokens. For a node of a tree the node's ancestors follow them, so every branch is a separate text here too.
"""

from __future__ import annotations

from ...plan.buffers import Views
from .stage import Stage

WORDS = ("recent_token_RBt", "bad_word_RBwBt")


class RecentTokens(Stage):
    """After the commit: the tokens of the run, which no bad word may go on from."""

    name = "recent_tokens"
    reads = ("lane_row_B", "sample_BN", "path_BA", "accept_len_B", "recent_token_RBt")
    writes = ("recent_token_RBt",)

    def forward(self, v: Views) -> None:
        self.kernels.note_tokens(v.sample_BN, v.path_BA, v.accept_len_B, v.lane_row_B, v.recent_token_RBt)

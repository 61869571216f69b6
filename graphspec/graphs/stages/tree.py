"""Stage 3: the verify nodes. A tree picks the best candidates; a chain's candidates are its nodes."""

from __future__ import annotations

from ...kernels.groups import Candidates, Nodes
from ...plan.buffers import Views
from .stage import Build, Stage


class TreeBuild(Stage):
    """The ``N - 1`` best candidates after the root (EAGLE-2, section 4.1: rerank by cumulative log-probability)."""

    name = "tree_build"
    reads = ("lane_row_B", "window_token_RAc", "window_len_R", *Candidates._fields)
    writes = Nodes._fields

    def forward(self, v: Views) -> None:
        self.kernels.tree_build(*v.take(Candidates), v.lane_row_B, v.window_token_RAc, v.window_len_R, v.take(Nodes), self.shape.num_steps)


class ChainLayout(Stage):
    """Nodes of a chain in path order: the root, then one candidate per level. Plain decoding is the chain of one node."""

    name = "chain_layout"
    writes = Nodes._fields

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        drafted = ("candidate_score_BM", "candidate_token_BM") if self.shape.num_steps else ()
        self.reads = ("lane_row_B", "window_token_RAc", "window_len_R", *drafted)

    def forward(self, v: Views) -> None:
        score_BM, token_BM = (v.candidate_score_BM, v.candidate_token_BM) if self.shape.num_steps else (None, None)
        self.kernels.chain_layout(score_BM, token_BM, v.lane_row_B, v.window_token_RAc, v.window_len_R, v.take(Nodes))

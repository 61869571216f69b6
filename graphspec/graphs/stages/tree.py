"""Stage 3: the verify nodes. A tree picks the best candidates; a chain's candidates are its nodes."""

from __future__ import annotations

from ...buffers import Views
from .stage import Build, Stage

NODES = ("node_token_BN", "node_parent_BN", "node_depth_BN", "node_ancestors_BNX")


class TreeBuild(Stage):
    """The ``N - 1`` best candidates after the root (EAGLE-2, section 4.1: rerank by cumulative log-probability)."""

    name = "tree_build"
    reads = ("lane_row_B", "window_token_RAc", "window_len_R", "candidate_score_BM", "candidate_token_BM", "candidate_parent_BM")
    writes = NODES

    def forward(self, v: Views) -> None:
        self.kernels.tree_build(
            v.candidate_score_BM, v.candidate_token_BM, v.candidate_parent_BM, v.lane_row_B, v.window_token_RAc, v.window_len_R,
            v.node_token_BN, v.node_parent_BN, v.node_depth_BN, v.node_ancestors_BNX, self.shape.num_steps,
        )  # fmt: skip


class ChainLayout(Stage):
    """Nodes of a chain in path order: the root, then one candidate per level. Plain decoding is the chain of one node."""

    name = "chain_layout"
    writes = NODES

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        drafted = ("candidate_score_BM", "candidate_token_BM") if self.shape.num_steps else ()
        self.reads = ("lane_row_B", "window_token_RAc", "window_len_R", *drafted)

    def forward(self, v: Views) -> None:
        score_BM, token_BM = (v.candidate_score_BM, v.candidate_token_BM) if self.shape.num_steps else (None, None)
        self.kernels.chain_layout(
            score_BM, token_BM, v.lane_row_B, v.window_token_RAc, v.window_len_R,
            v.node_token_BN, v.node_parent_BN, v.node_depth_BN, v.node_ancestors_BNX,
        )  # fmt: skip

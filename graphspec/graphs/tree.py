"""Stage 3: the verify nodes. A tree picks the best candidates; a chain's candidates are its nodes."""

from __future__ import annotations

import torch

from ..buffers import Views
from .draft import causal_words
from .stage import Build, Stage


class TreeBuild(Stage):
    """The ``N - 1`` best candidates behind the root (EAGLE-2, section 4.1: rerank by cumulative log-probability)."""

    name = "tree_build"
    reads = ("lane_row_B", "window_token_RA", "window_len_R", "candidate_score_BM", "candidate_token_BM", "candidate_parent_BM")
    writes = ("node_token_BN", "node_parent_BN", "node_depth_BN", "node_ancestors_BNX")

    def forward(self, v: Views) -> None:
        root_B = _root(v)
        token_BN, parent_BN, depth_BN, ancestors_BNX = self.kernels.tree_build(
            v.candidate_score_BM, v.candidate_token_BM, v.candidate_parent_BM, root_B, self.shape.num_draft_tokens, self.plan.num_words,
            self.shape.num_steps,
        )  # fmt: skip
        v.node_token_BN.copy_(token_BN)
        v.node_parent_BN.copy_(parent_BN)
        v.node_depth_BN.copy_(depth_BN)
        v.node_ancestors_BNX.copy_(ancestors_BNX)


class ChainLayout(Stage):
    """Nodes of a chain in path order: the root, then one candidate per level. Plain decoding is the chain of one node."""

    name = "chain_layout"
    writes = TreeBuild.writes

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        drafted = ("candidate_score_BM", "candidate_token_BM") if self.shape.num_steps else ()
        self.reads = ("lane_row_B", "window_token_RA", "window_len_R", *drafted)

    def forward(self, v: Views) -> None:
        node_N = torch.arange(self.shape.num_draft_tokens, device=v.lane_row_B.device)
        v.node_token_BN[:, 0] = _root(v)
        if self.shape.num_steps:
            v.node_token_BN[:, 1:] = torch.where(v.candidate_score_BM > float("-inf"), v.candidate_token_BM, -1)
        v.node_parent_BN.copy_((node_N - 1).expand_as(v.node_parent_BN))
        v.node_depth_BN.copy_(node_N.expand_as(v.node_depth_BN))
        v.node_ancestors_BNX.copy_(
            causal_words(self.shape.num_draft_tokens, self.plan.num_words, node_N.device).expand_as(v.node_ancestors_BNX)
        )


def _root(v: Views) -> torch.Tensor:
    """The last entry of each lane's window: the token whose target KV does not exist yet, int64 ``[B]``."""
    row_B = v.lane_row_B
    last_B1 = (v.window_len_R[row_B] - 1).clamp(min=0)[:, None]
    return v.window_token_RA[row_B].gather(1, last_B1).squeeze(1)

"""Stages 3 and 4: the nodes, the best candidates of a tree or all of a chain, and one target forward over the nodes of every lane."""

from __future__ import annotations

from ...kernels.groups import Candidates, Nodes
from ...models.attention import TreeAttention
from ...models.recurrence import NodeRecords, RecurrentStates, TreeRecurrence
from ...plan.buffers import Views, pool_names
from .sampling import Scores
from .stage import Build, Stage, TargetModel


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


class Verify(Stage):
    """Target over the tree: KV at slot ``seq_len + n``, RoPE position ``seq_len + depth``, float32 logits, features for the drafter."""

    name = "verify"
    shared = True

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.target: TargetModel = build.target
        self.scores = Scores.of_target(build)
        self.pools = pool_names("target_kv", self.plan.target)
        nodes = ("node_token_BN", "node_depth_BN", "node_ancestors_BNX")
        self.reads = ("lane_row_B", "status_R", "seq_len_R", "lane_table_BP", *self.pools, *nodes)
        if self.plan.target.recurrent is not None:
            self.reads += ("node_parent_BN", *RecurrentStates._fields)
        records = NodeRecords._fields if self.plan.target.recurrent is not None else ()
        self.writes = (*self.pools, self.scores.slot, *records, *(("feature_BNF",) if self.plan.feature_width else ()))
        # The mask of a chain is causal.
        count = self.shape.num_draft_tokens
        self.bound = self.bind_call("target", "root", count, count) if self.shape.is_chain else None

    def forward(self, v: Views) -> None:
        token_BN, valid_BN, slot_BN, position_BN, begin_BN, end_B, ancestors_BNX = self.kernels.verify_rows(
            v.lane_row_B, v.status_R, v.seq_len_R, v.node_token_BN, v.node_depth_BN, v.node_ancestors_BNX
        )
        window = None
        if self.bound is None:
            window = self.kernels.own_window(v.lane_table_BP, self.plan.page_size, end_B, ancestors_BNX)
        recurrence = None
        if self.plan.target.recurrent is not None:
            recurrence = TreeRecurrence(
                self.kernels, v.take(RecurrentStates), v.take(NodeRecords), v.lane_row_B, v.node_parent_BN, ancestors_BNX,
                exact=self.plan.numerics != "fast",
            )  # fmt: skip
        attention = TreeAttention(
            kernels=self.kernels,
            kv_pool=v.target_kv,
            table_BP=v.lane_table_BP,
            position_BT=position_BN,
            valid_BT=valid_BN,
            slot_BT=slot_BN,
            begin_BT=begin_BN,
            prefix_end_B=end_B,
            ancestors_BTX=ancestors_BNX,
            own_window=window,
            bound=self.bound,
            recurrence=recurrence,
            further_pools=v.several(self.pools[1:]),
        )
        hidden_BNH, taps_BNF = self.target(token_BN, attention)
        self.scores.keep(v, self.target.logits(hidden_BNH))
        feature_BNF = self.feature(hidden_BNH, taps_BNF)
        if feature_BNF is not None:
            v.feature_BNF.copy_(feature_BNF)

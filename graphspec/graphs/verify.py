"""Stage 4, verify: one target forward over all nodes of every lane."""

from __future__ import annotations

import torch

from ..attention import TreeAttention
from ..buffers import Views
from .stage import Build, Stage, TargetModel


class Verify(Stage):
    """Target over the tree: KV at slot ``seq_len + n``, RoPE position ``seq_len + depth``, float32 logits, features for the drafter."""

    name = "verify"

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.target: TargetModel = build.target
        nodes = ("node_token_BN", "node_depth_BN", "node_ancestors_BNX")
        self.reads = ("lane_row_B", "status_R", "seq_len_R", "lane_table_BP", "target_kv", *nodes)
        self.writes = ("target_kv", "logits_BNV", *(("feature_BNF",) if self.plan.feature_width else ()))

    def forward(self, v: Views) -> None:
        row_B, live_B = self.rows(v)
        seq_B = v.seq_len_R[row_B]
        valid_BN = live_B[:, None] & (v.node_token_BN >= 0)
        node_N = torch.arange(self.shape.num_draft_tokens, device=row_B.device)
        position_BN = seq_B[:, None] + v.node_depth_BN
        table_BP = v.lane_table_BP
        ancestors_BNX = v.node_ancestors_BNX.masked_fill(~valid_BN[..., None], 0)
        attention = TreeAttention(
            kernels=self.kernels,
            kv_pool=v.target_kv,
            table_BP=table_BP,
            position_BT=position_BN,
            rope_length_BT=position_BN + 1,
            valid_BT=valid_BN,
            slot_BT=seq_B[:, None] + node_N,
            prefix_begin=0,
            prefix_end_B=seq_B,
            ancestors_BTX=ancestors_BNX,
            own_window=self.kernels.own_window(table_BP, self.plan.page_size, seq_B, ancestors_BNX),
        )
        hidden_BNH, taps_BNF = self.target(torch.where(valid_BN, v.node_token_BN, -1), attention)
        v.logits_BNV.copy_(self.target.logits(hidden_BNH))
        feature_BNF = self.feature(hidden_BNH, taps_BNF)
        if feature_BNF is not None:
            v.feature_BNF.copy_(feature_BNF)

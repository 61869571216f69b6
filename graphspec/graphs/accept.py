"""Stages 5 to 7: sample at every node, keep the matching path, move its KV, commit the row."""

from __future__ import annotations

import torch

from ..buffers import Status, Views
from .sampling import sample_tokens, target_noise
from .stage import Build, Stage


class Accept(Stage):
    """Sample, then match: the emitted tokens are the target's own samples, so the output does not depend on the draft.

    A run ends before the first token whose logits are not finite, and its row fails there, on the device; other rows, and nodes nobody
    accepted, do not matter.
    """

    name = "accept"
    reads = (
        "lane_row_B", "status_R", "seq_len_R", "temperature_R", "seed_R", "budget_R", "stop_id_RE", "draft_len_R",
        "logits_BNV", "node_token_BN", "node_parent_BN", "node_depth_BN", "node_ancestors_BNX",
    )  # fmt: skip
    writes = ("sample_BN", "path_BA", "accept_len_B", "outcome_B")

    def forward(self, v: Views) -> None:
        row_B, live_B = self.rows(v)
        seq_B = v.seq_len_R[row_B]
        noise_BNV = None
        if self.sampling:
            level_A = torch.arange(self.shape.num_steps + 1, device=row_B.device)
            noise_BAV = target_noise(self.kernels, v.seed_R[row_B], seq_B[:, None] + 1 + level_A, self.plan.target.vocab_size)
            noise_BNV = noise_BAV.gather(1, v.node_depth_BN[..., None].expand(v.logits_BNV.shape))
        v.sample_BN.copy_(sample_tokens(v.logits_BNV, noise_BNV, v.temperature_R[row_B]))

        cap_B = torch.minimum(v.draft_len_R[row_B], (self.plan.draft_context - seq_B).clamp(min=0))
        path_BA, length_B, reason_B = self.kernels.tree_walk(
            v.node_token_BN, v.node_parent_BN, v.node_depth_BN, v.node_ancestors_BNX, v.sample_BN, cap_B, v.budget_R[row_B],
            v.stop_id_RE[row_B], self.plan.accept_width,
        )  # fmt: skip
        entry_A = torch.arange(self.plan.accept_width, device=row_B.device)
        broken_BA = (~torch.isfinite(v.logits_BNV).all(-1)).gather(1, path_BA)
        sound_B = torch.where(broken_BA, entry_A, self.plan.accept_width).amin(-1)
        failed_B = live_B & (sound_B < length_B)
        v.path_BA.copy_(torch.where(live_B[:, None], path_BA, 0))
        v.accept_len_B.copy_(torch.where(live_B, torch.minimum(length_B, sound_B), 0))
        # tree_walk's reasons 0, 1, 2 are LIVE, STOPPED, LENGTH in this order.
        outcome_B = torch.where(failed_B, Status.FAILED, torch.where(live_B, reason_B + Status.LIVE, v.status_R[row_B]))
        v.outcome_B.copy_(outcome_B)


class CommitState(Stage):
    """Keep the accepted path: its KV moves to consecutive slots, all layers at once. Chains need no move."""

    name = "commit_state"
    reads = ("lane_row_B", "seq_len_R", "page_table_RP", "path_BA", "accept_len_B", "target_kv")
    writes = ("target_kv",)

    def forward(self, v: Views) -> None:
        row_B = v.lane_row_B
        self.kernels.kv_move(v.target_kv, v.page_table_RP[row_B], v.seq_len_R[row_B], v.path_BA, v.accept_len_B)


class Commit(Stage):
    """``seq_len += accept_len``, the next window along the path, the output ring, the status."""

    name = "commit"

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        features = ("feature_BNF", "window_feature_RAF") if self.plan.feature_width else ()
        state = ("seq_len_R", "window_token_RA", "window_len_R", "budget_R", "cycle_1")
        self.reads = ("lane_row_B", "sample_BN", "path_BA", "accept_len_B", "outcome_B", *state, *features)
        self.writes = (*state, "status_R", *features[1:], "ring_ZBJ")

    def forward(self, v: Views) -> None:
        row_B, length_B = v.lane_row_B, v.accept_len_B
        entry_A = torch.arange(self.plan.accept_width, device=row_B.device)
        valid_BA = entry_A < length_B[:, None]
        token_BA = torch.where(valid_BA, v.sample_BN.gather(1, v.path_BA), -1)

        slot_1 = v.cycle_1 % self.plan.ring_depth
        v.ring_ZBJ.index_copy_(0, slot_1, torch.cat([length_B[:, None], v.outcome_B[:, None], token_BA], 1)[None])
        v.cycle_1.add_(1)

        # Inert lanes write back what stands there, so that lanes sharing the dummy row agree on its value.
        moved_B = length_B > 0
        v.window_token_RA.index_copy_(0, row_B, torch.where(moved_B[:, None], token_BA, v.window_token_RA[row_B]))
        if self.plan.feature_width:
            feature_BAF = v.feature_BNF.gather(1, v.path_BA[..., None].expand(-1, -1, v.feature_BNF.shape[-1]))
            feature_BAF = torch.where(valid_BA[..., None], feature_BAF, 0)
            v.window_feature_RAF.index_copy_(0, row_B, torch.where(moved_B[:, None, None], feature_BAF, v.window_feature_RAF[row_B]))
        v.window_len_R.index_copy_(0, row_B, torch.where(moved_B, length_B, v.window_len_R[row_B]))
        v.seq_len_R.index_copy_(0, row_B, v.seq_len_R[row_B] + length_B)
        v.budget_R.index_copy_(0, row_B, v.budget_R[row_B] - length_B)
        v.status_R.index_copy_(0, row_B, v.outcome_B)

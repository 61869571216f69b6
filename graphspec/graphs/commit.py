"""Stages 6 and 7: the accepted path's KV moves to where it belongs, and the row is committed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..buffers import Views
from .stage import Build, Stage


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
        lookback = ("lookback_token_RY", "lookback_feature_RYF") if self.plan.lookback else ()
        history = ("history_RL",) if self.plan.keeps_history else ()
        state = ("seq_len_R", "window_token_RA", "window_len_R", "budget_R", "cycle_1", *lookback, *history)
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
        if self.plan.lookback:
            self._look_back(v, moved_B)
        if self.plan.keeps_history:
            self._remember(v, token_BA, valid_BA)
        v.window_token_RA.index_copy_(0, row_B, torch.where(moved_B[:, None], token_BA, v.window_token_RA[row_B]))
        if self.plan.feature_width:
            feature_BAF = v.feature_BNF.gather(1, v.path_BA[..., None].expand(-1, -1, v.feature_BNF.shape[-1]))
            feature_BAF = torch.where(valid_BA[..., None], feature_BAF, 0)
            v.window_feature_RAF.index_copy_(0, row_B, torch.where(moved_B[:, None, None], feature_BAF, v.window_feature_RAF[row_B]))
        v.window_len_R.index_copy_(0, row_B, torch.where(moved_B, length_B, v.window_len_R[row_B]))
        v.seq_len_R.index_copy_(0, row_B, v.seq_len_R[row_B] + length_B)
        v.budget_R.index_copy_(0, row_B, v.budget_R[row_B] - length_B)
        v.status_R.index_copy_(0, row_B, v.outcome_B)

    def _look_back(self, v: Views, moved_B: Tensor) -> None:
        """The last Y entries before the new window: the tail of the old lookback and the old window, which lie side by side."""
        row_B = v.lane_row_B
        entry_Y = torch.arange(self.plan.lookback, device=row_B.device)
        index_BY = torch.where(moved_B, v.window_len_R[row_B], 0)[:, None] + entry_Y
        token_BU = torch.cat((v.lookback_token_RY[row_B], v.window_token_RA[row_B]), 1)
        feature_BUF = torch.cat((v.lookback_feature_RYF[row_B], v.window_feature_RAF[row_B]), 1)
        v.lookback_token_RY.index_copy_(0, row_B, token_BU.gather(1, index_BY))
        index_BYF = index_BY[..., None].expand(-1, -1, feature_BUF.shape[-1])
        v.lookback_feature_RYF.index_copy_(0, row_B, feature_BUF.gather(1, index_BYF))

    def _remember(self, v: Views, token_BA: Tensor, valid_BA: Tensor) -> None:
        """Append the run to the row's own tokens; what is not part of it goes back unchanged."""
        row_B = v.lane_row_B
        entry_A = torch.arange(self.plan.accept_width, device=row_B.device)
        position_BA = (v.seq_len_R[row_B][:, None] + 1 + entry_A).clamp(max=self.plan.max_positions - 1)
        kept_BA = v.history_RL[row_B].gather(1, position_BA)
        v.history_RL.index_put_((row_B[:, None].expand_as(position_BA), position_BA), torch.where(valid_BA, token_BA, kept_BA))

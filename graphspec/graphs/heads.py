"""Stages 1 and 2 for drafters with one head per step: every head runs over the same rows, on the output of the head before it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..buffers import Views
from .draft import DraftStage
from .stage import Build


def shifted_rows(token_BU: Tensor, known_B: Tensor, drafted_Bs: Tensor) -> Tensor:
    """Tokens that rows consume when they look ``s`` tokens further: row r takes entry r + s, where the known entries end the drafted begin.

    Args:
        token_BU: int64, entries a row at s = 0 consumes; the first ``known_B`` of each lane are tokens.
        known_B: int64.
        drafted_Bs: int64 ``[B, s]``.

    Returns:
        int64 ``[B, U]``; -1 past the last drafted token.
    """
    width, ahead = token_BU.shape[1], drafted_Bs.shape[1]
    if ahead == 0:
        return token_BU
    entry_BU = torch.arange(ahead, ahead + width, device=token_BU.device).expand_as(token_BU)
    known_BU = token_BU.gather(1, entry_BU.clamp(max=width - 1))
    behind_BU = entry_BU - known_B[:, None]
    drafted_BU = drafted_Bs.gather(1, behind_BU.clamp(0, ahead - 1))
    return torch.where(behind_BU < 0, known_BU, torch.where(behind_BU < ahead, drafted_BU, -1))


class HeadSteps(DraftStage):
    """A chain of S heads (DeepSeek-V3, arXiv 2412.19437, section 2.2): head s reads token i + s beside head s - 1's output at row i.

    Row i of head s depends on token i + s, which was only drafted when the row was first computed. So the Y = heads - 1 rows before the
    window run again, on the tokens that were committed since; the heads' KV ahead of them is final.
    """

    name = "head_steps"
    reads = (
        "lane_row_B", "status_R", "seq_len_R", "window_len_R", "window_token_RA", "window_feature_RAF", "lookback_token_RY",
        "lookback_feature_RYF", "page_table_RP", "draft_kv",
    )  # fmt: skip
    writes = ("draft_kv", "candidate_score_BM", "candidate_token_BM", "candidate_parent_BM")

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.width = self.plan.lookback + self.plan.accept_width

    def forward(self, v: Views) -> None:
        row_B, live_B = self.rows(v)
        seq_B = v.seq_len_R[row_B]
        length_B = torch.where(live_B, v.window_len_R[row_B], 0)
        entry_U = torch.arange(self.width, device=row_B.device)
        begin_B = seq_B - length_B + 1 - self.plan.lookback
        # A short prompt has fewer than Y tokens to look back on: the rows begin at the first token the drafter consumes.
        skip_B = (self.shift - begin_B).clamp(min=0)
        begin_B = begin_B + skip_B
        known_B = torch.where(live_B, self.plan.lookback + length_B - skip_B, 0)
        valid_BU = entry_U < known_B[:, None]
        index_BU = (entry_U + skip_B[:, None]).clamp(max=self.width - 1)
        token_BU = torch.cat((v.lookback_token_RY[row_B], v.window_token_RA[row_B]), 1).gather(1, index_BU)
        feature_BUF = torch.cat((v.lookback_feature_RYF[row_B], v.window_feature_RAF[row_B]), 1)
        feature_BUF = feature_BUF.gather(1, index_BU[..., None].expand(-1, -1, feature_BUF.shape[-1]))
        slot_BU = begin_B[:, None] + entry_U
        attention = self.attend(v, slot_BU - self.shift, valid_BU, slot_BU, begin_B, self.causal(self.width, row_B))

        hidden_BUH = self.draft.fuse(torch.where(valid_BU[..., None], feature_BUF, 0))
        last_B11 = (known_B - 1).clamp(min=0)[:, None, None]
        drafted_Bs = token_BU[:, :0]
        score_B = torch.where(live_B, 0.0, float("-inf"))
        for step in range(self.shape.num_steps):
            consumed_BU = torch.where(valid_BU, shifted_rows(token_BU, known_B, drafted_Bs), -1)
            hidden_BUH = self.draft(consumed_BU, hidden_BUH.masked_fill(~valid_BU[..., None], 0), attention, step)
            last_B1H = hidden_BUH.gather(1, last_B11.expand(-1, 1, hidden_BUH.shape[-1]))
            increment_BTK, next_BTK = self.propose(v, last_B1H, seq_B + step + 1, drafted_Bs[:, None], step + 1)
            score_B = score_B + increment_BTK[:, 0, 0]
            v.candidate_score_BM[:, step] = score_B
            v.candidate_token_BM[:, step] = next_BTK[:, 0, 0]
            v.candidate_parent_BM[:, step] = step - 1
            drafted_Bs = torch.cat((drafted_Bs, next_BTK[:, 0]), 1)

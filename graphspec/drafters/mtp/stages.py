"""Stages 1 and 2 for drafters with one head per step: every head runs over the same rows, on the output of the head before it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...graphs.stages.prefill import ChunkRows, DraftPrefill
from ...graphs.stages.stage import Build, Stage
from ...kernels.groups import Beams
from ...kernels.host_step import BoundCall
from ...plan.buffers import Views
from ..heads.beams import DraftStage, beam_stages


def shifted_rows(token_BU: Tensor, known_B: Tensor, drafted_Bs: Tensor) -> Tensor:
    """Tokens that the rows of head ``s`` consume: row r takes entry r + s of the known tokens followed by the drafted ones.

    Args:
        token_BU: int64, the tokens that rows consume at s = 0; the first ``known_B`` of each lane are known.
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
    after_BU = entry_BU - known_B[:, None]
    drafted_BU = drafted_Bs.gather(1, after_BU.clamp(0, ahead - 1))
    return torch.where(after_BU < 0, known_BU, torch.where(after_BU < ahead, drafted_BU, -1))


class HeadSteps(DraftStage):
    """A chain of S heads (DeepSeek-V3, arXiv 2412.19437, section 2.2): head s reads token i + s and head s - 1's output at row i.

    Row i of head s depends on token i + s, which was only a draft when the row was first computed. So the Y = heads - 1 rows before the
    window are computed again from the tokens committed since; the heads' KV before these rows is final.
    """

    name = "head_steps"
    reads = (*DraftStage.reads, "lookback_token_RY", "lookback_feature_RYF")

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        if self.shape.num_steps > 1:
            self.writes = (*self.writes, *Beams._fields)

    def forward(self, v: Views) -> None:
        token_BU, valid_BU, slot_BU, position_BU, begin_B, ancestors_BUX, known_B, next_B, feature_BUF = self.last_run(v)
        attention = self.attend(v, position_BU, valid_BU, slot_BU, begin_B, ancestors_BUX)
        hidden_BUH = self.draft.fuse(feature_BUF)
        last_B11 = (known_B - 1).clamp(min=0)[:, None, None]
        for step in range(self.shape.num_steps):
            drafted_Bs = v.beam_path_BKS[:, 0, :step]
            consumed_BU = torch.where(valid_BU, shifted_rows(token_BU, known_B, drafted_Bs), -1)
            hidden_BUH = self.draft(consumed_BU, hidden_BUH.masked_fill(~valid_BU[..., None], 0), attention, step)
            last_B1H = hidden_BUH.gather(1, last_B11.expand(-1, 1, hidden_BUH.shape[-1]))
            position_B = v.next_position_B if step else next_B
            increment_BTK, next_BTK = self.propose(v, last_B1H, position_B, drafted_Bs[:, None], step + 1)
            self.level(v, increment_BTK, next_BTK, step + 1)


class HeadPrefill(DraftPrefill):
    """Writes the KV of every head, for drafters with one head per step."""

    carried = ("lookback_token_RY", "lookback_feature_RYF")

    def write(self, v: Views, chunk: ChunkRows, before_BCF: Tensor) -> None:
        """Run every head over the lookback and the chunk; a row whose token is in the next chunk is computed with that chunk.

        The Y rows before the chunk are computed again: the first time, heads after the first lacked the tokens of this chunk. Rows in
        shared pages are not: they are final, since the Y tokens after them are part of the page's key.
        """
        lookback, row_B = self.plan.lookback, chunk.row_B
        width = lookback + chunk.token_BC.shape[1]
        entry_U = torch.arange(width, device=row_B.device)
        begin_B = chunk.start_B - lookback
        skip_B = (chunk.shared_B.clamp(min=self.shift) - begin_B).clamp(min=0)
        known_B = (lookback + chunk.length_B - skip_B).clamp(min=0)
        index_BU = (entry_U + skip_B[:, None]).clamp(max=width - 1)
        token_BU = torch.cat((v.lookback_token_RY[row_B], chunk.token_BC), 1)
        feature_BUF = torch.cat((v.lookback_feature_RYF[row_B], before_BCF), 1)

        slot_BU = (begin_B + skip_B)[:, None] + entry_U
        shifted_BU, index_BUF = token_BU.gather(1, index_BU), index_BU[..., None].expand_as(feature_BUF)
        is_known_BU1 = (entry_U < known_B[:, None])[..., None]
        hidden_BUH = self.network.fuse(torch.where(is_known_BU1, feature_BUF.gather(1, index_BUF), 0))
        rope_length_BU = torch.maximum(chunk.rope_length_BC[:, :1], slot_BU + 1)
        for step in range(self.plan.lookback + 1):
            valid_BU = entry_U < (known_B - step)[:, None]
            consumed_BU = shifted_rows(shifted_BU, known_B, shifted_BU.new_full((len(row_B), step), -1))
            hidden_BUH = hidden_BUH.masked_fill(~valid_BU[..., None], 0)
            consumed_BU = torch.where(valid_BU, consumed_BU, -1)
            attention = self.attention(v, chunk, valid_BU, slot_BU, rope_length_BU)
            if step == self.plan.lookback:
                self.network.write_kv(consumed_BU, hidden_BUH, attention, step)
            else:
                hidden_BUH = self.network(consumed_BU, hidden_BUH, attention, step)

        # The last Y entries before the chunk's end.
        tail_BY = chunk.length_B[:, None] + torch.arange(lookback, device=row_B.device)
        v.lookback_token_RY.index_copy_(0, row_B, token_BU.gather(1, tail_BY))
        tail_BYF = tail_BY[..., None].expand(-1, -1, feature_BUF.shape[-1])
        v.lookback_feature_RYF.index_copy_(0, row_B, feature_BUF.gather(1, tail_BYF))


def head_stages(build: Build) -> list[Stage]:
    """One head per step, or a single head over beams."""
    return [HeadSteps(build)] if build.plan.lookback else beam_stages(build)


def head_prefill(build: Build, bound: Mapping[int | None, BoundCall]) -> DraftPrefill:
    """See :attr:`graphspec.config.catalog.Variant.prefill`."""
    return (HeadPrefill if build.plan.lookback else DraftPrefill)(build, bound)

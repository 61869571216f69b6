"""The drafter's side of prefill: draft KV of a chunk, and what the next chunk or the first cycle needs of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...buffers import Views
from ...kernels.host_step import BoundCall
from ...models.attention import ChunkAttention
from .heads import shifted_rows
from .stage import Build, DraftModel


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """A chunk as prefill sees it; everything is ``[1, C]``, numbers are ``[1]`` int64."""

    row_1: Tensor
    token_1C: Tensor
    """int64, -1 where not valid."""
    valid_1C: Tensor
    slot_1C: Tensor
    rope_length_1C: Tensor
    table_1P: Tensor
    start_1: Tensor
    length_1: Tensor


class DraftPrefill:
    """Runs the drafter over a chunk, for its KV alone: nothing is proposed after a prompt's tokens, so the last layer ends at its KV.

    The row that consumes token j takes the target's feature of j - 1. The feature of a chunk's last token therefore waits in entry 0 of the
    row's window for the next chunk's first token, or for the root.

    Args:
        build: what every stage gets.
        bound: attention of the chunk by kernels with a host step, where the drafter attends at all.
    """

    def __init__(self, build: Build, bound: Mapping[int | None, BoundCall]) -> None:
        assert build.draft is not None, "a draft network"
        self.plan, self.kernels = build.plan, build.kernels
        self.network: DraftModel = build.draft
        self.shift = build.plan.variant.shift
        lookback = ("lookback_token_RY", "lookback_feature_RYF") if self.plan.lookback else ()
        features = ("window_feature_RAcF",) if self.plan.feature_width else ()
        carried = (*features, *lookback)
        self.reads = ("draft_kv", *carried) if build.plan.draft_attends else carried
        self.writes = ("draft_kv", *carried)
        self.bound = bound

    def __call__(self, v: Views, chunk: ChunkRows, feature_1CF: Tensor | None) -> None:
        """Write the chunk's draft KV and carry on what the next rows need; ``feature_1CF`` is the target's, where the drafter reads it."""
        if feature_1CF is None:
            attention = self._attention(v, chunk, chunk.valid_1C, chunk.slot_1C, chunk.rope_length_1C)
            self.network.write_kv(chunk.token_1C, None, attention)
            return
        before_1CF = torch.cat([v.window_feature_RAcF[chunk.row_1][:, :1], feature_1CF[:, :-1]], 1)
        if self.plan.lookback:
            self._heads(v, chunk, before_1CF)
        else:
            valid_1C = chunk.valid_1C & (chunk.slot_1C >= self.shift)
            hidden_1CH = self.network.fuse(torch.where(valid_1C[..., None], before_1CF, 0))
            attention = self._attention(v, chunk, valid_1C, chunk.slot_1C, chunk.rope_length_1C)
            self.network.write_kv(torch.where(valid_1C, chunk.token_1C, -1), hidden_1CH, attention)
        entry_Ac1 = torch.arange(self.plan.window_capacity, device=chunk.row_1.device)[:, None]
        last_1 = (chunk.length_1 - 1).clamp(min=0)
        carry_1AcF = torch.where(entry_Ac1 == 0, feature_1CF.index_select(1, last_1), 0)
        v.window_feature_RAcF.index_copy_(0, chunk.row_1, carry_1AcF)

    def _attention(self, v: Views, chunk: ChunkRows, valid_1T: Tensor, slot_1T: Tensor, rope_length_1T: Tensor) -> ChunkAttention:
        return ChunkAttention(
            self.kernels, v.draft_kv, chunk.table_1P, slot_1T - self.shift, rope_length_1T - self.shift, valid_1T, slot_1T, self.shift,
            self.bound,
        )  # fmt: skip

    def _heads(self, v: Views, chunk: ChunkRows, before_1CF: Tensor) -> None:
        """Every head over the lookback and the chunk; a row whose token lies in the next chunk waits for it.

        The Y rows before the chunk run again: when they were computed, heads past the first lacked the tokens of this chunk.
        """
        lookback, row_1 = self.plan.lookback, chunk.row_1
        width = lookback + chunk.token_1C.shape[1]
        entry_U = torch.arange(width, device=row_1.device)
        begin_1 = chunk.start_1 - lookback
        skip_1 = (self.shift - begin_1).clamp(min=0)
        known_1 = (lookback + chunk.length_1 - skip_1).clamp(min=0)
        index_1U = (entry_U + skip_1).clamp(max=width - 1)[None]
        token_1U = torch.cat((v.lookback_token_RY[row_1], chunk.token_1C), 1)
        feature_1UF = torch.cat((v.lookback_feature_RYF[row_1], before_1CF), 1)

        slot_1U = (begin_1 + skip_1 + entry_U)[None]
        shifted_1U, index_1UF = token_1U.gather(1, index_1U), index_1U[..., None].expand_as(feature_1UF)
        hidden_1UH = self.network.fuse(torch.where((entry_U < known_1)[None, :, None], feature_1UF.gather(1, index_1UF), 0))
        rope_length_1U = torch.maximum(chunk.rope_length_1C[:, :1], slot_1U + 1)
        for step in range(self.plan.lookback + 1):
            valid_1U = (entry_U < known_1 - step)[None]
            consumed_1U = shifted_rows(shifted_1U, known_1, shifted_1U.new_full((1, step), -1))
            hidden_1UH = hidden_1UH.masked_fill(~valid_1U[..., None], 0)
            consumed_1U = torch.where(valid_1U, consumed_1U, -1)
            attention = self._attention(v, chunk, valid_1U, slot_1U, rope_length_1U)
            if step == self.plan.lookback:
                self.network.write_kv(consumed_1U, hidden_1UH, attention, step)
            else:
                hidden_1UH = self.network(consumed_1U, hidden_1UH, attention, step)

        # The last Y entries so far: those before the chunk's end.
        tail_1Y = (chunk.length_1 + torch.arange(lookback, device=row_1.device))[None]
        v.lookback_token_RY.index_copy_(0, row_1, token_1U.gather(1, tail_1Y))
        tail_1YF = tail_1Y[..., None].expand(-1, -1, feature_1UF.shape[-1])
        v.lookback_feature_RYF.index_copy_(0, row_1, feature_1UF.gather(1, tail_1YF))

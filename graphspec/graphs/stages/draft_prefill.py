"""The drafter's side of prefill: draft KV of a chunk, and what the next chunk or the first cycle needs of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...buffers import Views
from ...kernels.host_step import BoundCall
from ...models.attention import ChunkAttention
from .page_features import page_feature, save_page_features
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
    shared_1: Tensor
    """Tokens before the first chunk; their rows are in the pools and may not be written."""


class DraftPrefill:
    """Runs the drafter over a chunk, for its KV alone: nothing is proposed after a prompt's tokens, so the last layer ends at its KV.

    The row that consumes token j takes the target's feature of j - 1. The feature of a chunk's last token therefore waits in entry 0 of the
    row's window for the next chunk's first token, or for the root. That of a page's last token is kept with the page, for rows whose first
    chunk begins after it.

    Args:
        build: what every stage gets.
        bound: attention of the chunk by kernels with a host step, where the drafter attends at all.
    """

    carried: ClassVar[tuple[str, ...]] = ()
    """Slots that a chunk leaves to the next rows, in addition to the window's."""

    def __init__(self, build: Build, bound: Mapping[int | None, BoundCall]) -> None:
        assert build.draft is not None, "a draft network"
        self.plan, self.kernels = build.plan, build.kernels
        self.network: DraftModel = build.draft
        self.shift = build.plan.variant.shift
        features = ("window_feature_RAcF", *(("page_feature",) if self.plan.prefix_cache else ())) if self.plan.feature_width else ()
        carried = (*features, *self.carried)
        self.reads = ("draft_kv", *carried) if build.plan.draft_attends else carried
        self.writes = ("draft_kv", *carried)
        self.bound = bound

    def __call__(self, v: Views, chunk: ChunkRows, feature_1CF: Tensor | None) -> None:
        """Write the chunk's draft KV and carry on what the next rows need; ``feature_1CF`` is the target's, where the drafter reads it."""
        if feature_1CF is None:
            attention = self.attention(v, chunk, chunk.valid_1C, chunk.slot_1C, chunk.rope_length_1C)
            self.network.write_kv(chunk.token_1C, None, attention)
            return
        first_11F = v.window_feature_RAcF[chunk.row_1][:, :1]
        if self.plan.prefix_cache:
            takes_over_1 = (chunk.shared_1 > 0) & (chunk.start_1 == chunk.shared_1)
            first_11F = torch.where(takes_over_1[:, None, None], page_feature(v, chunk.table_1P, chunk.shared_1), first_11F)
            save_page_features(v, chunk.table_1P, chunk.start_1, chunk.length_1, feature_1CF)
        before_1CF = torch.cat([first_11F, feature_1CF[:, :-1]], 1)
        self.write(v, chunk, before_1CF)
        entry_Ac1 = torch.arange(self.plan.window_capacity, device=chunk.row_1.device)[:, None]
        last_1 = (chunk.length_1 - 1).clamp(min=0)
        carry_1AcF = torch.where(entry_Ac1 == 0, feature_1CF.index_select(1, last_1), 0)
        v.window_feature_RAcF.index_copy_(0, chunk.row_1, carry_1AcF)

    def write(self, v: Views, chunk: ChunkRows, before_1CF: Tensor) -> None:
        """Write the chunk's draft KV; ``before_1CF`` is the feature of the token before each."""
        valid_1C = chunk.valid_1C & (chunk.slot_1C >= self.shift)
        hidden_1CH = self.network.fuse(torch.where(valid_1C[..., None], before_1CF, 0))
        attention = self.attention(v, chunk, valid_1C, chunk.slot_1C, chunk.rope_length_1C)
        self.network.write_kv(torch.where(valid_1C, chunk.token_1C, -1), hidden_1CH, attention)

    def attention(self, v: Views, chunk: ChunkRows, valid_1T: Tensor, slot_1T: Tensor, rope_length_1T: Tensor) -> ChunkAttention:
        """Attention of rows ``[1, T]`` over the row's draft KV."""
        return ChunkAttention(
            self.kernels, v.draft_kv, chunk.table_1P, slot_1T - self.shift, rope_length_1T - self.shift, valid_1T, slot_1T, self.shift,
            self.bound,
        )  # fmt: skip

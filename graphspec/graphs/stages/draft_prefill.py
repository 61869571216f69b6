"""The drafter's side of prefill: draft KV of a chunk, and what the next chunk or the first cycle needs of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels.host_step import BoundCall
from ...models.attention import ChunkAttention
from ...plan.buffers import Views, own_draft_pools
from .stage import Build, DraftModel


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The chunks of a launch, one per lane, as prefill sees them. Numbers are int64; a lane that is not used has a length of 0."""

    row_B: Tensor
    token_BC: Tensor
    """int64, -1 where not valid."""
    valid_BC: Tensor
    slot_BC: Tensor
    rope_length_BC: Tensor
    table_BP: Tensor
    start_B: Tensor
    length_B: Tensor
    shared_B: Tensor
    """Tokens before the first chunk; their rows are in the pools and may not be written."""


def take_last(rows_BCE: Tensor, length_B: Tensor) -> Tensor:
    """The last valid entry of each lane, ``[B, 1, E]``; the first of a lane without any."""
    last_B11 = (length_B - 1).clamp(min=0)[:, None, None]
    return rows_BCE.gather(1, last_B11.expand(-1, 1, rows_BCE.shape[-1]))


def page_feature(v: Views, table_BP: Tensor, end_B: Tensor) -> Tensor:
    """Features ``[B, 1, F]`` of the tokens before the positions ``end_B``, each of which begins a page; the dummy page's where it is 0."""
    column_B1 = (end_B[:, None] // v.target_kv.shape[3] - 1).clamp(min=0)
    page_B1 = torch.where(end_B[:, None] > 0, table_BP.gather(1, column_B1).long(), 0)
    return v.page_feature[0, 0, :, 0, 0][page_B1]


class DraftPrefill:
    """Runs the drafter over chunks, for their KV alone: nothing is proposed after a prompt's tokens, so the last layer ends at its KV.

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
        features = ("window_feature_RAcF", *(("page_feature",) if self.plan.keeps_page_features else ())) if self.plan.feature_width else ()
        carried = (*features, *self.carried)
        self.pools = own_draft_pools(self.plan)
        self.reads = (*self.pools, *carried) if build.plan.draft_attends else carried
        self.writes = (*self.pools, *carried)
        self.bound = bound

    def __call__(self, v: Views, chunk: ChunkRows, feature_BCF: Tensor | None) -> None:
        """Write the chunk's draft KV and carry on what the next rows need; ``feature_BCF`` is the target's, where the drafter reads it."""
        if feature_BCF is None:
            attention = self.attention(v, chunk, chunk.valid_BC, chunk.slot_BC, chunk.rope_length_BC)
            self.network.write_kv(chunk.token_BC, None, attention)
            return
        first_B1F = v.window_feature_RAcF[chunk.row_B][:, :1]
        if self.plan.keeps_page_features:
            takes_over_B = (chunk.shared_B > 0) & (chunk.start_B == chunk.shared_B)
            first_B1F = torch.where(takes_over_B[:, None, None], page_feature(v, chunk.table_BP, chunk.shared_B), first_B1F)
            size = self.plan.page_size
            self.kernels.page_feature_write(v.page_feature, size, chunk.table_BP, chunk.start_B, chunk.length_B, feature_BCF)
        self.write(v, chunk, torch.cat([first_B1F, feature_BCF[:, :-1]], 1))
        self.carry(v, chunk, feature_BCF)

    def carry(self, v: Views, chunk: ChunkRows, feature_BCF: Tensor) -> None:
        """Leave the feature of the chunk's last token to the row that consumes the token after it."""
        entry_Ac1 = torch.arange(self.plan.window_capacity, device=chunk.row_B.device)[:, None]
        carry_BAcF = torch.where(entry_Ac1 == 0, take_last(feature_BCF, chunk.length_B), 0)
        v.window_feature_RAcF.index_copy_(0, chunk.row_B, carry_BAcF)

    def write(self, v: Views, chunk: ChunkRows, before_BCF: Tensor) -> None:
        """Write the chunk's draft KV; ``before_BCF`` is the feature of the token before each."""
        valid_BC = chunk.valid_BC & (chunk.slot_BC >= self.shift)
        hidden_BCH = self.network.fuse(torch.where(valid_BC[..., None], before_BCF, 0))
        attention = self.attention(v, chunk, valid_BC, chunk.slot_BC, chunk.rope_length_BC)
        self.network.write_kv(torch.where(valid_BC, chunk.token_BC, -1), hidden_BCH, attention)

    def attention(self, v: Views, chunk: ChunkRows, valid_BT: Tensor, slot_BT: Tensor, rope_length_BT: Tensor) -> ChunkAttention:
        """Attention of rows ``[B, T]`` over the row's draft KV."""
        pool, *further_pools = v.several(self.pools)
        return ChunkAttention(
            self.kernels, pool, chunk.table_BP, slot_BT - self.shift, rope_length_BT - self.shift, valid_BT, slot_BT, self.shift,
            self.bound, further_pools=tuple(further_pools),
        )  # fmt: skip

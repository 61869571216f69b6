"""What the stages that run a draft network share."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ...kernels.host_step import BoundCall
from ...models.attention import TreeAttention
from ...plan.buffers import Views, draft_pools, own_draft_pools
from .stage import Build, DraftModel, Stage


class NetworkStage(Stage):
    """What the stages that run a draft network share."""

    feature_reads: ClassVar[tuple[str, ...]] = ()
    feature_writes: ClassVar[tuple[str, ...]] = ()
    """Slots that a drafter without features of the target neither has nor needs."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        assert build.draft is not None, "a draft stage needs a draft network"
        self.draft: DraftModel = build.draft
        self.shift = build.plan.variant.shift
        self.pools = draft_pools(self.plan)
        featured = self.plan.feature_width > 0
        self.reads = (*self.reads, *self.pools_read(), *(self.feature_reads if featured else ()))
        self.writes = (*self.writes, *own_draft_pools(self.plan), *(self.feature_writes if featured else ()))

    def pools_read(self) -> tuple[str, ...]:
        """The slots of KV pools that the stage reads."""
        return self.pools

    def attend(
        self,
        v: Views,
        position_BT: Tensor,
        valid_BT: Tensor,
        slot_BT: Tensor,
        prefix_end_B: Tensor,
        ancestors_BTX: Tensor,
        own_window: tuple[Tensor, Tensor] | None = None,
        bound: BoundCall | None = None,
    ) -> TreeAttention:
        """Attention over the row's KV in the drafter's pools, from the first consumed token on; the words of invalid tokens are 0.

        ``own_window``: the same visibility as a prefix's end and words over the slots of these tokens, where that is possible.
        ``bound``: the same attention over latent rows, by a kernel with a host step.
        """
        window = None
        # A drafter that skips tokens leaves their slots unwritten, and such a kernel sees the prefix from slot 0 on.
        if own_window is not None and self.shift == 0 and bound is None:
            window = self.kernels.own_window(v.lane_table_BP, self.plan.page_size, *own_window)
        pool, *further_pools = v.several(self.pools)
        return TreeAttention(
            kernels=self.kernels,
            kv_pool=pool,
            table_BP=v.lane_table_BP,
            position_BT=position_BT,
            valid_BT=valid_BT,
            slot_BT=slot_BT,
            begin_BT=v.draft_begin_1.expand(position_BT.shape),
            prefix_end_B=prefix_end_B,
            ancestors_BTX=ancestors_BTX,
            own_window=window,
            bound=bound,
            further_pools=tuple(further_pools),
        )

    def window(self, v: Views, width: int, num_words: int) -> tuple[Tensor, ...]:
        """The committed entries the drafter has not read yet; results of :func:`~graphspec.kernels.tree.draft_window.draft_window`."""
        return self.kernels.draft_window(v.lane_row_B, v.status_R, v.seq_len_R, self.window_slots(v), self.shift, width, num_words)

"""What a stage is: a module with declared reads and writes over static buffers. Stages know nothing of capture or compilation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from torch import Tensor, nn

from ...errors import GraphspecError
from ...facts import ModelFacts
from ...kernels.groups import Window
from ...kernels.host_step import Anchor, BoundCall, HeadShape, PreparedCall
from ...kernels.registry import KernelSet
from ...models.attention import Attention, TreeAttention
from ...models.recurrence import Convolution
from ...plan.buffers import Status, Views, draft_pools, own_draft_pools
from ...plan.plan import Plan
from ...shapes import CycleShape, SamplingClass
from ..grammar import Grammar


class TargetModel(Protocol):
    """What the stages ask of a target network (:mod:`graphspec.models.decoder`)."""

    def __call__(self, token_BT: Tensor, attention: Attention) -> tuple[Tensor, Tensor | None]: ...

    def stacked_convolution(self) -> Convolution:
        """Weights of the convolutions of all recurrent layers; asked of targets that have them."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[..., V]``; where ranks have a part of the head each, this one's columns (:class:`.sampling.Scores`)."""
        ...


class DraftModel(Protocol):
    """What the stages ask of a draft network (``network`` in the folders of :mod:`graphspec.drafters`)."""

    @property
    def target_token_Vd(self) -> Tensor | None: ...

    def __call__(self, token_BT: Tensor, hidden_BTH: Tensor | None, attention: Attention, step: int = 0) -> Tensor:
        """What the next step takes as its hidden state, and :meth:`logits` too; ``step`` counts from 0 and chooses among several heads.

        ``hidden_BTH`` is None if the drafter reads tokens only.
        """
        ...

    def write_kv(self, token_BT: Tensor, hidden_BTH: Tensor | None, attention: Attention, step: int = 0) -> None:
        """The KV that a call would write, for tokens after which nothing is proposed."""
        ...

    def fuse(self, feature_BTF: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """float32 ``[..., Vd]``, as of :class:`TargetModel`."""
        ...


@dataclass(frozen=True, slots=True)
class Build:
    """All a stage may know when it is built."""

    plan: Plan
    kernels: KernelSet
    target: TargetModel
    draft: DraftModel | None
    shape: CycleShape
    sampling: SamplingClass


def head_shape(facts: ModelFacts) -> HeadShape:
    """Heads of a network, as attention kernels are built for them."""
    if facts.latent is None:
        return HeadShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, 0, facts.head_dim**-0.5)
    return HeadShape(facts.num_heads, 1, facts.latent.rank, facts.latent.rope_dim, facts.latent.scale)


class Stage(nn.Module):
    """One step of the cycle: reads and writes slots in place, returns nothing, never reads a value on the host."""

    name: ClassVar[str]
    shared: ClassVar[bool] = False
    """Its work depends on what requests ask of the sampler only as far as its slots do: it is compiled once for all classes."""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    prepared_calls: tuple[PreparedCall, ...] = ()
    """Attention calls that need a host step before each launch, from the row lengths of that launch."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.plan, self.kernels, self.shape, self.sampling = build.plan, build.kernels, build.shape, build.sampling

    def forward(self, v: Views) -> None:
        raise NotImplementedError

    def bind_call(self, pool: Literal["target", "draft"], anchor: Anchor, extent: int, tokens: int) -> BoundCall | None:
        """A call over latent rows in which every query sees what lies before it; None if the kernels serve it without a host step.

        Args:
            pool: whose rows.
            anchor, extent, tokens: see :class:`~graphspec.kernels.host_step.PreparedCall`.
        """
        facts, begin = self._network(pool)
        if facts is None or facts.latent is None or not self.plan.cycles_need_host_step:
            return None
        return self._bind(PreparedCall(pool, anchor, extent, tokens, head_shape(facts), begin))

    def bind_chunk(self, pool: Literal["target", "draft"], chunk: int) -> Mapping[int | None, BoundCall]:
        """Attention of a prompt chunk by sliding window, for the windows that a kernel with a host step serves."""
        facts, begin = self._network(pool)
        if facts is None:
            return {}
        calls = [
            PreparedCall(pool, "chunk", chunk, chunk, head_shape(facts), begin, window) for window in dict.fromkeys(facts.sliding_window)
        ]
        return {call.window: bound for call in calls if (bound := self._bind(call)) is not None}

    def _network(self, pool: Literal["target", "draft"]) -> tuple[ModelFacts | None, int]:
        """Facts of the network that owns a pool, None if there is none, and the first slot it writes."""
        if pool == "target":
            return self.plan.target, 0
        return self.plan.draft.decoder if self.plan.draft is not None else None, self.plan.variant.shift

    def _bind(self, call: PreparedCall) -> BoundCall | None:
        bound = self.kernels.bind_call(call)
        if bound is not None:
            self.prepared_calls = (*self.prepared_calls, call)
        return bound

    def feature(self, hidden_BTH: Tensor, taps_BTF: Tensor | None) -> Tensor | None:
        """What the drafter reads of the target, ``[B, T, F]``, from a target's output; None: nothing."""
        if self.plan.tap_layers:
            return taps_BTF
        return hidden_BTH if self.plan.feature_width else None

    def window_slots(self, v: Views) -> Window:
        """The rows' windows; None for what this plan does not keep."""
        feature_RAcF = v.window_feature_RAcF if self.plan.feature_width else None
        lookback = (v.lookback_token_RY, v.lookback_feature_RYF) if self.plan.lookback else (None, None)
        return Window(v.window_len_R, v.window_token_RAc, feature_RAcF, *lookback)

    @staticmethod
    def rows(v: Views) -> tuple[Tensor, Tensor]:
        """``(row_B int64, live_B bool)`` of the lanes. Padded lanes point at the dummy row, which is never live."""
        row_B = v.lane_row_B
        return row_B, v.status_R[row_B] == Status.LIVE


class HostStage(Stage):
    """A step that the host takes between two segments of a program; it may wait for the device and read values.

    Attributes:
        grammars: of the lanes of the launch at hand, None for a lane without one.
    """

    grammars: Sequence[Grammar | None] = ()

    def taken(self) -> Sequence[Grammar | None]:
        """The grammars of the launch, of which the stage lets go: one may be large, and lasts no longer than its request."""
        found, self.grammars = self.grammars, ()
        return found


def check_dataflow(stages: Iterable[Stage], inputs: Iterable[str]) -> None:
    """Prove that every slot a stage reads was written by an earlier one or is an input of the program.

    Raises:
        GraphspecError: names the stage and the slot.
    """
    known = set(inputs)
    for stage in stages:
        missing = sorted(set(stage.reads) - known)
        if missing:
            raise GraphspecError(f"stage {stage.name}", "slots written by an earlier stage", f"reads of {missing}")
        known.update(stage.writes)


class NetworkStage(Stage):
    """What the stages that run a draft network share."""

    feature_reads: ClassVar[tuple[str, ...]] = ()
    feature_writes: ClassVar[tuple[str, ...]] = ()
    """Slots that a drafter without features of the target neither has nor needs."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        assert build.draft is not None, "a draft stage needs a draft network"
        self.draft: DraftModel = build.draft
        self.for_drafts = build.kernels.for_drafts
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
            kernels=self.for_drafts,
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

"""Prefill: a chunk of each of some prompts through target and drafter, as static as the cycle; a prompt's last chunk samples its root.

Two stages: what the networks do is the same whatever requests ask of the sampler, and compiled once for all of that. A drafter's side of it
is its draft KV of the chunk, and what the next chunk or the first cycle needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ...config.catalog import load_object
from ...kernels.groups import LogprobRing
from ...kernels.host_step import BoundCall
from ...models.attention import ChunkAttention
from ...models.recurrence import RecurrentStates, RunRecurrence
from ...plan.buffers import Status, Views, own_draft_pools, pool_names
from .counts import count_tokens
from .logprobs import PROMPT_RING, ring_buffers, write_prompt_logprobs
from .mailbox import MailLayout
from .sampling import LogitShaper, Scores, sample_tokens
from .stage import Build, DraftModel, Stage, TargetModel


class ChunkParts:
    """The lanes' chunks in a message, as both stages read them.

    Attributes:
        token_BC: int64, -1 where not valid.
        valid_BC: bool.
        slot_BC: int64.
        start_B, length_B, total_B, known_B, prompt_B, shared_B: int64 words of the message.
        done_B: bool, the lanes whose prompt ends.
    """

    def __init__(self, layout: MailLayout, mail: Tensor, lanes: int, chunk: int) -> None:
        words_B6, token_BC = layout.prompt_parts(mail, lanes, chunk)
        self.start_B, self.length_B, self.total_B, self.known_B, self.prompt_B, self.shared_B = words_B6.unbind(1)
        entry_C = torch.arange(chunk, device=mail.device)
        self.valid_BC = entry_C < self.length_B[:, None]
        self.token_BC = torch.where(self.valid_BC, token_BC, -1)
        self.slot_BC = self.start_B[:, None] + entry_C
        self.done_B = (self.length_B > 0) & (self.start_B + self.length_B == self.total_B)


class Prefill(Stage):
    """Per lane tokens ``[start, start + len)`` of a prompt of ``total`` tokens, padded to ``chunk``, through target and drafter.

    Leaves the logits after the chunk's last token in node 0.
    """

    name = "prefill"
    shared = True

    def __init__(self, build: Build, lanes: int, chunk: int) -> None:
        super().__init__(build)
        self.lanes, self.chunk, self.layout = lanes, chunk, MailLayout.of(build.plan)
        self.target: TargetModel = build.target
        self.scores = Scores.of_target(build)
        self.bound = self.bind_chunk("target", chunk)
        # Drafters with lookback read more than the chunk, and those of one layer don't attend.
        bound = self.bind_chunk("draft", chunk) if self.plan.draft_attends and not self.plan.lookback else {}
        self.draft: DraftPrefill | None = load_object(self.plan.variant.prefill)(build, bound) if build.draft is not None else None
        draft_reads, draft_writes = (self.draft.reads, self.draft.writes) if self.draft is not None else ((), ())
        self.states = RecurrentStates._fields if self.plan.target.recurrent is not None else ()
        scored = ("following_token_R", "cycle_1") if self.sampling.prompt_logprobs else ()
        self.pools = pool_names("target_kv", self.plan.target)
        self.reads = ("mail", "lane_row_B", "page_table_RP", *self.pools, *self.states, *draft_reads, *scored)
        tables = ("page_table_RP",) if self.layout.max_chunk_pages else ()
        ring = PROMPT_RING if self.sampling.prompt_logprobs else ()
        self.writes = (*self.pools, *self.states, *tables, *draft_writes, *ring, self.scores.slot)

    def forward(self, v: Views) -> None:
        at = self.layout
        if at.max_chunk_pages:
            row, column, page = v.mail[at.chunk_pages :].view(-1, 3).unbind(1)
            v.page_table_RP.index_put_((row, column), page.to(torch.int32))
        parts, row_B = ChunkParts(at, v.mail, self.lanes, self.chunk), v.lane_row_B
        token_BC, valid_BC, slot_BC, length_B = parts.token_BC, parts.valid_BC, parts.slot_BC, parts.length_B
        rope_length_BC = torch.minimum(torch.maximum(parts.prompt_B[:, None], slot_BC + 1), parts.total_B[:, None])
        table_BP = v.page_table_RP[row_B]
        recurrence = None
        if self.states:
            exact = self.plan.numerics == "batch_invariant"
            recurrence = RunRecurrence(self.kernels, v.take(RecurrentStates), row_B, length_B, parts.start_B == 0, exact)
        table_BP, slot_BC, valid_BC, begin_BC = self.kernels.stored([table_BP, slot_BC, valid_BC, torch.zeros_like(slot_BC)])
        attention = ChunkAttention(
            self.kernels, v.target_kv, table_BP, slot_BC, rope_length_BC, valid_BC, slot_BC, begin_BC, self.bound, recurrence,
            v.several(self.pools[1:]),
        )  # fmt: skip
        hidden_BCH, taps_BCF = self.target(token_BC, attention)
        if self.sampling.prompt_logprobs:
            write_prompt_logprobs(
                self.kernels, v, self.target, self.scores, v.cycle_1 % self.plan.ring_depth, hidden_BCH, token_BC, length_B
            )
        if self.draft is not None:
            chunk = ChunkRows(row_B, token_BC, valid_BC, slot_BC, rope_length_BC, table_BP, parts.start_B, length_B, parts.shared_B)
            self.draft(v, chunk, self.feature(hidden_BCH, taps_BCF))
        self.scores.keep(v, self.target.logits(take_last(hidden_BCH, length_B)))


class FirstToken(Stage):
    """What follows a chunk: on a prompt's last one, its first token.

    After a prompt's last chunk ``seq_len`` is its length and the window holds one entry, the root: the first cycle is no special case.
    """

    name = "first_token"

    def __init__(self, build: Build, lanes: int, chunk: int) -> None:
        super().__init__(build)
        self.lanes, self.chunk, self.layout = lanes, chunk, MailLayout.of(build.plan)
        self.scores = Scores.of_target(build)
        history = ("history_RL",) if self.plan.keeps_history else ()
        state = ("cycle_1", "window_token_RAc", "window_len_R", "seq_len_R", "budget_R", "status_R")
        self.shaper = LogitShaper(build)
        noise = ("lane_temperature_B", "lane_seed_B") if self.sampling.noise else ()
        self.reads = (
            "mail", "lane_row_B", "stop_id_RE", "budget_R", "cycle_1", self.scores.slot,
            *history, *noise, *self.shaper.reads,
        )  # fmt: skip
        counts = (*(("output_count_RV",) if self.sampling.penalties else ()), *(("recent_token_RBt",) if self.sampling.bad_words else ()))
        ring = ring_buffers(replace(self.sampling, prompt_logprobs=False))
        self.writes = (*state, *history, *counts, *ring)

    def forward(self, v: Views) -> None:
        parts = ChunkParts(self.layout, v.mail, self.lanes, self.chunk)
        self._finish(v, self.scores.kept(v)[:, :1], parts.done_B, parts.total_B, parts.known_B)
        if self.plan.keeps_history:
            self._remember(v, parts.token_BC, parts.valid_BC, parts.slot_BC, parts.total_B)

    def _remember(self, v: Views, token_BC: Tensor, valid_BC: Tensor, slot_BC: Tensor, total_B: Tensor) -> None:
        """The chunks' tokens, and the root after each prompt, into the rows' own tokens."""
        row_B = v.lane_row_B
        position_BC = slot_BC.clamp(max=self.plan.max_positions - 1)
        kept_BC = v.history_RL[row_B].gather(1, position_BC)
        v.history_RL.index_put_((row_B[:, None].expand_as(position_BC), position_BC), torch.where(valid_BC, token_BC, kept_BC))
        v.history_RL.index_put_((row_B, total_B), v.window_token_RAc[row_B][:, 0])

    def _finish(self, v: Views, logits_B1V: Tensor, done_B: Tensor, total_B: Tensor, known_B: Tensor) -> None:
        """On a prompt's last chunk: sample or install the root, open the row, write the ring. On the others: an empty ring entry."""
        row_B = v.lane_row_B
        before_B1t = v.recent_token_RBt[row_B][:, None, 1:] if self.sampling.bad_words else None
        shaped_B1V = self.shaper(v, logits_B1V, total_B[:, None], before_BTt=before_B1t)
        sampled_B1, sound_B1 = sample_tokens(self.kernels, self.sampling, v, shaped_B1V, total_B[:, None], scores=self.scores)
        resumed_B = known_B >= 0
        root_B = torch.where(resumed_B, known_B, sampled_B1[:, 0])
        failed_B = ~resumed_B & ~sound_B1[:, 0]
        emitted_B = (done_B & ~resumed_B & ~failed_B).to(torch.int64)
        budget_B = v.budget_R[row_B] - emitted_B
        stopped_B = ~resumed_B & (v.stop_id_RE[row_B] == root_B[:, None]).any(-1)
        outcome_B = torch.where(stopped_B, Status.STOPPED, torch.where(budget_B <= 0, Status.LENGTH, Status.LIVE))
        outcome_B = torch.where(done_B, torch.where(failed_B, Status.FAILED, outcome_B), Status.FREE)

        slot_1 = v.cycle_1 % self.plan.ring_depth
        entry_Ac = torch.arange(self.plan.window_capacity, device=row_B.device)
        root_BAc = torch.where(entry_Ac == 0, root_B[:, None], -1)
        token_BA = torch.where(emitted_B[:, None] > 0, root_BAc[:, : self.plan.accept_width], -1)
        v.ring_ZBJ.index_copy_(0, slot_1, torch.cat([emitted_B[:, None], outcome_B[:, None], token_BA], 1)[None])
        if self.sampling.logprobs >= 0:
            root_B1 = root_B[:, None]
            ring, first_B1 = v.take(LogprobRing), torch.zeros_like(root_B1)
            self.kernels.note_logprobs(logits_B1V, first_B1, root_B1, v.cycle_1, ring, self.sampling.logprobs)
        if self.sampling.penalties:
            count_tokens(v, row_B, root_B, done_B)
        if self.sampling.bad_words:
            self.kernels.note_tokens(root_B[:, None], None, done_B.to(torch.int64), row_B, v.recent_token_RBt)
        v.cycle_1.add_(1)
        v.window_token_RAc.index_copy_(0, row_B, root_BAc)
        v.window_len_R.index_fill_(0, row_B, 1)
        v.seq_len_R.index_copy_(0, row_B, total_B)
        v.budget_R.index_copy_(0, row_B, budget_B)
        v.status_R.index_copy_(0, row_B, outcome_B)


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
        self.plan, self.kernels, self.for_drafts = build.plan, build.kernels, build.kernels.for_drafts
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
        self.write(v, chunk, torch.cat([first_B1F, feature_BCF[:, :-1]], 1))
        self.carry(v, chunk, feature_BCF)
        if self.plan.keeps_page_features:
            # After what was read of the pages is used: Inductor moves a read to its use, and would copy all pages if they had been written.
            size = self.plan.page_size
            self.kernels.page_feature_write(v.page_feature, size, chunk.table_BP, chunk.start_B, chunk.length_B, feature_BCF)

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
        begin_BT = torch.full_like(slot_BT, self.shift)
        position_BT, valid_BT, slot_BT, begin_BT = self.kernels.stored([slot_BT - self.shift, valid_BT, slot_BT, begin_BT])
        return ChunkAttention(
            self.for_drafts, pool, chunk.table_BP, position_BT, rope_length_BT - self.shift, valid_BT, slot_BT, begin_BT,
            self.bound, further_pools=tuple(further_pools),
        )  # fmt: skip

"""Prefill: one chunk of one prompt through target and drafter, as static as the cycle; the last chunk samples the root."""

from __future__ import annotations

import torch
from torch import Tensor

from ...buffers import Status, Views
from ...catalog import load_object
from ...models.attention import ChunkAttention
from ...models.recurrence import RecurrentStates, RunRecurrence
from .counts import count_tokens
from .draft_prefill import ChunkRows, DraftPrefill
from .logprobs import RING, write_logprobs
from .mailbox import MailLayout
from .sampling import LogitShaper, sample_tokens
from .stage import Build, Stage, TargetModel


class Prefill(Stage):
    """Tokens ``[start, start + len)`` of a prompt of ``total`` tokens, padded to ``chunk``.

    After the last chunk ``seq_len`` is the prompt length and the window holds one entry, the root: the
    first cycle is no special case.
    """

    name = "prefill"

    def __init__(self, build: Build, chunk: int) -> None:
        super().__init__(build)
        self.chunk, self.layout = chunk, MailLayout.of(build.plan)
        self.target: TargetModel = build.target
        self.bound = self.bind_chunk("target", chunk)
        # Drafters with lookback read more than the chunk, and those of one layer don't attend.
        bound = self.bind_chunk("draft", chunk) if self.plan.draft_attends and not self.plan.lookback else {}
        self.draft: DraftPrefill | None = load_object(self.plan.variant.prefill)(build, bound) if build.draft is not None else None
        draft_reads, draft_writes = (self.draft.reads, self.draft.writes) if self.draft is not None else ((), ())
        history = ("history_RL",) if self.plan.keeps_history else ()
        state = ("cycle_1", "window_token_RAc", "window_len_R", "seq_len_R", "budget_R", "status_R")
        self.states = RecurrentStates._fields if self.plan.target.recurrent is not None else ()
        self.shaper = LogitShaper(build)
        noise = ("lane_temperature_B", "lane_seed_B") if self.sampling.noise else ()
        self.reads = (
            "mail", "lane_row_B", "page_table_RP", "stop_id_RE", "budget_R", "cycle_1", "target_kv",
            *self.states, *draft_reads, *history, *noise, *self.shaper.reads,
        )  # fmt: skip
        counts = ("output_count_RV",) if self.sampling.penalties else ()
        logprobs = () if self.sampling.logprobs < 0 else RING if self.sampling.logprobs else RING[:1]
        tables = ("page_table_RP",) if self.layout.max_chunk_pages else ()
        self.writes = ("target_kv", *self.states, *tables, *state, *draft_writes, *history, *counts, *logprobs, "ring_ZBJ")

    def forward(self, v: Views) -> None:
        at = self.layout
        if at.max_chunk_pages:
            row, column, page = v.mail[at.chunk_pages :].view(-1, 3).unbind(1)
            v.page_table_RP.index_put_((row, column), page.to(torch.int32))
        start_1, length_1, total_1, known_1, prompt_1 = v.mail[at.chunk : at.tokens].split(1)
        row_1 = v.lane_row_B
        entry_C = torch.arange(self.chunk, device=row_1.device)
        valid_1C = (entry_C < length_1)[None]
        token_1C = torch.where(valid_1C, v.mail[None, at.tokens : at.tokens + self.chunk], -1)
        slot_1C = (start_1 + entry_C)[None]
        length_1C = torch.minimum(torch.maximum(prompt_1, slot_1C + 1), total_1)
        table_1P = v.page_table_RP[row_1]
        recurrence = None
        if self.states:
            exact = self.plan.numerics == "batch_invariant"
            recurrence = RunRecurrence(self.kernels, v.take(RecurrentStates), row_1, length_1, start_1 == 0, exact)
        hidden_1CH, taps_1CF = self.target(
            token_1C, ChunkAttention(self.kernels, v.target_kv, table_1P, slot_1C, length_1C, valid_1C, slot_1C, 0, self.bound, recurrence)
        )
        last_1 = (length_1 - 1).clamp(min=0)
        if self.draft is not None:
            chunk = ChunkRows(row_1, token_1C, valid_1C, slot_1C, length_1C, table_1P, start_1, length_1)
            self.draft(v, chunk, self.feature(hidden_1CH, taps_1CF))
        self._finish(v, self.target.logits(hidden_1CH.index_select(1, last_1)), start_1 + length_1 == total_1, total_1, known_1)
        if self.plan.keeps_history:
            self._remember(v, token_1C, valid_1C, slot_1C, total_1)

    def _remember(self, v: Views, token_1C: Tensor, valid_1C: Tensor, slot_1C: Tensor, total_1: Tensor) -> None:
        """The chunk's tokens, and the root after the prompt, into the row's own tokens."""
        row_1 = v.lane_row_B
        position_1C = slot_1C.clamp(max=self.plan.max_positions - 1)
        kept_1C = v.history_RL[row_1].gather(1, position_1C)
        v.history_RL.index_put_((row_1[:, None].expand_as(position_1C), position_1C), torch.where(valid_1C, token_1C, kept_1C))
        v.history_RL.index_put_((row_1, total_1), v.window_token_RAc[row_1][:, 0])

    def _finish(self, v: Views, logits_11V: Tensor, done_1: Tensor, total_1: Tensor, known_1: Tensor) -> None:
        """On the last chunk: sample or install the root, open the row, write the ring. On the others: an empty ring entry."""
        row_1 = v.lane_row_B
        shaped_11V = self.shaper(v, logits_11V, total_1[:, None])
        sampled_11, sound_11 = sample_tokens(self.kernels, self.sampling, v, shaped_11V, total_1[:, None])
        sampled_1 = sampled_11[:, 0]
        resumed_1 = known_1 >= 0
        root_1 = torch.where(resumed_1, known_1, sampled_1)
        failed_1 = ~resumed_1 & ~sound_11[:, 0]
        emitted_1 = (done_1 & ~resumed_1 & ~failed_1).to(torch.int64)
        budget_1 = v.budget_R[row_1] - emitted_1
        stopped_1 = ~resumed_1 & (v.stop_id_RE[row_1] == root_1[:, None]).any(-1)
        outcome_1 = torch.where(stopped_1, Status.STOPPED, torch.where(budget_1 <= 0, Status.LENGTH, Status.LIVE))
        outcome_1 = torch.where(done_1, torch.where(failed_1, Status.FAILED, outcome_1), Status.FREE)

        slot_1 = v.cycle_1 % self.plan.ring_depth
        entry_Ac = torch.arange(self.plan.window_capacity, device=row_1.device)
        root_1Ac = torch.where(entry_Ac == 0, root_1[:, None], -1)
        token_1A = torch.where(emitted_1[:, None] > 0, root_1Ac[:, : self.plan.accept_width], -1)
        v.ring_ZBJ.index_copy_(0, slot_1, torch.cat([emitted_1[:, None], outcome_1[:, None], token_1A], 1)[None])
        if self.sampling.logprobs >= 0:
            write_logprobs(v, slot_1, logits_11V, root_1[:, None], self.sampling.logprobs)
        if self.sampling.penalties:
            count_tokens(v, row_1, root_1, done_1)
        v.cycle_1.add_(1)
        v.window_token_RAc.index_copy_(0, row_1, root_1Ac)
        v.window_len_R.index_fill_(0, row_1, 1)
        v.seq_len_R.index_copy_(0, row_1, total_1)
        v.budget_R.index_copy_(0, row_1, budget_1)
        v.status_R.index_copy_(0, row_1, outcome_1)

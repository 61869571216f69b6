"""Stages 1 and 2: the drafter reads the run committed last (draft-extend), then proposes level by level (draft steps)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import TreeAttention
from ..buffers import Views
from ..kernels.topk import stable_topk
from ..shapes import WORD_BITS
from .sampling import DraftSampler
from .stage import Build, DraftModel, Stage


def bit_words(bit: Tensor, num_words: int) -> Tensor:
    """Words ``[.., X]`` int64 with the single bit ``bit[..]`` set."""
    word_X = torch.arange(num_words, device=bit.device)
    inside = torch.ones_like(bit) << (bit % WORD_BITS)
    return torch.where(word_X == (bit // WORD_BITS)[..., None], inside[..., None], torch.zeros_like(inside)[..., None])


def causal_words(length: int, num_words: int, device: torch.device) -> Tensor:
    """Words ``[length, X]``: entry j sees entries 0..j."""
    bit = torch.arange(length, device=device)
    return bit_words(bit, num_words).cumsum(0)


class _DraftStage(Stage):
    def __init__(self, build: Build) -> None:
        super().__init__(build)
        assert build.draft is not None, "a draft stage needs a draft network"
        self.draft: DraftModel = build.draft
        self.shift = build.plan.variant.shift
        self.sampler = DraftSampler(build)

    def propose(self, v: Views, hidden_BTH: Tensor, position_B: Tensor, path_BTs: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Top-K continuations of each hidden state; see :meth:`DraftSampler.propose`."""
        return self.sampler.propose(v, self.draft.logits(hidden_BTH), self.draft.target_token_Vd, position_B, path_BTs, level)


class DraftExtend(_DraftStage):
    """The drafter over the carried window; the last valid entry proposes the first level."""

    name = "draft_extend"
    reads = (
        "lane_row_B", "status_R", "seq_len_R", "window_len_R", "window_token_RA", "window_feature_RAF", "page_table_RP", "seed_R",
        "temperature_R", "draft_kv",
    )  # fmt: skip
    writes = ("draft_kv", "draft_hidden_BH", "candidate_score_BM", "candidate_token_BM", "candidate_parent_BM")

    def forward(self, v: Views) -> None:
        row_B, live_B = self.rows(v)
        seq_B = v.seq_len_R[row_B]
        length_B = torch.where(live_B, v.window_len_R[row_B], 0)
        entry_A = torch.arange(self.plan.accept_width, device=row_B.device)
        valid_BA = entry_A < length_B[:, None]
        begin_B = seq_B - length_B + 1
        slot_BA = begin_B[:, None] + entry_A
        token_BA = torch.where(valid_BA, v.window_token_RA[row_B], -1)
        feature_BAF = torch.where(valid_BA[..., None], v.window_feature_RAF[row_B], 0)
        position_BA = slot_BA - self.shift
        attention = TreeAttention(
            kernels=self.kernels,
            kv_pool=v.draft_kv,
            table_BP=v.page_table_RP[row_B],
            position_BT=position_BA,
            rope_length_BT=position_BA + 1,
            valid_BT=valid_BA,
            slot_BT=slot_BA,
            prefix_begin=self.shift,
            prefix_end_B=begin_B,
            ancestors_BTX=causal_words(self.plan.accept_width, self.plan.num_words, row_B.device)
            .expand(row_B.shape[0], -1, -1)
            .masked_fill(~valid_BA[..., None], 0),
        )
        hidden_BAH = self.draft(token_BA, self.draft.fuse(feature_BAF), attention)
        last_B = (length_B - 1).clamp(min=0)
        hidden_BH = hidden_BAH.gather(1, last_B[:, None, None].expand(-1, 1, hidden_BAH.shape[-1])).squeeze(1)
        v.draft_hidden_BH.copy_(hidden_BH)

        nothing_B1s = token_BA.new_empty(token_BA.shape[0], 1, 0)
        score_BTK, token_BTK = self.propose(v, hidden_BH[:, None], seq_B + 1, nothing_B1s, 1)
        topk = self.shape.topk
        v.candidate_score_BM[:, :topk] = torch.where(live_B[:, None], score_BTK[:, 0], float("-inf"))
        v.candidate_token_BM[:, :topk] = token_BTK[:, 0]
        v.candidate_parent_BM[:, :topk] = -1


class DraftSteps(_DraftStage):
    """Levels 2..S, unrolled: K beams each, every beam attending the prefix and its own ancestors."""

    name = "draft_steps"
    reads = (
        "lane_row_B", "status_R", "seq_len_R", "page_table_RP", "seed_R", "temperature_R", "draft_kv", "draft_hidden_BH",
        "candidate_score_BM", "candidate_token_BM",
    )  # fmt: skip
    writes = ("draft_kv", "candidate_score_BM", "candidate_token_BM", "candidate_parent_BM")

    def forward(self, v: Views) -> None:
        row_B, live_B = self.rows(v)
        seq_B, table_BP = v.seq_len_R[row_B], v.page_table_RP[row_B]
        lanes, topk = row_B.shape[0], self.shape.topk
        beam_K = torch.arange(topk, device=row_B.device)
        score_BK = v.candidate_score_BM[:, :topk].clone()
        token_BK = v.candidate_token_BM[:, :topk].clone()
        index_BK = beam_K.expand(lanes, topk)
        path_BKs = token_BK[..., None]
        hidden_BKH = v.draft_hidden_BH[:, None].expand(lanes, topk, v.draft_hidden_BH.shape[-1])
        ancestors_BKX = torch.zeros(lanes, topk, self.plan.num_words, dtype=torch.int64, device=row_B.device)
        for step in range(1, self.shape.num_steps):
            window_K = (step - 1) * topk + beam_K
            valid_BK = live_B[:, None] & (score_BK > float("-inf"))
            position_BK = (seq_B + step - self.shift)[:, None].expand(lanes, topk)
            ancestors_BKX = ancestors_BKX | bit_words(window_K, self.plan.num_words)
            attention = TreeAttention(
                kernels=self.kernels,
                kv_pool=v.draft_kv,
                table_BP=table_BP,
                position_BT=position_BK,
                rope_length_BT=position_BK + 1,
                valid_BT=valid_BK,
                slot_BT=seq_B[:, None] + 1 + window_K,
                prefix_begin=self.shift,
                prefix_end_B=seq_B + 1,
                ancestors_BTX=ancestors_BKX.masked_fill(~valid_BK[..., None], 0),
            )
            hidden_BKH = self.draft(torch.where(valid_BK, token_BK, -1), hidden_BKH.masked_fill(~valid_BK[..., None], 0), attention)
            increment_BKK, next_BKK = self.propose(v, hidden_BKH, seq_B + step + 1, path_BKs, step + 1)
            level_BC = torch.where(valid_BK[..., None], score_BK[..., None] + increment_BKK, float("-inf")).flatten(1)
            begin = topk + (step - 1) * topk**2
            end = begin + topk**2
            v.candidate_score_BM[:, begin:end] = level_BC
            v.candidate_token_BM[:, begin:end] = next_BKK.flatten(1)
            v.candidate_parent_BM[:, begin:end] = index_BK[..., None].expand(lanes, topk, topk).flatten(1)
            if step + 1 < self.shape.num_steps:
                score_BK, chosen_BK = stable_topk(level_BC, topk)
                beam_BK = chosen_BK // topk
                token_BK = next_BKK.flatten(1).gather(1, chosen_BK)
                path_BKs = torch.cat((path_BKs.gather(1, beam_BK[..., None].expand(-1, -1, step)), token_BK[..., None]), -1)
                index_BK = begin + chosen_BK
                hidden_BKH = hidden_BKH.gather(1, beam_BK[..., None].expand(-1, -1, hidden_BKH.shape[-1]))
                ancestors_BKX = ancestors_BKX.gather(1, beam_BK[..., None].expand(-1, -1, ancestors_BKX.shape[-1]))

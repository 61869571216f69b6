"""Stages 1 and 2: the drafter reads the run committed last (draft-extend), then proposes level by level (draft steps)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..attention import TreeAttention
from ..buffers import Views
from ..kernels.topk import stable_topk
from ..shapes import WORD_BITS
from ..static_tree import StaticTree
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


class DraftStage(Stage):
    """What the stages that run a draft network share."""

    feature_reads: ClassVar[tuple[str, ...]] = ()
    feature_writes: ClassVar[tuple[str, ...]] = ()
    """Slots that a drafter without features of the target neither has nor needs."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        assert build.draft is not None, "a draft stage needs a draft network"
        self.draft: DraftModel = build.draft
        self.shift = build.plan.variant.shift
        self.sampler = DraftSampler(build)
        featured = self.plan.feature_width > 0
        self.reads = (*self.reads, *self.sampler.reads, *(self.feature_reads if featured else ()))
        self.writes = (*self.writes, *self.sampler.writes, *(self.feature_writes if featured else ()))

    def propose(self, v: Views, hidden_BTH: Tensor, position_B: Tensor, path_BTs: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Top-K continuations of each hidden state; see :meth:`DraftSampler.propose`."""
        logits_BTV = self.draft.logits(hidden_BTH, level - 1)
        return self.sampler.propose(v, logits_BTV, self.draft.target_token_Vd, position_B, path_BTs, level)

    def fuse(self, feature_BTF: Tensor | None) -> Tensor | None:
        return None if feature_BTF is None else self.draft.fuse(feature_BTF)

    def attend(
        self, v: Views, position_BT: Tensor, valid_BT: Tensor, slot_BT: Tensor, prefix_end_B: Tensor, ancestors_BTX: Tensor
    ) -> TreeAttention:
        """Attention over the row's draft KV from the first consumed token on; invalid tokens see nothing."""
        return TreeAttention(
            kernels=self.kernels,
            kv_pool=v.draft_kv,
            table_BP=v.page_table_RP[v.lane_row_B],
            position_BT=position_BT,
            rope_length_BT=position_BT + 1,
            valid_BT=valid_BT,
            slot_BT=slot_BT,
            prefix_begin=self.shift,
            prefix_end_B=prefix_end_B,
            ancestors_BTX=ancestors_BTX.masked_fill(~valid_BT[..., None], 0),
        )

    def causal(self, length: int, like_B: Tensor) -> Tensor:
        """:func:`causal_words` of ``length`` entries for every lane, ``[B, length, X]``."""
        return causal_words(length, self.plan.num_words, like_B.device).expand(like_B.shape[0], -1, -1)


class DraftExtend(DraftStage):
    """The drafter over the carried window; the last valid entry proposes the first level."""

    name = "draft_extend"
    reads = ("lane_row_B", "status_R", "seq_len_R", "window_len_R", "window_token_RA", "page_table_RP", "draft_kv")
    writes = ("draft_kv", "candidate_score_BM", "candidate_token_BM", "candidate_parent_BM")
    feature_reads = ("window_feature_RAF",)
    feature_writes = ("draft_hidden_BH",)

    def forward(self, v: Views) -> None:
        row_B, live_B = self.rows(v)
        seq_B = v.seq_len_R[row_B]
        length_B = torch.where(live_B, v.window_len_R[row_B], 0)
        entry_A = torch.arange(self.plan.accept_width, device=row_B.device)
        valid_BA = entry_A < length_B[:, None]
        begin_B = seq_B - length_B + 1
        slot_BA = begin_B[:, None] + entry_A
        token_BA = torch.where(valid_BA, v.window_token_RA[row_B], -1)
        feature_BAF = torch.where(valid_BA[..., None], v.window_feature_RAF[row_B], 0) if self.plan.feature_width else None
        attention = self.attend(v, slot_BA - self.shift, valid_BA, slot_BA, begin_B, self.causal(self.plan.accept_width, row_B))
        hidden_BAH = self.draft(token_BA, self.fuse(feature_BAF), attention)
        last_B = (length_B - 1).clamp(min=0)
        hidden_BH = hidden_BAH.gather(1, last_B[:, None, None].expand(-1, 1, hidden_BAH.shape[-1])).squeeze(1)
        if self.plan.feature_width:
            v.draft_hidden_BH.copy_(hidden_BH)

        nothing_B1s = token_BA.new_empty(token_BA.shape[0], 1, 0)
        score_BTK, token_BTK = self.propose(v, hidden_BH[:, None], seq_B + 1, nothing_B1s, 1)
        score_BK, token_BK, tree = score_BTK[:, 0], token_BTK[:, 0], self.plan.static_tree
        if tree is not None:
            ranks = [tree.rank(n) for n in tree.level(1)]
            score_BK, token_BK = (torch.stack([x_BK[:, rank] for rank in ranks], 1) for x_BK in (score_BK, token_BK))
        count = score_BK.shape[1]
        v.candidate_score_BM[:, :count] = torch.where(live_B[:, None], score_BK, float("-inf"))
        v.candidate_token_BM[:, :count] = token_BK
        v.candidate_parent_BM[:, :count] = -1


class DraftSteps(DraftStage):
    """Levels 2..S, unrolled: K beams each, every beam attending the prefix and its own ancestors."""

    name = "draft_steps"
    reads = ("lane_row_B", "status_R", "seq_len_R", "page_table_RP", "draft_kv", "candidate_score_BM", "candidate_token_BM")
    writes = DraftExtend.writes
    feature_reads = ("draft_hidden_BH",)

    def forward(self, v: Views) -> None:
        row_B, live_B = self.rows(v)
        seq_B = v.seq_len_R[row_B]
        lanes, topk = row_B.shape[0], self.shape.topk
        beam_K = torch.arange(topk, device=row_B.device)
        score_BK = v.candidate_score_BM[:, :topk].clone()
        token_BK = v.candidate_token_BM[:, :topk].clone()
        index_BK = beam_K.expand(lanes, topk)
        path_BKs = token_BK[..., None]
        carries = self.plan.feature_width > 0
        carried_BKH = v.draft_hidden_BH[:, None].expand(lanes, topk, v.draft_hidden_BH.shape[-1]) if carries else None
        ancestors_BKX = torch.zeros(lanes, topk, self.plan.num_words, dtype=torch.int64, device=row_B.device)
        for step in range(1, self.shape.num_steps):
            window_K = (step - 1) * topk + beam_K
            valid_BK = live_B[:, None] & (score_BK > float("-inf"))
            position_BK = (seq_B + step - self.shift)[:, None].expand(lanes, topk)
            ancestors_BKX = ancestors_BKX | bit_words(window_K, self.plan.num_words)
            attention = self.attend(v, position_BK, valid_BK, seq_B[:, None] + 1 + window_K, seq_B + 1, ancestors_BKX)
            if carried_BKH is not None:
                carried_BKH = carried_BKH.masked_fill(~valid_BK[..., None], 0)
            hidden_BKH = self.draft(torch.where(valid_BK, token_BK, -1), carried_BKH, attention, step)
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
                carried_BKH = hidden_BKH.gather(1, beam_BK[..., None].expand(-1, -1, hidden_BKH.shape[-1])) if carries else None
                ancestors_BKX = ancestors_BKX.gather(1, beam_BK[..., None].expand(-1, -1, ancestors_BKX.shape[-1]))


class StaticSteps(DraftStage):
    """Levels 2..S of a static tree (EAGLE-1): the drafter runs on the nodes that have children, and each child takes its rank."""

    name = "static_steps"
    reads, writes, feature_reads = DraftSteps.reads, DraftSteps.writes, DraftSteps.feature_reads

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        assert build.plan.static_tree is not None, "a static tree"
        self.tree: StaticTree = build.plan.static_tree

    def forward(self, v: Views) -> None:
        row_B, live_B = self.rows(v)
        seq_B = v.seq_len_R[row_B]
        tree, lanes, device = self.tree, row_B.shape[0], row_B.device
        before: list[int] = []
        carried_BTH = v.draft_hidden_BH[:, None] if self.plan.feature_width else None
        ancestors_BTX = torch.zeros(lanes, 1, self.plan.num_words, dtype=torch.int64, device=device)
        path_BTs = v.candidate_token_BM.new_empty(lanes, 1, 0)
        slots = 0
        for step in range(1, self.shape.num_steps):
            nodes = tree.expanded(step)
            # Row of the step before that each node hangs under; all of the first step hang under the extend's last row.
            above = [before.index(tree.parent(n)) if before else 0 for n in nodes]
            count = len(nodes)
            token_BT = torch.stack([v.candidate_token_BM[:, n] for n in nodes], 1)
            score_BT = torch.stack([v.candidate_score_BM[:, n] for n in nodes], 1)
            window_T = slots + torch.arange(count, device=device)
            valid_BT = live_B[:, None] & (score_BT > float("-inf"))
            position_BT = (seq_B + step - self.shift)[:, None].expand(lanes, count)
            ancestors_BTX = torch.cat([ancestors_BTX[:, a : a + 1] for a in above], 1) | bit_words(window_T, self.plan.num_words)
            path_BTs = torch.cat((torch.cat([path_BTs[:, a : a + 1] for a in above], 1), token_BT[..., None]), -1)
            if carried_BTH is not None:
                carried_BTH = torch.cat([carried_BTH[:, a : a + 1] for a in above], 1).masked_fill(~valid_BT[..., None], 0)
            attention = self.attend(v, position_BT, valid_BT, seq_B[:, None] + 1 + window_T, seq_B + 1, ancestors_BTX)
            hidden_BTH = self.draft(torch.where(valid_BT, token_BT, -1), carried_BTH, attention, step)
            increment_BTK, next_BTK = self.propose(v, hidden_BTH, seq_B + step + 1, path_BTs, step + 1)
            for child in tree.level(step + 1):
                row, rank = nodes.index(tree.parent(child)), tree.rank(child)
                score_B = score_BT[:, row] + increment_BTK[:, row, rank]
                v.candidate_score_BM[:, child] = torch.where(valid_BT[:, row], score_B, float("-inf"))
                v.candidate_token_BM[:, child] = next_BTK[:, row, rank]
                v.candidate_parent_BM[:, child] = tree.parent(child)
            carried_BTH = hidden_BTH if self.plan.feature_width else None
            before, slots = nodes, slots + count

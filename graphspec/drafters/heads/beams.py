"""Stages 1 and 2: the drafter reads the run that the last cycle committed (draft-extend), then proposes level by level or at once."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ...graphs.stages.sampling import DraftSampler
from ...graphs.stages.stage import Build, NetworkStage, Stage
from ...kernels.groups import Beams, Candidates
from ...kernels.tree.tree_build import bit_words
from ...plan.buffers import Views
from ...plan.static_tree import StaticTree


class DraftStage(NetworkStage):
    """Base of the stages that also propose tokens; by default from the window."""

    reads: tuple[str, ...] = (
        "lane_row_B", "lane_table_BP", "status_R", "seq_len_R", "window_len_R", "window_token_RAc", "draft_begin_1",
    )  # fmt: skip
    writes: tuple[str, ...] = Candidates._fields
    feature_reads: ClassVar[tuple[str, ...]] = ("window_feature_RAcF",)

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.sampler = DraftSampler(build)
        self.reads = (*self.reads, *self.sampler.reads)
        self.writes = (*self.writes, *self.sampler.writes)

    def propose(self, v: Views, hidden_BTH: Tensor, position_B: Tensor, path_BTs: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Top-K continuations of each hidden state; see :meth:`DraftSampler.propose`."""
        logits_BTV = self.draft.logits(hidden_BTH, level - 1)
        return self.sampler.propose(v, logits_BTV, self.draft.target_token_Vd, position_B, path_BTs, level)

    def last_run(self, v: Views) -> tuple[Tensor, ...]:
        """The window, at the width of one cycle's run, which is enough in every cycle that drafts; see :meth:`window`."""
        return self.window(v, self.plan.accept_width, self.plan.num_words)

    def level(self, v: Views, increment_BEK: Tensor, next_BEK: Tensor, level: int) -> None:
        """Write the candidates of one level into the pool, and the beams of the next step, if there is one."""
        self.kernels.draft_level(
            increment_BEK, next_BEK, level, level < self.shape.num_steps, self.shift, v.lane_row_B, v.status_R, v.seq_len_R,
            v.take(Candidates), v.take(Beams),
        )  # fmt: skip


class DraftExtend(DraftStage):
    """The drafter reads the window; its last valid entry proposes the first level."""

    name = "draft_extend"
    feature_writes = ("draft_hidden_BH",)

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        if self.plan.static_tree is None and self.shape.num_steps > 1:
            self.writes = (*self.writes, *Beams._fields)
        width = self.plan.accept_width
        self.bound = self.bind_call("draft", "window", width, width)

    def forward(self, v: Views) -> None:
        token_BA, valid_BA, slot_BA, position_BA, begin_B, ancestors_BAX, known_B, next_B, feature_BAF = self.last_run(v)
        seen = begin_B, ancestors_BAX
        attention = self.attend(v, position_BA, valid_BA, slot_BA, *seen, seen, self.bound)
        hidden_BAH = self.draft(token_BA, self.draft.fuse(feature_BAF) if self.plan.feature_width else None, attention)
        if self.plan.feature_width:
            self.kernels.take_last(hidden_BAH, known_B, v.draft_hidden_BH)
            hidden_B1H = v.draft_hidden_BH[:, None]
        else:
            last_BH = hidden_BAH.new_empty(hidden_BAH.shape[0], hidden_BAH.shape[-1])
            self.kernels.take_last(hidden_BAH, known_B, last_BH)
            hidden_B1H = last_BH[:, None]
        nothing_B1s = token_BA.new_empty(token_BA.shape[0], 1, 0)
        score_BTK, token_BTK = self.propose(v, hidden_B1H, next_B, nothing_B1s, 1)
        tree = self.plan.static_tree
        if tree is None:
            self.level(v, score_BTK, token_BTK, 1)
            return
        ranks = [tree.rank(n) for n in tree.level(1)]
        score_BK, token_BK = (torch.stack([x_BTK[:, 0, rank] for rank in ranks], 1) for x_BTK in (score_BTK, token_BTK))
        _, live_B = self.rows(v)
        v.candidate_score_BM[:, : len(ranks)] = torch.where(live_B[:, None], score_BK, float("-inf"))
        v.candidate_token_BM[:, : len(ranks)] = token_BK
        v.candidate_parent_BM[:, : len(ranks)] = -1


class DraftSteps(DraftStage):
    """Levels 2..S, unrolled: K beams each, every beam attending the prefix and its own ancestors."""

    name = "draft_steps"
    reads = (
        "lane_row_B", "lane_table_BP", "status_R", "seq_len_R", "draft_begin_1", "candidate_score_BM",
        *(name for name in Beams._fields if name not in ("beam_source_BK", "next_position_B")),
    )  # fmt: skip
    writes = (*Candidates._fields, *Beams._fields)
    feature_reads = ("draft_hidden_BH", "beam_source_BK")

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        if self.sampler.noisy or self.sampling.bias:
            self.reads = (*self.reads, "next_position_B")
        # A single beam sees every slot before its own.
        steps = range(1, self.shape.num_steps)
        self.bound = [self.bind_call("draft", "root", step + 1, 1) if self.shape.topk == 1 else None for step in steps]

    def forward(self, v: Views) -> None:
        hidden_BTH = v.draft_hidden_BH[:, None] if self.plan.feature_width else None
        for step in range(1, self.shape.num_steps):
            carried_BKH = None
            if hidden_BTH is not None:
                carried_BKH = self.kernels.carry(hidden_BTH, v.beam_source_BK, v.beam_valid_BK)
            chain = None
            if self.shape.topk == 1 and self.kernels.serves_windows:
                # The one beam of a chain sees every slot before its own; with more beams the window has more slots than there are queries.
                chain = (v.beam_slot_BK[:, 0], v.beam_valid_BK[..., None].to(torch.int64))
            attention = self.attend(
                v, v.beam_position_BK, v.beam_valid_BK, v.beam_slot_BK, v.beam_end_B, v.beam_ancestors_BKX, chain, self.bound[step - 1]
            )
            out_BKH = self.draft(v.beam_token_BK, carried_BKH, attention, step)
            increment_BKK, next_BKK = self.propose(v, out_BKH, v.next_position_B, v.beam_path_BKS[..., :step], step + 1)
            self.level(v, increment_BKK, next_BKK, step + 1)
            hidden_BTH = out_BKH if self.plan.feature_width else None


class StaticSteps(DraftStage):
    """Levels 2..S of a static tree (EAGLE-1): the drafter runs on the nodes that have children, and each child takes its rank."""

    name = "static_steps"
    reads = (
        "lane_row_B",
        "lane_table_BP",
        "status_R",
        "seq_len_R",
        "draft_begin_1",
        "candidate_score_BM",
        "candidate_token_BM",
    )
    feature_reads = ("draft_hidden_BH",)

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
            # Each node's parent among the rows of the step before; in the first step that is the last row of draft-extend.
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
            seen_BTX = ancestors_BTX.masked_fill(~valid_BT[..., None], 0)
            attention = self.attend(v, position_BT, valid_BT, seq_B[:, None] + 1 + window_T, seq_B + 1, seen_BTX)
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


def beam_stages(build: Build) -> list[Stage]:
    """One network, step by step: over the K best beams of each level, or over the nodes of a static tree."""
    if build.shape.num_steps == 1:
        return [DraftExtend(build)]
    return [DraftExtend(build), StaticSteps(build) if build.plan.static_tree is not None else DraftSteps(build)]


class MarginalStage(DraftStage):
    """Base of these stages: fills the candidate pool from the logits of all depths."""

    def fill_pool(self, v: Views, logits_BSV: Tensor, position_BS: Tensor) -> None:
        """Write the candidates of all S levels; ``position_BS`` is the position of the tokens of each."""
        score_BSK, token_BSK = self.sampler.propose_levels(v, logits_BSV, self.draft.target_token_Vd, position_BS)
        self.kernels.marginal_pool(score_BSK, token_BSK, v.lane_row_B, v.status_R, v.take(Candidates))

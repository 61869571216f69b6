"""Stages 1 and 2 of a drafter that attends over the target's keys and values: every query stands at the root and sees what is committed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...graphs.stages.prefill import ChunkRows, DraftPrefill
from ...graphs.stages.stage import Build, NetworkStage, Stage
from ...kernels.host_step import BoundCall
from ...models.attention import TreeAttention
from ...plan.buffers import Views
from ..heads.beams import DraftExtend, DraftSteps, StaticSteps


class AtRoot(NetworkStage):
    """Base of these stages: whatever the step, queries are at the root's position, ``seq_len``, and see the slots before it.

    So the reference has it: ``SinglePositionMultiTokenCandidateGenerator`` of transformers. What was drafted enters by hidden states alone.
    """

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
        """Attention over the target's KV of all committed tokens; a lane that is not live sees nothing. Slots are not written."""
        del prefix_end_B, own_window, bound
        row_B, live_B = self.rows(v)
        root_B = torch.where(live_B, v.seq_len_R[row_B], 0)
        none_BTX = torch.zeros_like(ancestors_BTX)
        return super().attend(v, root_B[:, None].expand_as(position_BT), valid_BT, slot_BT, root_B, none_BTX)


class AssistantExtend(AtRoot, DraftExtend):
    """The first level, from the last entry of the window alone: the root, with the target's feature of the token before it."""

    def last_run(self, v: Views) -> tuple[Tensor, ...]:
        token_BA, valid_BA, slot_BA, position_BA, begin_B, ancestors_BAX, known_B, next_B, feature_BAF = super().last_run(v)
        last_B1 = (known_B - 1).clamp(min=0)[:, None]
        token_B1, valid_B1, slot_B1, position_B1 = (x_BA.gather(1, last_B1) for x_BA in (token_BA, valid_BA, slot_BA, position_BA))
        feature_B1F = feature_BAF.gather(1, last_B1[..., None].expand(-1, -1, feature_BAF.shape[-1]))
        return token_B1, valid_B1, slot_B1, position_B1, begin_B, ancestors_BAX[:, :1], known_B.clamp(max=1), next_B, feature_B1F


class AssistantSteps(AtRoot, DraftSteps):
    """Levels 2..S over the K best beams of each; where a beam's own row would lie is not read."""

    reads = tuple(name for name in DraftSteps.reads if name not in ("beam_slot_BK", "beam_position_BK", "beam_end_B"))


class AssistantStaticSteps(AtRoot, StaticSteps):
    """Levels 2..S of a static tree."""


class AssistantPrefill(DraftPrefill):
    """Nothing is drafted after a prompt's tokens, and nothing kept of them: a chunk leaves the feature of its last token."""

    def __init__(self, build: Build, bound: Mapping[int | None, BoundCall]) -> None:
        super().__init__(build, bound)
        self.reads = ()

    def __call__(self, v: Views, chunk: ChunkRows, feature_BCF: Tensor | None) -> None:
        assert feature_BCF is not None, "the target's hidden states"
        self.carry(v, chunk, feature_BCF)


def assistant_stages(build: Build) -> list[Stage]:
    """See :attr:`graphspec.config.catalog.Variant.stages`."""
    if build.shape.num_steps == 1:
        return [AssistantExtend(build)]
    return [AssistantExtend(build), (AssistantSteps if build.plan.static_tree is None else AssistantStaticSteps)(build)]

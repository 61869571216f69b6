"""The only draft stage: the committed window, then S - 1 masks; every row from the root on proposes one level."""

from __future__ import annotations

from typing import cast

import torch
from torch.nn import functional as F

from ...graphs.stages.stage import Build, Stage
from ...kernels.tree.tree_build import causal_words
from ...plan.buffers import Views
from ..heads.beams import MarginalStage
from .network import PEagleDraft


class PEagle(MarginalStage):
    """One causal pass over the window and S - 1 masks after it (P-EAGLE, arXiv 2602.01469).

    A mask has the embedding of the mask token, the learned feature, and the slot and position of the unknown token that it replaces. The
    next cycle overwrites the KV of masks before anything can see it.
    """

    name = "p_eagle"

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.network = cast("PEagleDraft", build.draft)

    def forward(self, v: Views) -> None:
        masks, network = self.shape.num_steps - 1, self.network
        token_BA, _, _, _, begin_B, _, known_B, next_B, feature_BAF = self.last_run(v)
        lanes, width = token_BA.shape
        entry_U = torch.arange(width + masks, device=token_BA.device)
        known_B1 = known_B[:, None]
        # Masks follow the last known entry, so the rows are one causal run; a lane that is not live has no known entry and no mask.
        valid_BU = (entry_U < known_B1 + masks) & (known_B1 > 0)
        mask_BU = valid_BU & (entry_U >= known_B1)
        token_BU = torch.where(mask_BU, network.mask_token_id, F.pad(token_BA, (0, masks), value=-1))
        feature_BUF = torch.where(mask_BU[..., None], network.mask_hidden, F.pad(feature_BAF, (0, 0, 0, masks)))
        slot_BU = begin_B[:, None] + entry_U
        words_UX = causal_words(width + masks, self.plan.num_words, token_BA.device)
        words_BUX = words_UX.expand(lanes, -1, -1).masked_fill(~valid_BU[..., None], 0)
        attention = self.attend(v, slot_BU - self.shift, valid_BU, slot_BU, begin_B, words_BUX)
        hidden_BUH = network(token_BU, network.fuse(feature_BUF), attention)
        row_BS = (known_B1 - 1).clamp(min=0) + torch.arange(masks + 1, device=token_BA.device)
        hidden_BSH = hidden_BUH.gather(1, row_BS[..., None].expand(-1, -1, hidden_BUH.shape[-1]))
        self.fill_pool(v, network.logits(hidden_BSH), next_B)


def stages(build: Build) -> list[Stage]:
    """See :attr:`graphspec.config.catalog.Variant.stages`."""
    return [PEagle(build)]

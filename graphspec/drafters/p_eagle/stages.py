"""The only draft stage: the committed window, then S - 1 masks; every row from the root on proposes one level."""

from __future__ import annotations

from typing import cast

from ...graphs.stages.stage import Build, Stage
from ...plan.buffers import Views
from ..heads.beams import MarginalStage
from .network import PEagleDraft


class PEagle(MarginalStage):
    """One causal pass over the window and S - 1 masks after it (P-EAGLE, arXiv 2602.01469).

    A mask has the embedding of the mask token and the learned feature (:func:`~graphspec.kernels.tree.masks.append_masks`). The next
    cycle overwrites the KV of masks before anything can see it.
    """

    name = "p_eagle"

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.network = cast("PEagleDraft", build.draft)

    def forward(self, v: Views) -> None:
        network, masks = self.network, self.shape.num_steps - 1
        token_BA, _, _, _, begin_B, _, known_B, _, feature_BAF = self.last_run(v)
        token_BU, valid_BU, slot_BU, position_BU, words_BUX, feature_BUF, row_BS, proposing_BS, next_BS = self.kernels.append_masks(
            token_BA, feature_BAF, begin_B, known_B, network.mask_hidden.flatten(), network.mask_token_id, masks, self.shift,
            self.plan.num_words,
        )  # fmt: skip
        attention = self.attend(v, position_BU, valid_BU, slot_BU, begin_B, words_BUX)
        hidden_BUH = network(token_BU, network.fuse(feature_BUF), attention)
        self.fill_pool(v, network.logits(self.kernels.carry(hidden_BUH, row_BS, proposing_BS)), next_BS)


def stages(build: Build) -> list[Stage]:
    """See :attr:`graphspec.config.catalog.Variant.stages`."""
    return [PEagle(build)]

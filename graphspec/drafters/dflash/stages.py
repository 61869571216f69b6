"""The only draft stage: keys and values of the newly committed context, then the block."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch

from ...graphs.stages.stage import Build, Stage
from ...kernels.linear.linear import stream_rows
from ...kernels.sampling.noise import computed_once
from ...kernels.tree.tree_build import causal_words
from ...plan.buffers import Views
from ..heads.beams import MarginalStage
from .network import DFlashDraft


class DFlash(MarginalStage):
    """Writes the context's keys and values for the window, then runs one pass over the root and the masks after it (DFlash, section 3).

    The window entry at slot j has the target's feature of the token before it, so slot j holds keys and values of position j - 1, up to
    slot ``seq_len``. The block is in the slots after that, the root first; the next cycle overwrites it.
    """

    name = "dflash"

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.network = cast("DFlashDraft", build.draft)
        self.rows_of_block = self.network.facts.rows(self.shape.num_steps)

    def forward(self, v: Views) -> None:
        network, rows, steps = self.network, self.rows_of_block, self.shape.num_steps
        token_BA, valid_BA, slot_BA, position_BA, begin_B, words_BAX, known_B, next_B, feature_BAF = self.last_run(v)
        network.write_kv(token_BA, network.fuse(feature_BAF), self.attend(v, position_BA, valid_BA, slot_BA, begin_B, words_BAX))

        token_BT, valid_BT, slot_BT, position_BT, words_BTX, proposed_BS = self.kernels.mask_block(
            token_BA, known_B, next_B, network.facts.mask_token_id, rows, steps, self.shift, self.plan.num_words
        )
        block = partial(self.attend, v, position_BT, valid_BT, slot_BT, next_B)
        causal = block(words_BTX)
        full = causal
        if network.stack is None:  # which itself knows which of its layers see the whole block
            whole_X = causal_words(rows, self.plan.num_words, token_BA.device)[-1]
            full = block(computed_once(torch.where(valid_BT[..., None], whole_X, 0)))
        block_BTH = network.block(token_BT, full, causal)
        first = 0 if network.facts.from_anchor else 1
        self.fill_pool(v, network.logits(stream_rows(block_BTH, first, first + steps)), proposed_BS)


def stages(build: Build) -> list[Stage]:
    """See :attr:`graphspec.config.catalog.Variant.stages`."""
    return [DFlash(build)]

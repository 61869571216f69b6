"""A drafting algorithm from another package: mask tokens, so that one forward pass drafts all S levels (PARD, arXiv 2504.18583).

The pass reads the committed window and, after the root, S - 1 masks: the row of the root proposes level 1, the row of mask s proposes level
s + 1 without seeing what was drafted before it. The network is the target's own first layers; masks enter it as the mean of the embedding
matrix, where a trained drafter has learned vectors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphspec.config.catalog import Variant
from graphspec.facts import DraftFacts, DraftPass, ModelFacts
from graphspec.shapes import CycleShape

if TYPE_CHECKING:
    from graphspec.graphs.stages.stage import Build, Stage
    from graphspec.models.decoder import Decoder

VARIANT = Variant(
    name="mask_tokens",
    summary="the target's first third of layers drafts all levels in one pass over mask tokens",
    drafter="network",
    facts="graphspec_mask_tokens:read_facts",
    loader="graphspec_mask_tokens:load",
    stages="graphspec_mask_tokens:stages",
    draft_in_target=True,
    full_vocabulary=True,
    auto_shape=CycleShape(3, 1, 4, "marginals"),
)
MASK = -2
"""Stands for a mask among the token ids a stage hands to the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskFacts(DraftFacts):
    """The drafter as the plan sees it: a decoder of fewer layers that reads tokens only."""

    def passes(self, shape: CycleShape) -> tuple[DraftPass, ...]:
        return (DraftPass("mask_tokens", shape.accept_width + shape.num_steps - 1, shape.num_steps),)


def read_facts(folder: Path, target: ModelFacts) -> MaskFacts:
    """Nothing is read: the drafter is part of the target."""
    layers = max(1, target.num_layers // 3)
    decoder = replace(target, num_layers=layers, sliding_window=target.sliding_window[:layers])
    return MaskFacts(path=folder, decoder=decoder, draft_vocab_size=target.vocab_size, target_hidden_size=target.hidden_size)


def load(facts: MaskFacts, target: Decoder, max_positions: int, dtype: Any, device: Any, progress: Any = None) -> Any:
    """The network; nothing is read, for everything is the target's."""
    import torch
    from torch import Tensor, nn

    class MaskedExit(nn.Module):
        target_token_Vd: Tensor | None = None

        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens, self.norm, self.lm_head, self.rotary = target.embed_tokens, target.norm, target.lm_head, target.rotary
            self.layers = target.layers[: facts.decoder.num_layers]
            self.register_buffer("mask_H", target.embed_tokens.weight.float().mean(0).to(dtype), persistent=False)

        def forward(self, token_BT: Tensor, hidden_BTH: Tensor | None, attention: Any, step: int = 0) -> Tensor:
            residual_BTH, rotation = self.before_last(token_BT, attention)
            return self.norm(self.layers[-1](residual_BTH, rotation, attention))

        def write_kv(self, token_BT: Tensor, hidden_BTH: Tensor | None, attention: Any, step: int = 0) -> None:
            residual_BTH, rotation = self.before_last(token_BT, attention)
            self.layers[-1].write_kv(residual_BTH, rotation, attention)

        def before_last(self, token_BT: Tensor, attention: Any) -> tuple[Tensor, Any]:
            masked_BT1 = ((token_BT == MASK) & attention.valid_BT)[..., None]
            residual_BTH = torch.where(masked_BT1, self.mask_H, self.embed_tokens(token_BT, attention.valid_BT))
            rotation = self.rotary.of(attention)
            for layer in self.layers[:-1]:
                residual_BTH = layer(residual_BTH, rotation, attention)
            return residual_BTH, rotation

        def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
            return self.lm_head(hidden).float()

    return MaskedExit().eval()


def stages(build: Build) -> list[Stage]:
    """One stage fills the candidate pool."""
    import torch
    from torch.nn import functional as F

    from graphspec.drafters.heads.beams import MarginalStage
    from graphspec.kernels.tree.tree_build import causal_words
    from graphspec.plan.buffers import Views

    class MaskTokens(MarginalStage):
        name = "mask_tokens"

        def forward(self, v: Views) -> None:
            token_BA, _, _, _, begin_B, _, known_B, next_B, _ = self.last_run(v)
            masks, known_B1 = self.shape.num_steps - 1, known_B[:, None]
            # Masks follow the last known entry, so the rows are one causal run.
            entry_U = torch.arange(token_BA.shape[1] + masks, device=token_BA.device)
            valid_BU = (entry_U < known_B1 + masks) & (known_B1 > 0)
            token_BU = torch.where(valid_BU & (entry_U >= known_B1), MASK, F.pad(token_BA, (0, masks), value=-1))
            slot_BU = begin_B[:, None] + entry_U
            words_UX = causal_words(len(entry_U), self.plan.num_words, token_BA.device)
            words_BUX = words_UX.expand(len(known_B), -1, -1).masked_fill(~valid_BU[..., None], 0)
            attention = self.attend(v, slot_BU - self.shift, valid_BU, slot_BU, begin_B, words_BUX)
            hidden_BUH = self.draft(torch.where(valid_BU, token_BU, -1), None, attention)
            row_BS = (known_B1 - 1).clamp(min=0) + torch.arange(masks + 1, device=token_BA.device)
            logits_BSV = self.draft.logits(hidden_BUH.gather(1, row_BS[..., None].expand(-1, -1, hidden_BUH.shape[-1])))
            self.fill_pool(v, logits_BSV, next_B)

    return [MaskTokens(build)]

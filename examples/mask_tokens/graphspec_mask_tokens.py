"""A drafting algorithm from another package: mask tokens, so that one forward pass drafts all S levels (PARD, arXiv 2504.18583).

The pass reads the committed window and, after the root, S - 1 masks: the row of the root proposes level 1, the row of mask s proposes level
s + 1 without seeing what was drafted before it. The network is the target's own first layers; masks enter it as the mean of the embedding
matrix, where a trained drafter has learned vectors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphspec.catalog import Variant
from graphspec.facts import DraftFacts, DraftPass, ModelFacts
from graphspec.shapes import CycleShape

if TYPE_CHECKING:
    from graphspec.graphs.stages.stage import Build, Stage
    from graphspec.models.llama import LlamaModel

VARIANT = Variant(
    name="mask_tokens",
    summary="the target's first third of layers drafts all levels in one pass over mask tokens",
    drafter="network",
    facts="graphspec_mask_tokens:read_facts",
    loader="graphspec_mask_tokens:load",
    stages="graphspec_mask_tokens:stages",
    draft_in_target=True,
    full_vocabulary=True,
    auto_shape=CycleShape(3, 1, 4),
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


def load(facts: MaskFacts, target: LlamaModel, max_positions: int, dtype: Any, device: Any, progress: Any = None) -> Any:
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

    from graphspec.buffers import Views
    from graphspec.drafters.beams import DraftStage
    from graphspec.errors import ConfigError
    from graphspec.kernels.groups import Beams, Candidates
    from graphspec.kernels.tree_build import causal_words

    if build.plan.accept_width + build.shape.num_steps > 64 * build.plan.num_words:
        raise ConfigError("variant.num_steps", f"at most {32 * build.plan.num_words - 1} with mask tokens", build.shape.num_steps)

    class MaskTokens(DraftStage):
        name = "mask_tokens"
        reads = ("lane_row_B", "lane_table_BP", "status_R", "seq_len_R", "window_len_R", "window_token_RAc", "draft_kv", "draft_begin_1")
        writes = ("draft_kv", *Candidates._fields, *Beams._fields)

        def forward(self, v: Views) -> None:
            token_BA, valid_BA, slot_BA, position_BA, begin_B, words_BAX, known_B, next_B, _ = self.last_run(v)
            lanes, masks, device = token_BA.shape[0], self.shape.num_steps - 1, token_BA.device
            step_T = torch.arange(masks, device=device)
            live_BT = (known_B > 0)[:, None].expand(lanes, masks)
            slot_BT = next_B[:, None] + step_T
            # A mask sees the prefix, the known entries of the window, and the masks up to itself.
            words_UX = causal_words(token_BA.shape[1] + masks, words_BAX.shape[-1], device)
            words_BTX = words_UX[known_B[:, None] + step_T].masked_fill(~live_BT[..., None], 0)
            attention = self.attend(
                v, torch.cat((position_BA, slot_BT - self.shift), 1), torch.cat((valid_BA, live_BT), 1), torch.cat((slot_BA, slot_BT), 1),
                begin_B, torch.cat((words_BAX, words_BTX), 1),
            )  # fmt: skip
            hidden_BTH = self.draft(torch.cat((token_BA, torch.where(live_BT, MASK, -1)), 1), None, attention)
            last_BS = torch.cat(((known_B - 1).clamp(min=0)[:, None], (token_BA.shape[1] + step_T).expand(lanes, -1)), 1)
            logits_BSV = self.draft.logits(hidden_BTH.gather(1, last_BS[..., None].expand(-1, -1, hidden_BTH.shape[-1])))
            for level in range(1, self.shape.num_steps + 1):
                # All beams of a level get the same distribution: no mask has seen what led to them.
                rows = 1 if level == 1 else self.shape.topk
                logits_BKV = logits_BSV[:, level - 1 : level].expand(-1, rows, -1).contiguous()
                position_B, path_BKs = next_B if level == 1 else v.next_position_B, v.beam_path_BKS[:, :rows, : level - 1]
                proposed = self.sampler.propose(v, logits_BKV, self.draft.target_token_Vd, position_B, path_BKs, level)
                self.level(v, *proposed, level)

    return [MaskTokens(build)]

"""A variant from another package: the target's own first layers draft, then the whole target verifies.

Early exit needs no second checkpoint (Draft & Verify, arXiv 2309.08168; LayerSkip, arXiv 2404.16710): the drafter shares embedding, layers,
norm and head with the target and keeps KV of its own for the layers it runs. How well it drafts depends on how the target was trained.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphspec.config.catalog import Variant
from graphspec.facts import DraftFacts, ModelFacts
from graphspec.shapes import CycleShape

if TYPE_CHECKING:
    from graphspec.models.decoder import Decoder

VARIANT = Variant(
    name="early_exit",
    summary="the target's first third of layers drafts",
    drafter="network",
    facts="graphspec_early_exit:read_facts",
    loader="graphspec_early_exit:load",
    draft_in_target=True,
    full_vocabulary=True,
    auto_shape=CycleShape(3, 1, 4),
)


def read_facts(folder: Path, target: ModelFacts) -> DraftFacts:
    """The drafter as the plan sees it: a decoder of fewer layers that reads tokens only."""
    layers = max(1, target.num_layers // 3)
    decoder = replace(target, num_layers=layers, sliding_window=target.sliding_window[:layers])
    return DraftFacts(path=folder, decoder=decoder, draft_vocab_size=target.vocab_size, target_hidden_size=target.hidden_size)


def load(facts: DraftFacts, target: Decoder, max_positions: int, dtype: Any, device: Any, progress: Any = None) -> Any:
    """The drafter; nothing is read, for everything is the target's."""
    from torch import Tensor, nn

    class EarlyExit(nn.Module):
        target_token_Vd: Tensor | None = None

        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens, self.norm, self.lm_head, self.rotary = target.embed_tokens, target.norm, target.lm_head, target.rotary
            self.layers = target.layers[: facts.decoder.num_layers]

        def forward(self, token_BT: Tensor, hidden_BTH: Tensor | None, attention: Any, step: int = 0) -> Tensor:
            residual_BTH, rotation = self.before_last(token_BT, attention)
            return self.norm(self.layers[-1](residual_BTH, rotation, attention))

        def write_kv(self, token_BT: Tensor, hidden_BTH: Tensor | None, attention: Any, step: int = 0) -> None:
            residual_BTH, rotation = self.before_last(token_BT, attention)
            self.layers[-1].write_kv(residual_BTH, rotation, attention)

        def before_last(self, token_BT: Tensor, attention: Any) -> tuple[Tensor, Any]:
            residual_BTH = self.embed_tokens(token_BT, attention.valid_BT)
            rotation = self.rotary.of(attention)
            for layer in self.layers[:-1]:
                residual_BTH = layer(residual_BTH, rotation, attention)
            return residual_BTH, rotation

        def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
            return self.lm_head(hidden).float()

    return EarlyExit().eval()

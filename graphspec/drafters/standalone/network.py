"""A whole small language model as drafter (arXiv 2211.17192, 2302.01318)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...models.checkpoint import Progress
from ...models.decoder import Decoder
from ...models.target import load_target

if TYPE_CHECKING:
    from ...models.attention import Attention
    from .facts import StandaloneFacts


class StandaloneDraft(nn.Module):
    """A language model with the interface of draft networks: it reads tokens only, and nothing of the target.

    Args:
        facts: the model's sizes.
        max_positions: positions the RoPE table covers.
        model: the loaded model; a new one without weights when absent.
    """

    def __init__(self, facts: StandaloneFacts, max_positions: int, model: Decoder | None = None) -> None:
        super().__init__()
        self.facts = facts
        self.model = model or Decoder(facts.decoder, (), max_positions)
        # int64: target id of each column, where the vocabulary is smaller or the head was trimmed to some tokens; None: they are one
        self.target_token_Vd: Tensor | None
        own = torch.arange(facts.draft_vocab_size, device="cpu") if facts.begins_vocabulary else None
        self.register_buffer("target_token_Vd", own, persistent=False)

    def pack_stack(self) -> str | None:
        """See :func:`graphspec.models.stack.pack_network`."""
        return self.model.pack_stack()

    def fuse(self, feature_BTF: Tensor) -> Tensor:
        """The features, unchanged: this network reads none."""
        return feature_BTF

    def forward(self, token_BT: Tensor, hidden_BTH: Tensor | None, attention: Attention, step: int = 0) -> Tensor:
        """Hidden states ``[B, T, H]`` after the final norm of int64 tokens ``[B, T]``; ``hidden_BTH`` and ``step`` change nothing."""
        del hidden_BTH, step
        hidden, _ = self.model(token_BT, attention)
        out_BTH: Tensor = hidden
        return out_BTH

    def write_kv(self, token_BT: Tensor, hidden_BTH: Tensor | None, attention: Attention, step: int = 0) -> None:
        """The KV that :meth:`forward` would write."""
        del hidden_BTH, step
        self.model.write_kv(token_BT, attention)

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """float32 ``[..., Vd]`` of what :meth:`forward` returned."""
        del step
        return self.model.logits(hidden)


def load_standalone(
    facts: StandaloneFacts,
    target: Decoder,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> StandaloneDraft:
    """The language model of a draft checkpoint, in ``dtype`` on ``device``; it shares nothing with the target.

    Raises:
        CheckpointError: as :func:`load_target`.
    """
    del target
    model = load_target(facts.decoder, (), max_positions, dtype, device, progress)
    return StandaloneDraft(facts, max_positions, model).to(device).eval()


def outline(facts: StandaloneFacts, target: Decoder) -> StandaloneDraft:
    """See :attr:`graphspec.config.catalog.Variant.outline`; it shares nothing with the target."""
    del target
    return StandaloneDraft(facts, 1)

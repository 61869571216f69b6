"""What the draft networks of this package share: RoPE, embedding, language-model head and the map of a reduced vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from ...models.attention import RotaryEmbedding
from ...models.layers import Embedding, Linear, RMSNorm
from ...models.vocabulary import VocabParallelLinear, token_embedding, vocabulary_head

if TYPE_CHECKING:
    from ...facts.draft import DraftFacts
    from ...kernels.linear.linear import Hidden
    from ...models.decoder import Decoder


class DraftNetwork(nn.Module):
    """A draft network up to its layers; subclasses bring these, with ``forward`` and ``write_kv``.

    Args:
        facts: sizes and options.
        max_positions: positions the RoPE table covers; the draft's own ``max_position_embeddings`` doesn't limit it.
        embed_tokens: the target's embedding; None: the draft has its own.
        lm_head: the target's language-model head; None: the draft has its own, over ``draft_vocab_size`` tokens.

    Attributes:
        target_token_Vd: int64, target id of each draft id; None if both have the same vocabulary.
    """

    def __init__(self, facts: DraftFacts, max_positions: int, embed_tokens: Embedding | None = None, lm_head: Linear | None = None) -> None:
        super().__init__()
        decoder = facts.decoder
        self.facts = facts
        self.rotary = RotaryEmbedding(decoder.rope, decoder.head_dim, max_positions)
        self.embed_tokens = embed_tokens or token_embedding(decoder)
        self.lm_head = lm_head or vocabulary_head(decoder, facts.draft_vocab_size)
        self.target_token_Vd: Tensor | None
        reduced = facts.draft_vocab_size != decoder.vocab_size
        self.register_buffer("target_token_Vd", torch.arange(facts.draft_vocab_size, device="cpu") if reduced else None, persistent=False)

    @classmethod
    def outline(cls, facts: DraftFacts, target: Decoder) -> Self:
        """See :attr:`graphspec.config.catalog.Variant.outline`; embedding and head are taken as the target's wherever they can be."""
        same = facts.decoder.hidden_size == target.facts.hidden_size
        full = same and facts.draft_vocab_size == facts.decoder.vocab_size
        return cls(facts, 1, target.embed_tokens if same else None, target.lm_head if full else None)

    def name_columns(self, token_Vd: Tensor | None, device: torch.device | str) -> None:
        """Finish the head, which may be the target's: the target ids of its columns, on the device that its weight is on.

        ``token_Vd``: int64, draft id to target id; None, or the identity, where the vocabularies are one.
        """
        if token_Vd is not None and self.target_token_Vd is not None:
            self.target_token_Vd = token_Vd.to(device)
        if isinstance(self.lm_head, VocabParallelLinear):
            if self.target_token_Vd is not None:
                self.lm_head.name_tokens(self.target_token_Vd)
            self.lm_head.token_Vr = self.lm_head.token_Vr.to(device)

    def read(self, token_BT: Tensor, hidden_BTH: Tensor, valid_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings and hidden states, each ``[B, T, H]``, zero where a token is not valid."""
        return self.embed_tokens(token_BT, valid_BT), torch.where(valid_BT[..., None], hidden_BTH, 0.0)

    def fuse(self, feature_BTF: Tensor) -> Tensor:
        """``[B, T, H]`` from the target's feature: the feature itself, the target's hidden state after its final norm."""
        return feature_BTF

    def output_norm(self) -> RMSNorm | None:
        """The norm between the hidden states that ``forward`` returns and the language-model head; None: there is none."""
        return None

    def logits(self, hidden: Hidden, step: int = 0) -> Tensor:
        """float32 ``[..., Vd]`` of what ``forward`` returned, the same for every ``step``.

        Column i is target token ``target_token_Vd[i]``, or i without a map.
        """
        del step
        out: Tensor = self.lm_head(hidden, self.output_norm(), float32=True)
        return out

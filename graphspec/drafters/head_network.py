"""What the networks of draft heads share: embedding and language-model head, mostly the target's, positions and a map of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..models.layers import Embedding, Linear, RMSNorm
from ..models.rope import RotaryEmbedding

if TYPE_CHECKING:
    from ..facts import DraftFacts
    from ..kernels.formulas import Rotation
    from ..models.attention import Attention


class HeadNetwork(nn.Module):
    """Base of a draft network over hidden states: a :class:`graphspec.graphs.stages.stage.DraftModel` but for its passes.

    Args:
        facts: the head's sizes.
        max_positions: positions the RoPE table covers; the head's own ``max_position_embeddings`` doesn't limit it.
        embed_tokens: the target's embedding where the head has none of its own.
        lm_head: the target's head; likewise.
    """

    def __init__(self, facts: DraftFacts, max_positions: int, embed_tokens: Embedding | None, lm_head: Linear | None) -> None:
        super().__init__()
        decoder = facts.decoder
        self.facts = facts
        self.rotary = RotaryEmbedding(decoder.rope, decoder.head_dim, max_positions)
        self.embed_tokens = embed_tokens or Embedding(decoder.vocab_size, decoder.hidden_size)
        self.lm_head = lm_head or Linear(decoder.hidden_size, facts.draft_vocab_size)
        # int64, draft id to target id; None where the vocabularies are one
        self.target_token_Vd: Tensor | None
        self.register_buffer("target_token_Vd", None, persistent=False)

    @property
    def last_norm(self) -> RMSNorm | None:
        """The norm between what a pass returns and the language-model head."""
        return None

    def fuse(self, feature_BTF: Tensor) -> Tensor:
        """The feature itself, ``[B, T, H]``: the target's hidden state after its final norm."""
        return feature_BTF

    def read(self, token_BT: Tensor, hidden_BTH: Tensor, attention: Attention) -> tuple[Tensor, Tensor, Rotation]:
        """Embeddings and hidden states, zero where a token isn't valid, and how the layers rotate."""
        valid_BT = attention.valid_BT
        embedding_BTH = self.embed_tokens(token_BT, valid_BT)
        rotation = self.rotary(attention.position_BT, attention.rope_length_BT)
        return embedding_BTH, torch.where(valid_BT[..., None], hidden_BTH, 0.0), rotation

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """float32 ``[..., Vd]`` of what a pass returned, the same for every ``step``; column i is target token ``target_token_Vd[i]``,
        or i without a map.
        """
        del step
        out: Tensor = self.lm_head(hidden, self.last_norm, float32=True)
        return out

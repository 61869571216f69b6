"""The EAGLE-3 draft network (arXiv 2503.01840)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..models.layers import MLP, Embedding, Linear, RMSNorm, SelfAttention
from ..models.rope import RotaryEmbedding

if TYPE_CHECKING:
    from ..attention import Attention
    from ..facts import Eagle3Facts, ModelFacts


class Eagle3Layer(nn.Module):
    """The one decoder layer: its attention reads ``[norm(embedding); norm(hidden)]``, its residual is the hidden state before that norm."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(facts.hidden_size, facts.rms_norm_eps)
        self.hidden_norm = RMSNorm(facts.hidden_size, facts.rms_norm_eps)
        self.self_attn = SelfAttention(facts, 0, input_size=2 * facts.hidden_size)
        self.post_attention_layernorm = RMSNorm(facts.hidden_size, facts.rms_norm_eps)
        self.mlp = MLP(facts)

    def forward(self, embedding_BTH: Tensor, hidden_BTH: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, attention: Attention) -> Tensor:
        """Un-normed ``[B, T, H]`` from embeddings and hidden states ``[B, T, H]``; cos and sin are ``[B, T, D / 2]``."""
        x_BTE = torch.cat((self.input_layernorm(embedding_BTH), self.hidden_norm(hidden_BTH)), dim=-1)
        residual_BTH = hidden_BTH + self.self_attn(x_BTE, cos_BTD, sin_BTD, attention)
        out_BTH: Tensor = residual_BTH + self.mlp(self.post_attention_layernorm(residual_BTH))
        return out_BTH


class Eagle3Draft(nn.Module):
    """EAGLE-3 head: ``fuse`` for features of the target, ``forward`` once per draft step, ``logits`` over the draft vocabulary.

    Args:
        facts: the head's sizes.
        max_positions: positions the RoPE table covers; the head's own ``max_position_embeddings`` doesn't limit it.
        embed_tokens: the target's embedding where the head has none of its own.
        lm_head: the target's head where it is shared (full vocabulary only).
    """

    def __init__(
        self, facts: Eagle3Facts, max_positions: int, embed_tokens: Embedding | None = None, lm_head: Linear | None = None
    ) -> None:
        super().__init__()
        decoder = facts.decoder
        self.facts = facts
        self.fc = Linear(facts.feature_size, decoder.hidden_size)
        self.rotary = RotaryEmbedding(decoder.rope, decoder.head_dim, max_positions)
        self.embed_tokens = embed_tokens or Embedding(decoder.vocab_size, decoder.hidden_size)
        self.midlayer = Eagle3Layer(decoder)
        self.norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.lm_head = lm_head or Linear(decoder.hidden_size, facts.draft_vocab_size)
        # int64, draft id to target id; None where the vocabularies are one
        self.target_token_Vd: Tensor | None
        reduced = facts.draft_vocab_size != decoder.vocab_size
        table_Vd = torch.arange(facts.draft_vocab_size, device="cpu") if reduced else None
        self.register_buffer("target_token_Vd", table_Vd, persistent=False)

    def fuse(self, feature_BTF: Tensor) -> Tensor:
        """``[B, T, H]`` from the target's tapped residual streams; hidden states of the head itself skip this."""
        hidden_BTH: Tensor = self.fc(feature_BTF)
        return hidden_BTH

    def forward(self, token_BT: Tensor, hidden_BTH: Tensor, attention: Attention) -> Tensor:
        """One step: tokens (int64 target ids) with the hidden state of the token before each, ``[B, T, H]``.

        Returns:
            Un-normed hidden states ``[B, T, H]``, the next step's input and what :meth:`logits` takes.
        """
        valid_BT = attention.valid_BT
        embedding_BTH = self.embed_tokens(token_BT, valid_BT)
        cos_BTD, sin_BTD = self.rotary(attention.position_BT, attention.rope_length_BT, embedding_BTH.dtype)
        hidden_BTH = torch.where(valid_BT[..., None], hidden_BTH, 0.0)
        out_BTH: Tensor = self.midlayer(embedding_BTH, hidden_BTH, cos_BTD, sin_BTD, attention)
        return out_BTH

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[..., Vd]`` of un-normed hidden states; column i is target token ``target_token_Vd[i]``, or i where that is None."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out.float()

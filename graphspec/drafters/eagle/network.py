"""The EAGLE-1/2 draft network (arXiv 2401.15077, 2406.16858), with or without the norms of HASS (arXiv 2408.15766)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...kernels.linear import Hidden, ResidualStream, hidden_of
from ...models.layers import MLP, Embedding, Linear, RMSNorm, SelfAttention
from ...models.rope import RotaryEmbedding
from ...models.stack import DecoderStack, DraftInput

if TYPE_CHECKING:
    from ...facts import ModelFacts
    from ...kernels.formulas import Rotation
    from ...models.attention import Attention
    from ...models.llama import LlamaModel
    from .facts import EagleFacts


class EagleLayer(nn.Module):
    """A decoder layer whose attention reads the residual stream as it is: EAGLE leaves the norm in front of it out."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.self_attn = SelfAttention(facts, 0)
        self.post_attention_layernorm = RMSNorm(facts.hidden_size, facts.rms_norm_eps)
        self.mlp = MLP(facts)

    def forward(self, residual_BTH: Hidden, rotation: Rotation, attention: Attention, norm: RMSNorm | None = None) -> Hidden:
        """The residual stream after this layer, ``[B, T, H]``; ``norm`` stands in front of the attention where a head has one."""
        residual_BTH = self.self_attn(residual_BTH, rotation, attention, norm, residual_BTH)
        out_BTH: Hidden = self.mlp(residual_BTH, self.post_attention_layernorm, residual_BTH)
        return out_BTH


class EagleDraft(nn.Module):
    """EAGLE-1/2 head: one layer over ``fc([embedding; hidden])``, between the target's embedding and the target's head.

    Args:
        facts: the head's sizes; ``fc_bias`` and ``layernorms`` settled (None counts as no).
        max_positions: positions the RoPE table covers; the head's own ``max_position_embeddings`` doesn't limit it.
        embed_tokens: the target's embedding; one of its own when absent, for networks without a checkpoint.
        lm_head: the target's head; likewise.
        norms: which of ``embed_layernorm`` (after the embedding), ``hidden_layernorm`` (in front of the attention, the residual stays
            un-normed) and ``lm_head_layernorm`` (in front of the head) there are.
    """

    def __init__(
        self,
        facts: EagleFacts,
        max_positions: int,
        embed_tokens: Embedding | None = None,
        lm_head: Linear | None = None,
        norms: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        decoder = facts.decoder
        size = decoder.hidden_size

        def norm(name: str) -> RMSNorm | None:
            return RMSNorm(size, decoder.rms_norm_eps) if name in norms else None

        self.facts = facts
        self.rotary = RotaryEmbedding(decoder.rope, decoder.head_dim, max_positions)
        self.embed_tokens = embed_tokens or Embedding(decoder.vocab_size, size)
        self.embed_layernorm = norm("embed_layernorm")
        self.fc = Linear(2 * size, size, bias=bool(facts.fc_bias))
        self.hidden_layernorm = norm("hidden_layernorm")
        self.layer = EagleLayer(decoder)
        self.lm_head_layernorm = norm("lm_head_layernorm")
        self.lm_head = lm_head or Linear(size, decoder.vocab_size)
        # int64, draft id to target id; None until a token map trims the head
        self.target_token_Vd: Tensor | None
        self.register_buffer("target_token_Vd", None, persistent=False)
        self.stack: DecoderStack | None = None
        self.draft_input: DraftInput | None = None

    def pack_stack(self) -> None:
        """See :func:`graphspec.models.stack.pack_network`."""
        self.draft_input = DraftInput(self.embed_tokens, self.embed_layernorm, None)
        self.stack = DecoderStack([self.layer], [self.hidden_layernorm], self.rotary.rotary_dim)

    def fuse(self, feature_BTF: Tensor) -> Tensor:
        """The feature itself, ``[B, T, H]``: the target's hidden state after its final norm."""
        return feature_BTF

    def forward(self, token_BT: Tensor, hidden_BTH: Tensor, attention: Attention, step: int = 0) -> Tensor:
        """One step: tokens (int64 target ids) with the hidden state of the token before each, ``[B, T, H]``; ``step`` changes nothing.

        Returns:
            Un-normed hidden states ``[B, T, H]``, the next step's input and what :meth:`logits` takes.
        """
        del step
        residual_BTH, rotation = self._enter(token_BT, hidden_BTH, attention)
        if self.stack is not None:
            return self.stack(residual_BTH, rotation, attention)[0]
        out_BTH: Hidden = self.layer(ResidualStream(residual_BTH), rotation, attention, self.hidden_layernorm)
        return hidden_of(out_BTH)

    def write_kv(self, token_BT: Tensor, hidden_BTH: Tensor, attention: Attention, step: int = 0) -> None:
        """The KV that :meth:`forward` would write."""
        del step
        if self.stack is not None:
            self.stack.write_kv(*self._enter(token_BT, hidden_BTH, attention), attention)
            return
        self.layer.self_attn.write_kv(*self._enter(token_BT, hidden_BTH, attention), attention, self.hidden_layernorm)

    def _enter(self, token_BT: Tensor, hidden_BTH: Tensor, attention: Attention) -> tuple[Tensor, Rotation]:
        """What the layer reads: the residual stream in front of it, and how it rotates."""
        valid_BT, rotation = attention.valid_BT, self.rotary.of(attention)
        if self.draft_input is not None:
            return self.fc(self.draft_input(token_BT, hidden_BTH, valid_BT)[0]), rotation
        embedding_BTH = self.embed_tokens(token_BT, valid_BT)
        hidden_BTH = torch.where(valid_BT[..., None], hidden_BTH, 0.0)
        if self.embed_layernorm is not None:
            embedding_BTH = self.embed_layernorm(embedding_BTH)
        return self.fc(torch.cat((embedding_BTH, hidden_BTH), dim=-1)), rotation

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """float32 ``[..., Vd]`` of what :meth:`forward` returned; column i is target token ``target_token_Vd[i]``, or i without a map."""
        del step
        out: Tensor = self.lm_head(hidden, self.lm_head_layernorm, float32=True)
        return out


def outline(facts: EagleFacts, target: LlamaModel) -> EagleDraft:
    """See :attr:`graphspec.catalog.Variant.outline`."""
    return EagleDraft(facts, 1, target.embed_tokens, target.lm_head)

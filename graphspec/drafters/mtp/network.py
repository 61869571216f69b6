"""Multi-token-prediction heads (DeepSeek-V3, arXiv 2412.19437, section 2.2; Qwen3-Next and Qwen3.5; MiMo, arXiv 2505.07608; Nemotron 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ...kernels.linear.linear import Hidden, ResidualStream
from ...models.decoder import DecoderLayer, MixerLayers
from ...models.layers import Embedding, Linear, RMSNorm
from ...models.stack import DecoderStack, DraftInput, packing_obstacle
from ..heads.network import DraftNetwork

if TYPE_CHECKING:
    from ...kernels.formulas import Rotation
    from ...models.attention import Attention
    from .facts import MTPFacts


class MTPHead(nn.Module):
    """Embedding and hidden state, each normed, projected to one vector; a whole decoder layer, or layers of one net each; a final norm.

    Args:
        facts: of all heads.
        layer: index of this head's layer, for its sliding window and its KV.

    Attributes:
        embed_tokens, lm_head: its own, where a checkpoint has others than the target's; None: those of all heads.
    """

    def __init__(self, facts: MTPFacts, layer: int) -> None:
        super().__init__()
        decoder = facts.decoder
        size = decoder.hidden_size
        self.hidden_first = facts.hidden_first
        self.embedding_norm, self.hidden_norm = RMSNorm.of(decoder), RMSNorm.of(decoder)
        self.projection = Linear(2 * size, size)
        self.layer = DecoderLayer(decoder, layer) if decoder.mixers is None else MixerLayers(decoder)
        self.norm = RMSNorm.of(decoder)
        self.embed_tokens: Embedding | None = None
        self.lm_head: Linear | None = None
        self.stack: DecoderStack | None = None
        self.draft_input: DraftInput | None = None

    def pack_stack(self, rotary_dim: int, embedding: Embedding) -> str | None:
        """See :func:`graphspec.models.stack.pack_network`."""
        if isinstance(self.layer, MixerLayers):
            return "layers of one mixer"
        if (reason := packing_obstacle([self.layer])) is not None:
            return reason
        self.draft_input = DraftInput(self.embed_tokens or embedding, self.embedding_norm, self.hidden_norm, self.hidden_first)
        self.stack = DecoderStack([self.layer], [self.layer.input_layernorm], rotary_dim, self.norm)
        self.layer.enter_stack(self.stack, 0)
        return None

    def forward(self, residual_BTH: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        """Normed ``[B, T, H]`` from the residual stream before the layer."""
        if self.stack is not None:
            return self.stack(residual_BTH, rotation, attention)[0]
        out_BTH: Tensor = self.norm(self.layer(ResidualStream(residual_BTH), rotation, attention))
        return out_BTH

    def enter(self, token_BT: Tensor, hidden_BTH: Tensor, valid_BT: Tensor, embedding: Embedding) -> Tensor:
        """The residual stream before the layer, ``[B, T, H]``; what is not valid is zero before the norms."""
        if self.draft_input is not None:
            entering_BTE, _ = self.draft_input(token_BT, hidden_BTH, valid_BT)
        else:
            hidden_BTH = torch.where(valid_BT[..., None], hidden_BTH, 0.0)
            halves = (self.embedding_norm((self.embed_tokens or embedding)(token_BT, valid_BT)), self.hidden_norm(hidden_BTH))
            entering_BTE = torch.cat(halves[::-1] if self.hidden_first else halves, dim=-1)
        out_BTH: Tensor = self.projection(entering_BTE)
        return out_BTH


class MTPDraft(DraftNetwork):
    """Prediction heads: one per draft step, or one applied over and over.

    Args:
        facts: sizes, and how many heads.
        max_positions, embed_tokens, lm_head: of :class:`~graphspec.drafters.heads.network.DraftNetwork`.
    """

    facts: MTPFacts

    def __init__(self, facts: MTPFacts, max_positions: int, embed_tokens: Embedding | None = None, lm_head: Linear | None = None) -> None:
        super().__init__(facts, max_positions, embed_tokens, lm_head)
        self.heads = nn.ModuleList(MTPHead(facts, layer) for layer in range(facts.num_heads))

    def pack_stack(self) -> str | None:
        """See :func:`graphspec.models.stack.pack_network`."""
        reasons = [cast("MTPHead", head).pack_stack(self.rotary.rotary_dim, self.embed_tokens) for head in self.heads]
        return next((reason for reason in reasons if reason is not None), None)

    def forward(self, token_BT: Tensor, hidden_BTH: Tensor, attention: Attention, step: int = 0) -> Tensor:
        """One step: tokens (int64) with the hidden state of the token before each, ``[B, T, H]``.

        Args:
            token_BT: int64 target ids.
            hidden_BTH: the target's feature, or what the step before returned.
            attention: over the KV of the heads.
            step: static; head ``min(step, num_heads - 1)`` runs.

        Returns:
            Hidden states ``[B, T, H]`` after the head's norm, the next step's input and what :meth:`logits` takes.
        """
        head = self._head(step)
        residual_BTH = head.enter(token_BT, hidden_BTH, attention.valid_BT, self.embed_tokens)
        out_BTH: Tensor = head(residual_BTH, self.rotary.of(attention), attention)
        return out_BTH

    def write_kv(self, token_BT: Tensor, hidden_BTH: Tensor, attention: Attention, step: int = 0) -> None:
        """The KV that :meth:`forward` would write."""
        head = self._head(step)
        residual_BTH = head.enter(token_BT, hidden_BTH, attention.valid_BT, self.embed_tokens)
        head.layer.write_kv(residual_BTH, self.rotary.of(attention), attention)

    def logits(self, hidden: Hidden, step: int = 0) -> Tensor:
        """float32 ``[..., V]`` of what ``forward`` returned for ``step``."""
        out: Tensor = (self._head(step).lm_head or self.lm_head)(hidden, float32=True)
        return out

    def _head(self, step: int) -> MTPHead:
        return cast("MTPHead", self.heads[min(step, self.facts.num_heads - 1)])

"""The EAGLE-1/2 draft network (arXiv 2401.15077, 2406.16858), with or without the norms of HASS (arXiv 2408.15766)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels.linear.linear import ResidualStream, hidden_of
from ...models.decoder import DecoderLayer
from ...models.layers import Embedding, Linear, RMSNorm
from ...models.stack import DecoderStack, DraftInput
from ..heads.network import DraftNetwork

if TYPE_CHECKING:
    from ...kernels.formulas import Rotation
    from ...models.attention import Attention
    from .facts import EagleFacts


class EagleDraft(DraftNetwork):
    """EAGLE-1/2 head: one layer over ``fc([embedding; hidden])``, between the target's embedding and the target's head.

    Args:
        facts: the head's sizes; ``fc_bias`` and ``layernorms`` settled (None counts as no).
        max_positions, embed_tokens, lm_head: of :class:`~graphspec.drafters.heads.network.DraftNetwork`.
        norms: which of ``embed_layernorm`` (after the embedding), ``hidden_layernorm`` (before the attention; the residual stays
            un-normed) and ``lm_head_layernorm`` (before the language-model head) the head has.
    """

    def __init__(
        self,
        facts: EagleFacts,
        max_positions: int,
        embed_tokens: Embedding | None = None,
        lm_head: Linear | None = None,
        norms: tuple[str, ...] = (),
    ) -> None:
        super().__init__(facts, max_positions, embed_tokens, lm_head)
        decoder = facts.decoder
        size = decoder.hidden_size

        def norm(name: str) -> RMSNorm | None:
            return RMSNorm(size, decoder.rms_norm_eps) if name in norms else None

        self.embed_layernorm = norm("embed_layernorm")
        self.fc = Linear(2 * size, size, bias=bool(facts.fc_bias))
        self.layer = DecoderLayer(decoder, 0)
        # EAGLE leaves out the norm before the attention.
        self.layer.input_layernorm = norm("hidden_layernorm")
        self.lm_head_layernorm = norm("lm_head_layernorm")
        self.draft_input: DraftInput | None = None

    def pack_stack(self) -> None:
        """See :func:`graphspec.models.stack.pack_network`."""
        self.draft_input = DraftInput(self.embed_tokens, self.embed_layernorm, None)
        self.layer.enter_stack(DecoderStack([self.layer], [self.layer.input_layernorm], self.rotary.rotary_dim), 0)

    def output_norm(self) -> RMSNorm | None:
        """HASS's norm before the head, if present."""
        return self.lm_head_layernorm

    def forward(self, token_BT: Tensor, hidden_BTH: Tensor, attention: Attention, step: int = 0) -> Tensor:
        """One step: tokens (int64 target ids) with the hidden state of the token before each, ``[B, T, H]``; ``step`` changes nothing.

        Returns:
            Un-normed hidden states ``[B, T, H]``, the next step's input and what :meth:`logits` takes.
        """
        del step
        residual_BTH, rotation = self._enter(token_BT, hidden_BTH, attention)
        return hidden_of(self.layer(ResidualStream(residual_BTH), rotation, attention))

    def write_kv(self, token_BT: Tensor, hidden_BTH: Tensor, attention: Attention, step: int = 0) -> None:
        """The KV that :meth:`forward` would write."""
        del step
        self.layer.write_kv(*self._enter(token_BT, hidden_BTH, attention), attention)

    def _enter(self, token_BT: Tensor, hidden_BTH: Tensor, attention: Attention) -> tuple[Tensor, Rotation]:
        """The residual stream before the layer, and how its attention rotates."""
        valid_BT, rotation = attention.valid_BT, self.rotary.of(attention)
        if self.draft_input is not None:
            return self.fc(self.draft_input(token_BT, hidden_BTH, valid_BT)[0]), rotation
        embedding_BTH, hidden_BTH = self.read(token_BT, hidden_BTH, valid_BT)
        if self.embed_layernorm is not None:
            embedding_BTH = self.embed_layernorm(embedding_BTH)
        return self.fc(torch.cat((embedding_BTH, hidden_BTH), dim=-1)), rotation

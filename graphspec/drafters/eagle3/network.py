"""The EAGLE-3 draft network (arXiv 2503.01840)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...kernels.linear.linear import Hidden, ResidualStream, hidden_of
from ...models.decoder import DecoderLayer, make_attention
from ...models.layers import Embedding, Linear, RMSNorm
from ...models.mlp import MLP
from ...models.stack import DecoderStack, DraftInput, PlainLayer, packing_obstacle
from ..heads.network import DraftNetwork

if TYPE_CHECKING:
    from ...facts import ModelFacts
    from ...kernels.formulas import Rotation
    from ...models.attention import Attention
    from .facts import Eagle3Facts


class Eagle3Layer(nn.Module):
    """The first decoder layer: its attention reads ``[norm(embedding); norm(hidden)]``.

    Args:
        facts: sizes and biases.
        norm_before_residual: the residual is the normed hidden state; otherwise it is the one before that norm.
    """

    def __init__(self, facts: ModelFacts, norm_before_residual: bool = False) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(facts.hidden_size, facts.rms_norm_eps)
        self.hidden_norm = RMSNorm(facts.hidden_size, facts.rms_norm_eps)
        self.self_attn = make_attention(facts, 0, input_size=2 * facts.hidden_size)
        self.post_attention_layernorm = RMSNorm(facts.hidden_size, facts.rms_norm_eps)
        self.mlp = MLP(facts)

    def forward(self, embedding_BTH: Tensor, hidden_BTH: Tensor, rotation: Rotation, attention: Attention) -> Hidden:
        """The residual stream after this layer, ``[B, T, H]``, from embeddings and hidden states ``[B, T, H]``."""
        x_BTE, entering_BTH = self.enter(embedding_BTH, hidden_BTH)
        residual_BTH: Hidden = ResidualStream(entering_BTH)
        residual_BTH = self.self_attn(x_BTE, rotation, attention, residual_BTH=residual_BTH)
        out_BTH: Hidden = self.mlp(residual_BTH, self.post_attention_layernorm, residual_BTH)
        return out_BTH

    def write_kv(self, embedding_BTH: Tensor, hidden_BTH: Tensor, rotation: Rotation, attention: Attention) -> None:
        """Write this layer's KV without computing its output."""
        x_BTE, _ = self.enter(embedding_BTH, hidden_BTH)
        self.self_attn.write_kv(x_BTE, rotation, attention)

    def enter(self, embedding_BTH: Tensor, hidden_BTH: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the attention ``[B, T, 2H]``, and the residual stream ``[B, T, H]``."""
        normed_BTH = self.hidden_norm(hidden_BTH)
        entering_BTE = torch.cat((self.input_layernorm(embedding_BTH), normed_BTH), dim=-1)
        return entering_BTE, normed_BTH if self.norm_before_residual else hidden_BTH


class Eagle3Draft(DraftNetwork):
    """EAGLE-3 head: ``fuse`` for features of the target, ``forward`` once per draft step, ``logits`` over the draft vocabulary.

    Args:
        facts: the head's sizes and options; ``norm_before_fc``, ``fc_norm`` and ``fc_bias`` settled (None counts as no).
        max_positions, embed_tokens, lm_head: of :class:`~graphspec.drafters.heads.network.DraftNetwork`.
    """

    first_pass_only: ClassVar[tuple[str, ...]] = ("input_norm", "fc_norm", "fc")
    """Parameters that only the first pass of a cycle reads."""
    facts: Eagle3Facts

    def __init__(
        self, facts: Eagle3Facts, max_positions: int, embed_tokens: Embedding | None = None, lm_head: Linear | None = None
    ) -> None:
        super().__init__(facts, max_positions, embed_tokens, lm_head)
        decoder = facts.decoder
        eps, num_taps = decoder.rms_norm_eps, facts.feature_size // facts.target_hidden_size
        self.input_norm = RMSNorm(facts.feature_size, eps) if facts.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(facts.target_hidden_size, eps) for _ in range(num_taps)) if facts.fc_norm else None
        self.fc = Linear(facts.feature_size, decoder.hidden_size, bias=bool(facts.fc_bias)) if facts.has_fc else None
        further = (DecoderLayer(decoder, layer) for layer in range(1, decoder.num_layers))
        self.layers = nn.ModuleList((Eagle3Layer(decoder, facts.norm_before_residual), *further))
        self.norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.stack: DecoderStack | None = None
        self.draft_input: DraftInput | None = None

    def pack_stack(self) -> str | None:
        """See :func:`graphspec.models.stack.pack_network`."""
        layers = cast("list[PlainLayer]", list(self.layers))
        if (reason := packing_obstacle(layers)) is not None:
            return reason
        norms = [None, *(layer.input_layernorm for layer in cast("list[DecoderLayer]", list(self.layers[1:])))]
        first = cast("Eagle3Layer", self.layers[0])
        self.draft_input = DraftInput(self.embed_tokens, first.input_layernorm, first.hidden_norm)
        self.stack = DecoderStack(layers, norms, self.rotary.rotary_dim, self.norm if self.facts.norm_output else None)
        return None

    def fuse(self, feature_BTF: Tensor) -> Tensor:
        """``[B, T, H]`` from the target's tapped residual streams, or its hidden state; the head's own hidden states are not fused."""
        if self.input_norm is not None:
            feature_BTF = self.input_norm(feature_BTF)
        if self.fc_norm is not None:
            streams = feature_BTF.split(self.facts.target_hidden_size, dim=-1)
            feature_BTF = torch.cat([norm(stream_BTH) for norm, stream_BTH in zip(self.fc_norm, streams, strict=True)], dim=-1)
        return feature_BTF if self.fc is None else hidden_of(self.fc(feature_BTF))

    def forward(self, token_BT: Tensor, hidden_BTH: Tensor, attention: Attention, step: int = 0) -> Tensor:
        """One step: tokens (int64 target ids) with the hidden state of the token before each, ``[B, T, H]``; ``step`` changes nothing.

        Returns:
            Hidden states ``[B, T, H]``, the next step's input and what :meth:`logits` takes: un-normed, or after the final norm with
            ``norm_output``.
        """
        del step
        if self.stack is not None:
            residual_BTH, rotation, entering_BTE = self._enter(token_BT, hidden_BTH, attention)
            return self.stack(residual_BTH, rotation, attention, entering_BTE)[0]
        last, inputs = self._upto_last(token_BT, hidden_BTH, attention)
        out_BTH: Hidden = last(*inputs)
        return self.norm(out_BTH) if self.facts.norm_output else hidden_of(out_BTH)

    def write_kv(self, token_BT: Tensor, hidden_BTH: Tensor, attention: Attention, step: int = 0) -> None:
        """The KV that :meth:`forward` would write."""
        del step
        if self.stack is not None:
            residual_BTH, rotation, entering_BTE = self._enter(token_BT, hidden_BTH, attention)
            self.stack.write_kv(residual_BTH, rotation, attention, entering_BTE)
            return
        last, inputs = self._upto_last(token_BT, hidden_BTH, attention)
        last.write_kv(*inputs)

    def _enter(self, token_BT: Tensor, hidden_BTH: Tensor, attention: Attention) -> tuple[Tensor, Rotation, Tensor]:
        """The residual stream before the first layer, the rotation, and the input of that layer's attention."""
        assert self.draft_input is not None, "a packed network"
        entering_BTE, residual_BTH = self.draft_input(token_BT, hidden_BTH, attention.valid_BT)
        if cast("Eagle3Layer", self.layers[0]).norm_before_residual:
            residual_BTH = entering_BTE[..., residual_BTH.shape[-1] :]
        return residual_BTH, self.rotary.of(attention), entering_BTE

    def _upto_last(self, token_BT: Tensor, hidden_BTH: Tensor, attention: Attention) -> tuple[Any, tuple[Any, ...]]:
        """Run all layers but the last; returns the last one and its arguments."""
        rotation = self.rotary.of(attention)
        inputs: tuple[Any, ...] = (*self.read(token_BT, hidden_BTH, attention.valid_BT), rotation, attention)
        *before, last = self.layers
        for layer in before:
            inputs = (layer(*inputs), rotation, attention)
        return last, inputs

    def output_norm(self) -> RMSNorm | None:
        """The final norm, unless ``forward`` applied it."""
        return None if self.facts.norm_output else self.norm

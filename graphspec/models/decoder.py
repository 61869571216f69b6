"""The target: a decoder of any family. The facts determine the layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..kernels.linear.linear import Hidden, ResidualStream, hidden_of
from .attention import RotaryEmbedding
from .experts import DenseAndExperts, MixtureOfExperts
from .gated_delta import GatedDeltaNet
from .latent import LatentAttention
from .layer_inputs import LayerInput, LayerInputVectors
from .layers import RMSNorm, SelfAttention, add, make_parameter
from .mamba2 import Mamba2
from .mlp import DenseMLP, dense_mlp
from .parallel_layer import ParallelLayer
from .recurrent_net import RecurrentNet, stack_convolutions
from .shared_kv import BorrowingAttention, KeyValueAttention
from .stack import DecoderStack, packing_obstacle
from .vocabulary import token_embedding, vocabulary_head

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..facts import ModelFacts
    from ..facts.multipliers import Multipliers
    from ..kernels.formulas import Rotation
    from .attention import Attention
    from .recurrence import Convolution


class TargetOutput(NamedTuple):
    """Result of one forward of a target."""

    hidden_BTH: Tensor
    """After the final norm; what :meth:`Decoder.logits` takes."""
    feature_BTF: Tensor | None
    """The tapped residual streams side by side, ascending by layer; None without taps."""


def make_attention(facts: ModelFacts, layer: int, input_size: int | None = None) -> SelfAttention | LatentAttention:
    """The attention of a layer that attends; ``input_size``: width of its input where it isn't the hidden size."""
    if facts.latent is not None:
        return LatentAttention(facts, layer, input_size)
    if facts.kv_sources and not facts.keeps(layer):
        return BorrowingAttention(facts, layer, input_size)
    return (KeyValueAttention if facts.heads(layer).keys_are_values else SelfAttention)(facts, layer, input_size)


def make_token_mixer(facts: ModelFacts, layer: int) -> SelfAttention | LatentAttention | RecurrentNet:
    """The token mixer of a layer: attention, or a recurrent net."""
    if facts.recurrent is not None and facts.is_recurrent(layer):
        return GatedDeltaNet(facts, layer) if facts.recurrent.ssm is None else Mamba2(facts, layer)
    return make_attention(facts, layer)


def make_mlp(facts: ModelFacts, layer: int) -> DenseMLP | MixtureOfExperts | DenseAndExperts:
    """The channel mixer of a layer: an MLP, a mixture of experts, or both."""
    if facts.experts is None or not facts.has_experts(layer):
        return dense_mlp(facts, facts.mlp_size(layer))
    return DenseAndExperts(facts, layer) if facts.experts.beside_dense else MixtureOfExperts(facts)


def make_rotaries(facts: ModelFacts, positions: int) -> list[RotaryEmbedding]:
    """The tables of a network's rotations for that many positions, one for each shape of heads."""
    pools = zip(facts.ropes, facts.pool_heads, strict=True)
    return [RotaryEmbedding(ropes[0], heads.dim, positions, ropes[1:]) for ropes, heads in pools]


def find_rotations(layers: Iterable[nn.Module], facts: ModelFacts, positions: int) -> None:
    """Tell the attention of each layer which rows of its table are those of its own rotation."""
    for index, layer in enumerate(layers):
        if isinstance(mixer := getattr(layer, "self_attn", None), SelfAttention):
            mixer.rope_rows = facts.rope_index(index) * positions


def scale_embedding(embedding_BTH: Tensor, multipliers: Multipliers) -> Tensor:
    """Embeddings as they enter the first layer, ``[B, T, H]``."""
    scale = multipliers.embedding
    if multipliers.embedding_rounded:
        scale = torch.tensor(scale, dtype=embedding_BTH.dtype, device="cpu").item()
    return embedding_BTH if scale == 1 else embedding_BTH * scale


class MixerLayer(nn.Module):
    """One net after one norm, added to the residual stream: attention, a recurrent net, MLP or a mixture of experts (Nemotron-H)."""

    def __init__(self, facts: ModelFacts, layer: int) -> None:
        super().__init__()
        self.norm = RMSNorm.of(facts)
        self.alone = not (facts.attends(layer) or facts.is_recurrent(layer))
        self.mixer: nn.Module = make_mlp(facts, layer) if self.alone else make_token_mixer(facts, layer)

    def forward(self, residual_BTH: Hidden, rotation: Rotation, attention: Attention) -> Hidden:
        """See :meth:`DecoderLayer.forward`."""
        out_BTH: Hidden
        if self.alone:
            out_BTH = self.mixer(residual_BTH, self.norm, residual_BTH, valid=attention.valid_BT)
        else:
            out_BTH = self.mixer(residual_BTH, rotation, attention, self.norm, residual_BTH)
        return out_BTH


class MixerLayers(nn.ModuleList):
    """Layers of one net each, one of which attends, in the place of a decoder layer.

    Args:
        facts: of these layers.
    """

    def __init__(self, facts: ModelFacts) -> None:
        assert facts.kv_layers == 1 and facts.recurrent is None, "the keys and values of one layer, and no other state"
        super().__init__(MixerLayer(facts, layer) for layer in range(facts.num_layers))

    def forward(self, residual_BTH: Hidden, rotation: Rotation, attention: Attention) -> Hidden:
        """See :meth:`DecoderLayer.forward`."""
        for layer in self:
            residual_BTH = layer(residual_BTH, rotation, attention)
        return residual_BTH

    def write_kv(self, residual_BTH: Hidden, rotation: Rotation, attention: Attention) -> None:
        """See :meth:`DecoderLayer.write_kv`; layers after the one that attends don't run."""
        for layer in cast("list[MixerLayer]", self):
            if not layer.alone:
                cast("SelfAttention", layer.mixer).write_kv(residual_BTH, rotation, attention, layer.norm)
                return
            residual_BTH = layer(residual_BTH, rotation, attention)


class DecoderLayer(nn.Module):
    """Attention or a recurrent net, then an MLP or a mixture of experts, each added to the residual stream.

    Each has a norm before it, after it, or both, as ``norms`` of the family says.
    """

    def __init__(self, facts: ModelFacts, layer: int) -> None:
        super().__init__()
        where = facts.family.norms
        self.input_layernorm = None if where == "after" else RMSNorm.of(facts)
        self.self_attn = make_token_mixer(facts, layer)
        self.post_attention_layernorm = RMSNorm.of(facts)  # where norms stand before blocks, the MLP's
        self.pre_feedforward_layernorm = RMSNorm.of(facts) if where == "around" else None
        self.post_feedforward_layernorm = None if where == "before" else RMSNorm.of(facts)
        self.mlp = make_mlp(facts, layer)
        self.residual_scale = facts.multipliers.residual
        self.layer_input = LayerInput(facts) if facts.layer_inputs is not None else None
        self.scale_1 = make_parameter(1) if facts.family.layer_scale else None
        self.stack: DecoderStack | None = None
        self.place = 0

    def enter_stack(self, stack: DecoderStack, place: int) -> None:
        """Run as layer ``place`` of ``stack``, which holds the weights."""
        self.stack, self.place = stack, place

    def forward(self, residual_BTH: Hidden, rotation: Rotation, attention: Attention, own_BTP: Tensor | None = None) -> Hidden:
        """The residual stream after this layer, ``[B, T, H]``. Passed as a :class:`ResidualStream`, its norms need no pass of their own.

        ``own_BTP``: the layer's own input, where layers have one.
        """
        if self.stack is not None:
            out = self.stack.layer(self.place, hidden_of(residual_BTH), rotation, attention)
            return ResidualStream(out) if isinstance(residual_BTH, ResidualStream) else out
        if self.post_feedforward_layernorm is not None:
            mixed_BTH = self.self_attn(residual_BTH, rotation, attention, self.input_layernorm)
            residual_BTH = add(residual_BTH, self.post_attention_layernorm(mixed_BTH))
            mixed_BTH = self.mlp(residual_BTH, self.pre_feedforward_layernorm, valid=attention.valid_BT)
            return self._leave(add(residual_BTH, self.post_feedforward_layernorm(mixed_BTH)), own_BTP)
        if self.residual_scale != 1:
            scale = self.residual_scale
            residual_BTH = add(residual_BTH, scale * self.self_attn(residual_BTH, rotation, attention, self.input_layernorm))
            return add(residual_BTH, scale * self.mlp(residual_BTH, self.post_attention_layernorm, valid=attention.valid_BT))
        residual_BTH = self.self_attn(residual_BTH, rotation, attention, self.input_layernorm, residual_BTH)
        out_BTH: Hidden = self.mlp(residual_BTH, self.post_attention_layernorm, residual_BTH, valid=attention.valid_BT)
        return out_BTH

    def _leave(self, residual_BTH: Hidden, own_BTP: Tensor | None) -> Hidden:
        """What follows attention and MLP: the layer's own input, and a scale of the stream."""
        if self.layer_input is not None and own_BTP is not None:
            residual_BTH = self.layer_input(residual_BTH, own_BTP)
        if self.scale_1 is None:
            return residual_BTH
        scaled_BTH = hidden_of(residual_BTH) * self.scale_1
        return ResidualStream(scaled_BTH) if isinstance(residual_BTH, ResidualStream) else scaled_BTH

    def write_kv(self, residual_BTH: Hidden, rotation: Rotation, attention: Attention) -> None:
        """Write this layer's KV without computing its output."""
        if self.stack is not None:
            self.stack.write_kv(hidden_of(residual_BTH), rotation, attention, index=self.place)
            return
        assert not isinstance(self.self_attn, RecurrentNet), "drafters attend in their last layer"
        self.self_attn.write_kv(residual_BTH, rotation, attention, self.input_layernorm)


class Decoder(nn.Module):
    """A target with its language-model head. The attention that the caller passes handles pages, trees and chunks.

    Args:
        facts: the checkpoint's sizes.
        tap_layers: layers whose input residual streams make up the feature; the number of layers: the last one's output, un-normed.
        max_positions: positions the RoPE table covers; None: the checkpoint's ``max_position_embeddings``.
    """

    def __init__(self, facts: ModelFacts, tap_layers: tuple[int, ...] = (), max_positions: int | None = None) -> None:
        super().__init__()
        self.facts, self.tap_layers = facts, tap_layers
        positions = max_positions or facts.max_position_embeddings
        self.rotary, *others = make_rotaries(facts, positions)
        self.further_rotaries = nn.ModuleList(others)
        self._pool_of = [facts.pool(layer) for layer in range(facts.num_layers)]
        # Layers up to the last one that writes keys and values.
        self._written = max((layer for layer in range(facts.num_layers) if facts.keeps(layer)), default=facts.num_layers - 1) + 1
        self.embed_tokens = token_embedding(facts)
        self.layer_inputs = LayerInputVectors(facts) if facts.layer_inputs is not None else None
        make_layer = MixerLayer if facts.mixers is not None else ParallelLayer if facts.family.side_by_side else DecoderLayer
        self.layers = nn.ModuleList(make_layer(facts, layer) for layer in range(facts.num_layers))
        find_rotations(self.layers, facts, positions)
        self.norm = RMSNorm.of(facts)
        self.lm_head = vocabulary_head(facts)
        if facts.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.stack: DecoderStack | None = None
        self._convolution: Convolution | None = None

    def pack_stack(self) -> str | None:
        """See :func:`graphspec.models.stack.pack_network`."""
        if self.facts.mixers is not None:
            return "layers of one mixer"
        if self.facts.family.side_by_side:
            return "recurrent layers"
        layers = list(cast("list[DecoderLayer]", self.layers))
        if (reason := packing_obstacle(layers)) is not None:
            return reason
        norms = [layer.input_layernorm for layer in layers]
        self.stack = DecoderStack(layers, norms, self.rotary.rotary_dim, self.norm, self.tap_layers)
        for place, layer in enumerate(layers):
            layer.enter_stack(self.stack, place)
        return None

    def embed(self, token_BT: Tensor, valid_BT: Tensor) -> Tensor:
        """``[B, T, H]``; a token that is -1, out of range or not valid is the zero vector."""
        return scale_embedding(self.embed_tokens(token_BT, valid_BT), self.facts.multipliers)

    def _places(self, attention: Attention) -> list[tuple[Rotation, Attention]]:
        """By pool, how its layers rotate, and their attention."""
        further = cast("Sequence[RotaryEmbedding]", self.further_rotaries)
        first = (self.rotary.of(attention), attention)
        return [first, *((rotary.of(attention), attention.over(pool)) for pool, rotary in enumerate(further, 1))]

    def _own_inputs(self, token_BT: Tensor, attention: Attention, embedding_BTH: Tensor) -> tuple[Tensor, ...]:
        """By layer its own input; empty: layers have none."""
        if self.layer_inputs is None:
            return ()
        own: tuple[Tensor, ...] = self.layer_inputs(token_BT, attention.valid_BT, embedding_BTH)
        return own

    def forward(self, token_BT: Tensor, attention: Attention) -> TargetOutput:
        """Hidden states and features of int64 tokens ``[B, T]`` at the positions, and over the KV, of ``attention``."""
        embedding_BTH = self.embed(token_BT, attention.valid_BT)
        places = self._places(attention)
        if self.stack is not None:
            hidden_BTH, taps_BTF = self.stack(embedding_BTH, *places[0])
            return TargetOutput(hidden_BTH, taps_BTF if self.tap_layers else None)
        residual_BTH, own = ResidualStream(embedding_BTH), self._own_inputs(token_BT, attention, embedding_BTH)
        taps = []
        for index, layer in enumerate(self.layers):
            if index in self.tap_layers:
                taps.append(residual_BTH.hidden)
            residual_BTH = layer(residual_BTH, *places[self._pool_of[index]], *own[index : index + 1])
        if len(self.layers) in self.tap_layers:
            taps.append(residual_BTH.hidden)
        return TargetOutput(self.norm(residual_BTH), torch.cat(taps, dim=-1) if taps else None)

    def write_kv(self, token_BT: Tensor, attention: Attention) -> None:
        """Write the KV of all layers without computing the output: the last layer that has keys and values stops at them."""
        embedding_BTH = self.embed(token_BT, attention.valid_BT)
        places = self._places(attention)
        if self.stack is not None:
            self.stack.write_kv(embedding_BTH, *places[0])
            return
        residual_BTH, own = ResidualStream(embedding_BTH), self._own_inputs(token_BT, attention, embedding_BTH)
        *before, last = cast("list[DecoderLayer]", self.layers)[: self._written]
        for index, layer in enumerate(before):
            residual_BTH = layer(residual_BTH, *places[self._pool_of[index]], *own[index : index + 1])
        last.write_kv(residual_BTH, *places[self._pool_of[self._written - 1]])

    def stacked_convolution(self) -> Convolution:
        """Weights of the convolutions of all recurrent layers, laid out when first asked for: before any program holds on to them."""
        if self._convolution is None:
            self._convolution = stack_convolutions([module for module in self.modules() if isinstance(module, RecurrentNet)])
        return self._convolution

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[..., V]`` of hidden states after the final norm, ``[..., H]``; of several ranks each has its own columns
        (:class:`~graphspec.models.vocabulary.VocabParallelLinear`).
        """
        out: Tensor = self.lm_head(hidden, float32=True)
        divisor, cap = self.facts.multipliers.logits, self.facts.multipliers.softcap
        out = out if divisor == 1 else out / divisor
        return out if cap is None else torch.tanh(out / cap) * cap

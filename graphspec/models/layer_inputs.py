"""Inputs that each layer has for itself: per-layer embeddings (Gemma 4's E models)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.linear.linear import Hidden, hidden_of
from .layers import Embedding, Linear, RMSNorm, add

if TYPE_CHECKING:
    from ..facts import ModelFacts


class LayerInputVectors(nn.Module):
    """A small vector of each token for each layer, from an embedding of its own and from a projection of the token's embedding.

    Args:
        facts: sizes; ``facts.layer_inputs`` is there.
    """

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        assert facts.layer_inputs is not None, "a model whose layers have inputs"
        self.width, self.layers = facts.layer_inputs.width, facts.num_layers
        columns = self.layers * self.width
        self.embed_tokens = Embedding(facts.layer_inputs.vocab_size, columns)
        self.proj = Linear(facts.hidden_size, columns)
        self.norm = RMSNorm.of(facts, self.width)
        self.scale = facts.hidden_size**-0.5

    def forward(self, token_BT: Tensor, valid_BT: Tensor, embedding_BTH: Tensor) -> tuple[Tensor, ...]:
        """By layer ``[B, T, P]``, from int64 tokens, a bool mask and the scaled embedding that enters the first layer."""
        own_BTE = self.embed_tokens(token_BT, valid_BT)
        # As the other embedding's, the factor is rounded to the dtype of the weights.
        own_BTE = own_BTE * torch.tensor(self.width**0.5, dtype=own_BTE.dtype, device="cpu").item()
        projected_BTE = self.norm.by_parts(hidden_of(self.proj(embedding_BTH)) * self.scale)
        return ((projected_BTE + own_BTE) * 2.0**-0.5).split(self.width, dim=-1)


class LayerInput(nn.Module):
    """What a layer does with its vector: gated by the stream, projected and normed, it is added to the stream.

    Args:
        facts: sizes; ``facts.layer_inputs`` is there.
    """

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        assert facts.layer_inputs is not None, "a model whose layers have inputs"
        self.gate = Linear(facts.hidden_size, facts.layer_inputs.width)
        self.proj = Linear(facts.layer_inputs.width, facts.hidden_size)
        self.norm = RMSNorm.of(facts)

    def forward(self, residual_BTH: Hidden, own_BTP: Tensor) -> Hidden:
        """The residual stream ``[B, T, H]`` after it."""
        gated_BTP = F.gelu(hidden_of(self.gate(residual_BTH)), approximate="tanh") * own_BTP
        return add(residual_BTH, self.norm(self.proj(gated_BTP)))

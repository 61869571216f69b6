"""Gemma 4's assistant (``gemma4_assistant`` of transformers)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ...kernels.linear.linear import ResidualStream
from ...kernels.sampling.topk import stable_topk
from ...models.decoder import DecoderLayer, find_rotations, make_rotaries, scale_embedding
from ...models.layers import Embedding, Linear, RMSNorm, SelfAttention, make_parameter
from ...models.vocabulary import vocabulary_head

if TYPE_CHECKING:
    from ...facts import ModelFacts
    from ...models.attention import Attention, RotaryEmbedding
    from .facts import AssistantFacts, Clusters


class ClusterHead(nn.Module):
    """A language-model head over the tokens of the clusters whose centroids score best.

    Args:
        clusters: how many there are, and how many are chosen.
        hidden_size: of the input.
        vocab_size: of all clusters together.
    """

    def __init__(self, clusters: Clusters, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.clusters = clusters
        self.centroids = Linear(hidden_size, clusters.count)
        self.weight = make_parameter(vocab_size, hidden_size)
        # int64: the tokens, cluster by cluster; rows of the weight are in this order, so that those of a cluster lie next to each other
        self.token_V: Tensor
        self.register_buffer("token_V", torch.arange(vocab_size, device="cpu"), persistent=False)

    def order(self, token_V: Tensor) -> None:
        """Lay out the weight, whose rows are those of tokens 0, 1, ..., in the order of ``token_V``, int64, every token once."""
        token_V = token_V.to(self.weight.device)
        if not self.weight.is_meta:
            self.weight = nn.Parameter(self.weight[token_V], requires_grad=False)
        self.token_V = token_V

    def forward(self, hidden: Tensor) -> Tensor:
        """float32 ``[..., V]`` of hidden states ``[..., H]``. Tokens of other clusters get the lowest logit of the chosen ones less 1."""
        scores = self.centroids(hidden, float32=True)
        _, chosen = stable_topk(scores, self.clusters.chosen)
        rows = self.weight.unflatten(0, (self.clusters.count, -1))[chosen].flatten(-3, -2)
        scored = torch.matmul(rows, hidden[..., None])[..., 0].float()
        tokens = self.token_V.unflatten(0, (self.clusters.count, -1))[chosen].flatten(-2)
        floor = scored.amin(-1, keepdim=True) - 1.0
        return floor.expand(*floor.shape[:-1], self.weight.shape[0]).scatter(-1, tokens, scored)


class AssistantDraft(nn.Module):
    """A small decoder between two projections, whose layers attend over the target's keys and values.

    It reads the target's embedding of a token, side by side with the target's hidden state of the token before it, or with its own last
    output, projected to the target's width.

    Args:
        facts: sizes, and whose keys and values the layers read.
        target: facts of the target.
        max_positions: positions the RoPE tables cover.
        embed_tokens: the target's embedding.

    Attributes:
        target_token_Vd: None: the vocabulary is the target's.
    """

    target_token_Vd: Tensor | None = None

    def __init__(self, facts: AssistantFacts, target: ModelFacts, max_positions: int, embed_tokens: Embedding) -> None:
        super().__init__()
        decoder, width = facts.decoder, facts.target_hidden_size
        self.facts = facts
        self.rotaries = nn.ModuleList(make_rotaries(decoder, max_positions))
        self.embed_tokens = embed_tokens
        self.pre_projection = Linear(2 * width, decoder.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(decoder, layer) for layer in range(decoder.num_layers))
        find_rotations(self.layers, decoder, max_positions)
        self.pools = [decoder.pool(layer) for layer in range(decoder.num_layers)]
        for layer, source in zip(cast("list[DecoderLayer]", self.layers), facts.target_layers, strict=True):
            cast("SelfAttention", layer.self_attn).layer = target.place(source)
        self.norm = RMSNorm.of(decoder)
        self.post_projection = Linear(decoder.hidden_size, width)
        self.lm_head: nn.Module
        if facts.clusters is not None:
            self.lm_head = ClusterHead(facts.clusters, decoder.hidden_size, facts.draft_vocab_size)
        else:
            self.lm_head = vocabulary_head(decoder)

    def pack_stack(self) -> str | None:
        """See :func:`graphspec.models.stack.pack_network`."""
        return "keys and values of another network"

    def fuse(self, feature_BTF: Tensor) -> Tensor:
        """The feature itself, the target's hidden state after its final norm."""
        return feature_BTF

    def forward(self, token_BT: Tensor, hidden_BTE: Tensor, attention: Attention, step: int = 0) -> Tensor:
        """One step.

        Args:
            token_BT: int64.
            hidden_BTE: for step 0 the target's feature of the token before, ``[B, T, F]``, else what the step before returned.
            attention: over the target's keys and values.
            step: static.

        Returns:
            Hidden states ``[B, T, H]`` after the final norm, what :meth:`logits` takes.
        """
        hidden_BTF = self.post_projection(hidden_BTE) if step else hidden_BTE
        hidden_BTF = torch.where(attention.valid_BT[..., None], hidden_BTF, 0.0)
        embedding_BTF = scale_embedding(self.embed_tokens(token_BT, attention.valid_BT), self.facts.embedding)
        residual_BTH = ResidualStream(self.pre_projection(torch.cat((embedding_BTF, hidden_BTF), -1)))
        rotaries = cast("list[RotaryEmbedding]", self.rotaries)
        places = [(rotary.of(attention), attention.over(pool) if pool else attention) for pool, rotary in enumerate(rotaries)]
        for layer, pool in zip(self.layers, self.pools, strict=True):
            residual_BTH = layer(residual_BTH, *places[pool])
        out_BTH: Tensor = self.norm(residual_BTH)
        return out_BTH

    def write_kv(self, token_BT: Tensor, hidden_BTE: Tensor, attention: Attention, step: int = 0) -> None:
        """Nothing: the layers have no keys and values of their own."""

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """float32 ``[..., V]`` of what :meth:`forward` returned, the same for every ``step``."""
        del step
        out: Tensor = self.lm_head(hidden) if self.facts.clusters is not None else self.lm_head(hidden, float32=True)
        return out

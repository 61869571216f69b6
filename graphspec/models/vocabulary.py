"""Embedding and language-model head, whole or divided among ranks by token, and the weights that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Embedding, Linear, ParameterShards, ShardedModule

if TYPE_CHECKING:
    from ..facts import ModelFacts
    from ..facts.sharding import Sharding
    from .packed_weight import PackedWeight


class VocabParallelEmbedding(Embedding, ShardedModule):
    """An embedding whose rows are divided among the ranks by token.

    Args:
        sharding: of the model.
        vocab_size: of the whole embedding.
        hidden_size: of a row.
    """

    sharded = True

    def __init__(self, sharding: Sharding, vocab_size: int, hidden_size: int) -> None:
        shard = sharding.vocabulary_shard(vocab_size)
        super().__init__(shard.size, hidden_size)
        self.begin = shard.pieces[0][0]
        self.shards = {"weight": ParameterShards(0, (shard,))}

    def forward(self, token_BT: Tensor, valid_BT: Tensor) -> Tensor:
        """See :class:`Embedding`. At most one rank adds anything but zeros, so the sum is exact."""
        return self.comm.all_reduce(super().forward(token_BT - self.begin, valid_BT))


class VocabParallelLinear(Linear, ShardedModule):
    """A language-model head whose rows are divided among the ranks by token. A rank's logits are those of its own rows, ``[..., Vr]``.

    All ranks have as many rows; those past the end of the vocabulary are zero.

    Args:
        sharding: of the model.
        in_features: hidden size.
        vocab_size: of the whole head.
    """

    sharded = True

    def __init__(self, sharding: Sharding, in_features: int, vocab_size: int) -> None:
        shard = sharding.vocabulary_shard(vocab_size)
        super().__init__(in_features, shard.size)
        self.vocab_size, self.piece = vocab_size, shard.pieces[0]
        self.shard_rows(shard)
        self.token_Vr: Tensor
        self.register_buffer("token_Vr", self._own(torch.arange(vocab_size, device="cpu")), persistent=False)

    def name_tokens(self, target_token_Vd: Tensor) -> None:
        """Take the target ids of a reduced vocabulary, int64 ``[Vd]``, in place of the columns' numbers."""
        self.token_Vr = self._own(target_token_Vd)

    def _own(self, token_V: Tensor) -> Tensor:
        """Target ids of this rank's columns, int64 ``[Vr]``, -1 past the end of the vocabulary."""
        begin, count = self.piece
        return F.pad(token_V[begin : begin + count], (0, self.parts[0] - count), value=-1)

    def gather(self, own: Tensor) -> Tensor:
        """The logits of all ranks, ``[..., V]``, from each one's own, ``[..., Vr]``."""
        return self.comm.all_gather(own)[..., : self.vocab_size]


def token_embedding(facts: ModelFacts) -> Embedding:
    """The embedding of a model."""
    if facts.vocabulary.sharded:
        return VocabParallelEmbedding(facts.vocabulary, facts.vocab_size, facts.hidden_size)
    return Embedding(facts.vocab_size, facts.hidden_size)


def vocabulary_head(facts: ModelFacts, vocab_size: int | None = None) -> Linear:
    """The language-model head of a model; ``vocab_size``: of a draft's reduced vocabulary."""
    size = vocab_size or facts.vocab_size
    if facts.vocabulary.sharded:
        return VocabParallelLinear(facts.vocabulary, facts.hidden_size, size)
    return Linear(facts.hidden_size, size)


def sharded_head(network: object) -> VocabParallelLinear | None:
    """The head of ``network``, its own or the target's, if ranks have a part of it each; None: its logits are whole."""
    modules = network.modules() if isinstance(network, nn.Module) else ()
    return next((module for module in modules if isinstance(module, VocabParallelLinear)), None)


def set_weight(module: Linear | Embedding, weight: nn.Parameter | PackedWeight, stored: torch.dtype | None = None) -> None:
    """Give a layer its weight.

    Args:
        module: whose weight is replaced.
        weight: numbers or codes; layers may share one.
        stored: the 16-bit dtype in which a checkpoint has the numbers; None: it has another.
    """
    del module.weight
    module.weight, module.stored = weight, stored

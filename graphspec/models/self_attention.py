"""Attention over keys and values of its own projections, and what it shares with other nets that mix tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from .attention import HeadTransform, PagedAttention, Weighing
from .layers import (
    Linear,
    NeighbourPairsProjection,
    ParameterShards,
    RMSNorm,
    ShardedModule,
    UnscaledNorm,
    make_parameter,
    row_parallel_linear,
)

if TYPE_CHECKING:
    from ..facts import ModelFacts
    from ..facts.rope import RopeFacts
    from ..kernels.formulas import Rotation
    from ..kernels.linear.linear import Hidden
    from .attention import Attention


class TokenMixer(nn.Module):
    """Base of what mixes the tokens of a layer, attention or a recurrent net. They differ in what enters their last projection."""

    last: ClassVar[str] = "o_proj"
    """Name of the last projection."""

    def inner(self, x_BTH: Hidden, rotation: Rotation, attention: Attention, norm: RMSNorm | None) -> Tensor:
        """The input of the last projection, ``[B, T, E]``."""
        raise NotImplementedError

    def forward(
        self, x_BTH: Hidden, rotation: Rotation, attention: Attention, norm: RMSNorm | None = None, residual_BTH: Hidden | None = None
    ) -> Hidden:
        """``residual + mixer(norm(x))``, ``[B, T, H]``; either may be absent. A stream where the residual is one."""
        out_BTH: Hidden = getattr(self, self.last)(self.inner(x_BTH, rotation, attention, norm), residual=residual_BTH)
        return out_BTH


def query_growth(rope: RopeFacts) -> tuple[float, int] | None:
    """Arguments of :func:`grown`; None: queries don't grow."""
    return (rope.query_beta, rope.original_max_position_embeddings) if rope.query_beta else None


def grown(position_BT: Tensor, beta: float, context: int) -> Tensor:
    """Factor of the queries of each token, ``[B, T, 1, 1]`` float32: it grows with each ``context`` positions (Llama 4's scaling)."""
    return (1 + beta * torch.log(1 + torch.floor(position_BT / context)))[..., None, None]


class SelfAttention(TokenMixer, ShardedModule):
    """Projections, optional query / key norm, RoPE and optional output gate around an :class:`~graphspec.models.attention.Attention`.

    Args:
        facts: sizes and biases.
        layer: index of this layer, for its sliding window and the place of its KV.
        input_size: width of the input where it isn't the hidden size.
    """

    def __init__(self, facts: ModelFacts, layer: int, input_size: int | None = None) -> None:
        super().__init__()
        heads = facts.heads(layer)
        query, key = facts.num_heads * heads.dim, heads.count * heads.dim
        self.layer, self.head_dim = facts.place(layer), heads.dim
        self.scale = facts.score_scale(layer)
        self.window_left = facts.sliding_window[layer]
        self.rope_rows = 0
        """Rows of the network's table before those of this layer's rotation."""
        rope = facts.layer_rope[layer] if facts.layer_rope else facts.rope
        self.sink_Q = make_parameter(facts.num_heads) if facts.family.attention_sinks else None
        self.shards: dict[str, ParameterShards] = {}
        if facts.sharding.sharded:
            self.shards = {"sink_Q": ParameterShards(0, (facts.sharding.shard(facts.num_heads),))}
        self.softcap = facts.multipliers.score_softcap
        self.query_growth = query_growth(rope)
        self.gated, self.sharding = facts.family.attention_gate, facts.sharding
        assert not (facts.family.interleaved and (self.gated or facts.qk_norm)), "rows of gates and of norms would have to move too"
        self.neighbours = rope.rotary_dim(heads.dim) if facts.family.interleaved else 0
        """Rotated channels of a head whose pairs are neighbours in the checkpoint; 0: they are half of them apart."""
        entering = self.make_entering(input_size or facts.hidden_size, 2 * query if self.gated else query, key, facts.attention_bias)
        if facts.sharding.sharded:
            keys = [facts.sharding.key_shard(heads.dim)] * (len(entering.parts) - 1)
            entering.shard_rows(facts.sharding.shard(entering.parts[0]), *keys)
        self.o_proj = row_parallel_linear(facts.sharding, query, facts.hidden_size, bias=facts.output_bias)
        whole = facts.family.qk_norm == "projection"
        self.q_norm = RMSNorm.of(facts, query if whole else heads.dim) if facts.qk_norm else None
        self.k_norm = RMSNorm.of(facts, key if whole else heads.dim) if facts.qk_norm else None
        self.value_norm = UnscaledNorm(facts.rms_norm_eps) if facts.family.value_norm else None
        self.sharded = facts.norms_over_ranks(layer)
        if self.sharded and self.q_norm is not None and self.k_norm is not None:
            self.q_norm.shards = {"weight": ParameterShards(0, (facts.sharding.shard(query),))}
            self.k_norm.shards = {"weight": ParameterShards(0, (facts.sharding.key_shard(heads.dim),))}
        # The op that rotates queries and keys norms them too, but head by head only, and scales after the cast back.
        self.norms_apart = facts.qk_norm and (whole or facts.family.norm == "float32")
        assert not (self.gated and self.norms_apart), "gates lie between the queries of the heads"
        self.bare = len(entering.parts) == 3 and not (self.gated or self.norms_apart or facts.family.value_norm or self.query_growth)
        """Nothing lies between the projections and the op that norms, rotates and writes."""

    def make_entering(self, input_size: int, query: int, key: int, bias: bool) -> Linear:
        """Make the projections that the attention begins with, as one layer: rows of queries, keys and values."""
        if self.neighbours:
            dims = {"head_dim": self.head_dim, "rotary_dim": self.neighbours}
            self.qkv_proj: Linear = NeighbourPairsProjection(input_size, query, key, key, **dims, bias=bias)
        else:
            self.qkv_proj = Linear(input_size, query, key, key, bias=bias)
        return self.qkv_proj

    def enter(self, x_BTH: Hidden, norm: RMSNorm | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as projected, ``[B, T, E]`` each."""
        query_BTE, key_BTE, value_BTE = self.qkv_proj(x_BTH, norm).split(self.qkv_proj.parts, dim=-1)
        return query_BTE, key_BTE, value_BTE

    def inner(self, x_BTH: Hidden, rotation: Rotation, attention: Attention, norm: RMSNorm | None) -> Tensor:
        if (rotated_BTQD := self._write_heads(x_BTH, rotation, attention, norm)) is not None:
            return attention.read(self.layer, rotated_BTQD, self.scale, self.window_left, self.weighing()).flatten(2)
        query_BTQD, gate_BTQD, key_BTGD, value_BTGD = self._project(x_BTH, norm)
        if self.query_growth is not None:
            query_BTQD = query_BTQD * grown(attention.position_BT, *self.query_growth).to(query_BTQD.dtype)
        heads = self._heads(rotation)
        out_BTQD = attention(self.layer, query_BTQD, key_BTGD, value_BTGD, heads, self.scale, self.window_left, self.weighing())
        if gate_BTQD is not None:
            out_BTQD = out_BTQD * torch.sigmoid(gate_BTQD)
        return out_BTQD.flatten(2)

    def weighing(self) -> Weighing:
        """How scores become weights."""
        return Weighing(None if self.sink_Q is None else self.sink_Q.float(), self.softcap)

    def write_kv(self, x_BTH: Hidden, rotation: Rotation, attention: Attention, norm: RMSNorm | None = None) -> None:
        """Write the KV that :meth:`forward` would write, and nothing else."""
        if self._write_heads(x_BTH, rotation, attention, norm) is not None:
            return
        query_BTQD, _, key_BTGD, value_BTGD = self._project(x_BTH, norm)
        attention.write(self.layer, query_BTQD, key_BTGD, value_BTGD, self._heads(rotation))

    def _write_heads(self, x_BTH: Hidden, rotation: Rotation, attention: Attention, norm: RMSNorm | None) -> Tensor | None:
        """:meth:`Linear.write_heads`, where nothing lies between projection and rotation, and KV lies in pages."""
        if not self.bare or not isinstance(attention, PagedAttention):
            return None
        return self.qkv_proj.write_heads(x_BTH, norm, attention.destination(self.layer, self._heads(rotation)))

    def _project(self, x_BTH: Hidden, norm: RMSNorm | None) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Queries, their gate where there is one, keys and values."""
        query_BTE, key_BTE, value_BTE = self.enter(x_BTH, norm)
        if self.norms_apart and self.q_norm is not None and self.k_norm is not None:
            if self.sharded:
                query_BT1, key_BT1 = self._mean_squares(query_BTE, key_BTE)
                query_BTE, key_BTE = self.q_norm(query_BTE, query_BT1), self.k_norm(key_BTE, key_BT1)
            else:
                query_BTE, key_BTE = self.q_norm.by_parts(query_BTE), self.k_norm.by_parts(key_BTE)
        query_BTQD, gate_BTQD = query_BTE.unflatten(-1, (-1, (2 if self.gated else 1) * self.head_dim)), None
        key_BTGD, value_BTGD = (part.unflatten(-1, (-1, self.head_dim)) for part in (key_BTE, value_BTE))
        if self.value_norm is not None:
            value_BTGD = self.value_norm(value_BTGD)
        if self.gated:
            query_BTQD, gate_BTQD = query_BTQD.chunk(2, dim=-1)
        return query_BTQD, gate_BTQD, key_BTGD, value_BTGD

    def _mean_squares(self, query_BTE: Tensor, key_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """Mean squares over all ranks' queries and over all ranks' keys, float32. A key head with copies counts once."""
        assert self.q_norm is not None, "norms of whole projections"
        once_BTGD = key_BTE.unflatten(-1, (-1, self.head_dim))[:, :, self.sharding.first_copies]
        sums = [self.q_norm.sum_squares(part) for part in (query_BTE, once_BTGD.flatten(2))]
        query_BT1, key_BT1 = self.comm.all_reduce(torch.cat(sums, -1)).chunk(2, -1)
        keys = self.sharding.total_key_heads * self.head_dim
        return query_BT1 / (self.sharding.size * query_BTE.shape[-1]), key_BT1 / keys

    def _heads(self, rotation: Rotation) -> HeadTransform:
        rotation = rotation.shifted(self.rope_rows)
        if self.q_norm is None or self.k_norm is None or self.norms_apart:
            return HeadTransform(rotation)
        return HeadTransform(rotation, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.offset)

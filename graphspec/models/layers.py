"""Building blocks shared by targets and drafters. Parameters are left uninitialised, to be filled from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..facts.sharding import Shard, Sharding
from ..kernels.formulas import Rotation, grown, rms_norm
from ..kernels.linear.linear import Hidden, finish, hidden_of, linear, sum_squares
from ..kernels.linear.packed import Packed
from ..kernels.linear.packed_linear import packed_linear
from .attention import HeadTransform, PagedAttention, Weighing
from .packed_weight import PackedWeight, Segment

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..facts import ModelFacts
    from ..kernels.collectives import Comm
    from ..kernels.groups import Heads
    from ..kernels.registry import KernelSet
    from .attention import Attention


def make_parameter(*shape: int) -> nn.Parameter:
    """A frozen parameter of this shape, uninitialised."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class KernelModule(nn.Module):
    """A module that calls ops itself; it runs their references until :func:`use_kernels`."""

    float32_names: tuple[str, ...] = ()
    """Parameters that are always loaded in float32."""

    def use_kernels(self, kernels: KernelSet) -> None:
        """Run the ops of ``kernels`` from now on."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ParameterShards:
    """How a rank's parameter is cut from the stored tensors: along one dimension, a shard of each projection that is fused there."""

    dim: int
    """Dimension of a stored tensor. Negative for experts, each of which may be a tensor, or one of them in a tensor of all."""
    shards: tuple[Shard, ...]


class ShardedModule(nn.Module):
    """A module that may hold a shard of its parameters; it then takes part in collectives."""

    sharded = False
    """It holds a shard."""
    comm: Comm


class Linear(KernelModule):
    """``x @ weight.T + bias``; ``parts`` are the output rows of the projections fused into it, in order.

    The norm before the product, and gate and residual after it, go to the same op, which may do everything in one launch.
    """

    def __init__(self, in_features: int, *parts: int, bias: bool = False) -> None:
        super().__init__()
        self.parts = parts
        self.weight: nn.Parameter | PackedWeight | None = make_parameter(sum(parts), in_features)
        self.bias = make_parameter(sum(parts)) if bias else None
        self.packed: Tensor | None
        self.register_buffer("packed", None, persistent=False)
        self.stored: torch.dtype | None = None
        """The 16-bit dtype in which a checkpoint has all of the weight; None: it has another."""
        self.activations = "full"
        """What native products with a weight of numbers round activations to; one of codes knows by itself."""
        self.multiply: Callable[..., Hidden] = linear
        self.multiply_codes: Callable[..., Hidden] = packed_linear
        self.multiply_heads: Callable[..., Tensor | None] | None = None
        self.shards: dict[str, ParameterShards] = {}

    def shard_rows(self, *shards: Shard) -> None:
        """Hold these shards of the fused projections' output rows, one per projection; biases are cut with the weight."""
        self.shards = {"weight": ParameterShards(0, shards), "bias": ParameterShards(0, shards)}

    @property
    def stored_parts(self) -> tuple[int, ...]:
        """Rows of the checkpoint's tensors that make up the weight, in order."""
        return self.parts

    def arrange(self, weight: Tensor) -> Tensor:
        """The weight, or the bias, from the checkpoint's tensors concatenated along the rows."""
        return weight

    def use_kernels(self, kernels: KernelSet) -> None:
        self.multiply, self.multiply_codes = kernels.linear, kernels.packed_linear
        self.multiply_heads = kernels.linear_kv_write

    def pack(self) -> None:
        """Replace the weight by its packed form, for the native kernel. float32 on the CPU only."""
        if self.weight is None:
            return
        from ..kernels.native import multiply_packed, pack_linear

        weight = self.weight
        self.packed = weight.pack() if isinstance(weight, PackedWeight) else pack_linear(weight, self.stored, self.activations)
        self._multiply_packed = multiply_packed
        self.weight = None

    def forward(
        self,
        x: Hidden,
        norm: RMSNorm | None = None,
        residual: Hidden | None = None,
        gated: bool = False,
        float32: bool = False,
    ) -> Hidden:
        """``[..., in]`` to ``[..., out]``, a stream where ``residual`` is one; see :func:`graphspec.kernels.linear.linear.linear`."""
        if norm is not None and norm.float32:
            x, norm = norm(x), None
        if self.packed is not None:
            scale, eps = (None, 0.0) if norm is None else (norm.scale(), norm.eps)
            product = self._multiply_packed(hidden_of(x), self.packed, sum(self.parts), self.bias, scale, eps)
            return finish(product, residual, gated, float32)
        normed: tuple[Tensor | None, float, bool] = (None, 0.0, False) if norm is None else (norm.weight, norm.eps, norm.offset)
        if isinstance(self.weight, PackedWeight):
            return self._multiply_segments(x, self.weight.segments, self.bias, normed, residual, gated, float32)
        return self.multiply(x, self.weight, self.bias, *normed, residual, gated, float32)

    def write_heads(self, x: Hidden, norm: RMSNorm | None, heads: Heads) -> Tensor | None:
        """Project queries, keys and values, norm and rotate them, and write the KV, in one launch.

        Returns:
            The rotated queries, ``[B, T, Q, D]``; None: no kernel does it, and nothing was done.
        """
        segments = self.weight.segments if isinstance(self.weight, PackedWeight) else (self.weight,)
        if self.multiply_heads is None or self.weight is None or len(segments) > 1 or (norm is not None and norm.float32):
            return None
        normed: tuple[Tensor | None, float, bool] = (None, 0.0, False) if norm is None else (norm.weight, norm.eps, norm.offset)
        return self.multiply_heads(x, segments[0], self.bias, *normed, heads)

    def _multiply_segments(
        self,
        x: Hidden,
        segments: tuple[Segment, ...],
        own_bias: Tensor | None,
        normed: tuple[Tensor | None, float, bool],
        residual: Hidden | None,
        gated: bool,
        float32: bool,
    ) -> Hidden:
        if len(segments) == 1 and isinstance(segments[0], Packed):
            return self.multiply_codes(x, segments[0], own_bias, *normed, residual, gated, float32)
        parts, begin = [], 0
        for segment in segments:
            product = self.multiply_codes if isinstance(segment, Packed) else self.multiply
            bias = None if own_bias is None else own_bias[begin : begin + segment.shape[0]]
            parts.append(hidden_of(product(x, segment, bias, *normed, None, False, float32 and not gated and residual is None)))
            begin += segment.shape[0]
        return finish(torch.cat(parts, -1), residual, gated, float32)


class NeighbourPairsProjection(Linear):
    """Queries, keys and values of a checkpoint in which the channels of a rotated pair are neighbours. They are put half a rotated part
    apart, where :class:`~graphspec.models.attention.HeadTransform` has them: scores, sums over all channels, stay what they are.

    Args:
        in_features: of the input.
        parts: output rows of queries, keys and values.
        head_dim: of a head.
        rotary_dim: elements of it that are rotated, the first ones.
        bias: as of :class:`Linear`.
    """

    def __init__(self, in_features: int, *parts: int, head_dim: int, rotary_dim: int, bias: bool = False) -> None:
        super().__init__(in_features, *parts, bias=bias)
        self.head_dim, self.rotary_dim = head_dim, rotary_dim

    def arrange(self, weight: Tensor) -> Tensor:
        query, key, value = weight.split(self.parts)
        return torch.cat((self._apart(query), self._apart(key), value))

    def _apart(self, rows: Tensor) -> Tensor:
        heads = rows.unflatten(0, (-1, self.head_dim))
        rotated, rest = heads[:, : self.rotary_dim], heads[:, self.rotary_dim :]
        return torch.cat((rotated[:, ::2], rotated[:, 1::2], rest), 1).flatten(0, 1)


class RowParallelLinear(Linear, ShardedModule):
    """A linear layer whose input is sharded: each rank multiplies its own columns, then all ranks sum. Bias and residual are added last.

    Args:
        sharding: of the model.
        in_features: of this rank.
        out_features: of the whole layer.
        bias: as of :class:`Linear`.
    """

    sharded = True

    def __init__(self, sharding: Sharding, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.shards = {"weight": ParameterShards(1, (sharding.shard(in_features),))}

    def forward(
        self,
        x: Hidden,
        norm: RMSNorm | None = None,
        residual: Hidden | None = None,
        gated: bool = False,
        float32: bool = False,
    ) -> Hidden:
        """Like :meth:`Linear.forward`, without norm and gate."""
        assert norm is None and not gated, "a layer that ends a block"
        if self.packed is not None:
            partial = self._multiply_packed(hidden_of(x), self.packed, sum(self.parts), None, None, 0.0)
        elif isinstance(self.weight, PackedWeight):
            partial = hidden_of(self._multiply_segments(x, self.weight.segments, None, (None, 0.0, False), None, False, False))
        else:
            partial = hidden_of(self.multiply(x, self.weight))
        out = self.comm.all_reduce(partial)
        return finish(out if self.bias is None else out + self.bias, residual, gated, float32)


def add(residual: Hidden, out: Tensor) -> Hidden:
    """What a block adds to the residual stream; a stream where the residual is one."""
    return finish(out, residual, gated=False, float32=False)


def row_parallel_linear(sharding: Sharding, in_features: int, out_features: int, *, bias: bool = False) -> Linear:
    """The linear layer that ends a block, over several ranks where the model is sharded."""
    if sharding.sharded:
        return RowParallelLinear(sharding, in_features, out_features, bias=bias)
    return Linear(in_features, out_features, bias=bias)


def join_ranks(network: nn.Module, comm: Comm) -> None:
    """Give ``comm`` to the sharded modules of ``network``, which sum and gather through it."""
    for module in network.modules():
        if isinstance(module, ShardedModule) and module.sharded:
            module.comm = comm


def use_kernels(kernels: KernelSet, target: nn.Module, draft: nn.Module | None = None) -> None:
    """Make networks run the ops of ``kernels``; layers that the draft has from the target run as the target's."""
    for network, ops in ((draft, kernels.for_drafts), (target, kernels)):
        for module in network.modules() if network is not None else ():
            if isinstance(module, KernelModule):
                module.use_kernels(ops)


class Embedding(nn.Module):
    """Token embedding that maps invalid and out-of-range tokens to the zero vector."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.weight: nn.Parameter | PackedWeight = make_parameter(vocab_size, hidden_size)
        self.packed: Tensor | None
        self.register_buffer("packed", None, persistent=False)
        self.stored: torch.dtype | None = None
        """See :class:`Linear`."""
        self.shards: dict[str, ParameterShards] = {}
        self.lookup: Callable[[Tensor, Tensor, Tensor, int], Tensor] | None = None
        """The native op, if a native stack has one; see :mod:`graphspec.kernels.native.cycle`."""

    @property
    def table(self) -> Tensor:
        """What the native op reads: the weight, or its packed form if it has low precision."""
        if self.packed is not None:
            return self.packed
        assert isinstance(self.weight, Tensor), "codes that are not packed yet"
        return self.weight

    @property
    def has_codes(self) -> bool:
        """The weight has low precision."""
        return self.packed is not None or isinstance(self.weight, PackedWeight)

    def pack(self) -> None:
        """Look rows up by the native op; a weight of low precision is replaced by its packed form. float32 on the CPU only."""
        from ..kernels.native import cycle

        self.lookup = cycle.embed
        if self.packed is None and isinstance(self.weight, PackedWeight):
            self.packed = self.weight.pack()
            del self.weight

    def forward(self, token_BT: Tensor, valid_BT: Tensor) -> Tensor:
        """``[B, T, H]`` in the dtype of the weights, from int64 tokens and a bool mask."""
        if self.lookup is not None:
            return self.lookup(token_BT, valid_BT, self.table, self.hidden_size)
        known_BT = valid_BT & (token_BT >= 0) & (token_BT < self.vocab_size)
        token_BT = torch.where(known_BT, token_BT, 0)
        hidden_BTH = self.weight.lookup(token_BT) if isinstance(self.weight, PackedWeight) else F.embedding(token_BT, self.weight)
        return torch.where(known_BT[..., None], hidden_BTH, 0.0)


class UnscaledNorm(KernelModule):
    """RMSNorm without a weight, see :func:`graphspec.kernels.formulas.rms_norm`; ``eps`` is added to the mean square."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.sum_squares: Callable[[Tensor], Tensor] = sum_squares

    def use_kernels(self, kernels: KernelSet) -> None:
        self.sum_squares = kernels.sum_squares

    def mean_square(self, x: Tensor) -> Tensor:
        """Of the last dimension, ``[..., 1]`` float32."""
        return self.sum_squares(x) / x.shape[-1]

    def forward(self, x: Hidden) -> Tensor:
        """Normalise the last dimension; dtype and shape stay."""
        return rms_norm(hidden_of(x), None, self.eps, mean_square=self.mean_square(hidden_of(x)))


class RMSNorm(UnscaledNorm):
    """RMSNorm, see :func:`graphspec.kernels.formulas.rms_norm`.

    Args:
        size: of the last dimension.
        eps: added to the mean square.
        offset: the weight is stored minus 1 (Gemma, Qwen3.5).
        float32: scale before the cast back (OLMo 2).
    """

    def __init__(self, size: int, eps: float, offset: bool = False, float32: bool = False) -> None:
        super().__init__(eps)
        self.offset, self.float32 = offset, float32
        self.weight = make_parameter(size)
        self.shards: dict[str, ParameterShards] = {}

    @classmethod
    def of(cls, facts: ModelFacts, size: int | None = None) -> RMSNorm:
        """The norm that the family uses; ``size`` defaults to the hidden size."""
        return cls(size or facts.hidden_size, facts.rms_norm_eps, facts.family.norm == "offset", facts.family.norm == "float32")

    def scale(self) -> Tensor:
        """Factors of the normalised channels, the offset included."""
        return 1.0 + self.weight if self.offset else self.weight

    def forward(self, x: Hidden, mean_square: Tensor | None = None) -> Tensor:
        """Normalise the last dimension, of which other ranks may have more; dtype and shape stay."""
        values = hidden_of(x)
        mean_square = self.mean_square(values) if mean_square is None else mean_square
        if self.float32 and values.element_size() < 4:
            return rms_norm(values.float(), self.weight.float(), self.eps, self.offset, mean_square).to(values.dtype)
        return rms_norm(values, self.weight, self.eps, self.offset, mean_square)

    def by_parts(self, x: Tensor) -> Tensor:
        """Split the last dimension into parts as wide as the weight and normalise each; dtype and shape stay."""
        out: Tensor = self(x.unflatten(-1, (-1, self.weight.shape[0])))
        return out.flatten(-2)


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
        self.query_growth = rope.query_growth
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

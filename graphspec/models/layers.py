"""Building blocks shared by targets and drafters. Parameters are left uninitialised, to be filled from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..facts.sharding import Shard, Sharding
from ..kernels.formulas import rms_norm
from ..kernels.linear.linear import Hidden, finish, hidden_of, linear
from ..kernels.linear.packed import Packed
from ..kernels.linear.packed_linear import packed_linear
from ..kernels.linear.sum_squares import sum_squares
from .packed_weight import PackedWeight, Segment

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..facts import ModelFacts
    from ..kernels.collectives import Comm
    from ..kernels.groups import Heads
    from ..kernels.registry import KernelSet


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


def set_weight(module: Linear | Embedding, weight: nn.Parameter | PackedWeight, stored: torch.dtype | None = None) -> None:
    """Give a layer its weight.

    Args:
        module: whose weight is replaced.
        weight: numbers or codes; layers may share one.
        stored: the 16-bit dtype in which a checkpoint has the numbers; None: it has another.
    """
    del module.weight
    module.weight, module.stored = weight, stored


class UnscaledNorm(KernelModule):
    """RMSNorm without a weight, see :func:`graphspec.kernels.formulas.rms_norm`.

    Args:
        eps: added to the mean square.
    """

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
        values = hidden_of(x)
        return rms_norm(values, None, self.eps, mean_square=self.mean_square(values))


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

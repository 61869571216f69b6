"""The attention that a decoder layer calls: one interface over paged KV, for draft trees and for prompt chunks, and its rotations.

Letters are those of :mod:`graphspec.shapes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..facts.rope import NO_ROPE
from ..kernels.formulas import Rotation
from ..kernels.groups import Heads
from ..kernels.host_step import BoundCall
from ..kernels.registry import KernelSet
from .recurrence import Recurrence


class HeadTransform(NamedTuple):
    """Norm and rotation of each query and key head before it attends."""

    rotation: Rotation
    """Pairs ``(i, i + d)`` rotate."""
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    """``[D]``: weights of an RMSNorm before the rotation."""
    norm_eps: float = 0.0
    norm_offset: bool = False


class Weighing(NamedTuple):
    """How scores become weights, beyond the softmax (:func:`graphspec.kernels.attention.tree_attention.tree_attention`)."""

    sink_Q: Tensor | None = None
    softcap: float = 0.0


SOFTMAX = Weighing()


class LatentTransform(NamedTuple):
    """Norm and rotation of a token's compressed keys and values, and rotation of its queries' rotated part."""

    norm_weight_L: Tensor
    norm_eps: float
    rotation: Rotation
    interleaved: bool
    """Pairs are channels ``(2i, 2i + 1)``; otherwise ``(i, i + R/2)``."""


class Attention(Protocol):
    """Attention of T query tokens per lane over everything they may see, themselves included, and the tokens' positions."""

    @property
    def position_BT(self) -> Tensor:
        """RoPE positions, int64."""
        ...

    @property
    def rope_length_BT(self) -> Tensor:
        """Length that length-dependent RoPE scalings ("dynamic") see, int64: position + 1, or the prompt length during prefill."""
        ...

    @property
    def valid_BT(self) -> Tensor:
        """bool; false: the token has zero input and writes no KV, and its output is ignored."""
        ...

    @property
    def recurrence(self) -> Recurrence | None:
        """The counterpart for recurrent layers; None: the model has none."""
        ...

    def over(self, pool: int) -> Attention:
        """The same over another pool of the network, whose layers have heads of another shape; its own pool is number 0."""
        ...

    def __call__(
        self,
        layer: int,
        query_BTQD: Tensor,
        key_BTGD: Tensor,
        value_BTGD: Tensor,
        heads: HeadTransform,
        scale: float,
        window_left: int | None,
        weighing: Weighing = SOFTMAX,
    ) -> Tensor:
        """Norm and rotate queries and keys, write the tokens' KV of ``layer``, then attend. Returns ``[B, T, Q, D]`` in the query's dtype.

        ``window_left``: a query at position p sees only positions > p - window_left; None: no sliding window.
        """
        ...

    def write(self, layer: int, query_BTQD: Tensor, key_BTGD: Tensor, value_BTGD: Tensor, heads: HeadTransform) -> Tensor:
        """The first half of a call: norm, rotate, and write the tokens' KV of ``layer``. Returns the queries, normed and rotated."""
        ...

    def read(self, layer: int, query_BTQD: Tensor, scale: float, window_left: int | None, weighing: Weighing = SOFTMAX) -> Tensor:
        """The second half of a call: queries, normed and rotated, attend over what is written."""
        ...

    def latent(
        self, layer: int, query_latent_BTQL: Tensor, query_rope_BTQR: Tensor, latent_BTE: Tensor, transform: LatentTransform, scale: float
    ) -> Tensor:
        """A call in the absorbed form of multi-head latent attention: norm, rotate, write one row per token, attend; ``[B, T, Q, L]``.

        ``latent_BTE`` is the compressed row as projected, E = L + R; see :mod:`graphspec.kernels.attention.latent_kv_write`.
        """
        ...

    def write_latent(self, layer: int, query_rope_BTQR: Tensor, latent_BTE: Tensor, transform: LatentTransform) -> Tensor:
        """The first half of :meth:`latent`: norm, rotate, write one row per token. Returns the queries' rotated part."""
        ...


class PagedAttention:
    """Attention over KV that lies in pages: writes that of the query tokens, then attends by :meth:`read` or :meth:`_attend_latent`.

    Native ops read and write the pages themselves.
    """

    __slots__ = ()
    kernels: KernelSet
    kv_pool: Tensor
    """``[layers, 2, pages, page_size, G, D]``, or ``[layers, 1, pages, page_size, 1, E]`` of latent rows."""
    table_BP: Tensor
    """int32."""
    slot_BT: Tensor
    """Logical slot each token's KV is written to, int64."""
    position_BT: Tensor
    valid_BT: Tensor
    begin_BT: Tensor
    """First slot each query may see where a layer has no sliding window, int64: that of position 0."""
    begins: dict[int, Tensor]
    """The same where it has one, by the window's size."""

    def begin(self, window_left: int | None) -> Tensor:
        """First slot each query sees. Windows count positions; position 0 lies in slot ``begin_BT``, 1 for a draft that skips a token."""
        if window_left is None:
            return self.begin_BT
        if window_left not in self.begins:
            begin_BT = self.begin_BT + (self.position_BT - window_left + 1).clamp(min=0)
            (self.begins[window_left],) = self.kernels.stored([begin_BT])
        return self.begins[window_left]

    def visibility(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What each query sees without a sliding window: the first slot, that of position 0, int64 ``[B, T]``; then the prefix's end and
        the ancestor words, or None and None where each valid query sees everything up to its own slot.
        """
        raise NotImplementedError

    def destination(self, layer: int, heads: HeadTransform) -> Heads:
        """What :meth:`write` does with queries, keys and values, for a projection that does it itself."""
        return Heads(
            *heads.rotation, self.kv_pool, layer, self.table_BP, self.slot_BT, self.valid_BT,
            heads.query_norm, heads.key_norm, heads.norm_eps, heads.norm_offset,
        )  # fmt: skip

    def write(self, layer: int, query_BTQD: Tensor, key_BTGD: Tensor, value_BTGD: Tensor, heads: HeadTransform) -> Tensor:
        rotated_BTQD: Tensor = self.kernels.rope_kv_write(
            query_BTQD, key_BTGD, value_BTGD, *heads.rotation, self.kv_pool, layer, self.table_BP, self.slot_BT, self.valid_BT,
            heads.query_norm, heads.key_norm, heads.norm_eps, heads.norm_offset,
        )  # fmt: skip
        return rotated_BTQD

    def write_latent(self, layer: int, query_rope_BTQR: Tensor, latent_BTE: Tensor, transform: LatentTransform) -> Tensor:
        rotated_BTQR: Tensor = self.kernels.latent_kv_write(
            self.kv_pool, layer, latent_BTE, query_rope_BTQR, transform.norm_weight_L, *transform.rotation,
            self.table_BP, self.slot_BT, self.valid_BT, transform.norm_eps, transform.interleaved,
        )  # fmt: skip
        return rotated_BTQR

    def __call__(
        self, layer: int, query_BTQD: Tensor, key_BTGD: Tensor, value_BTGD: Tensor, heads: HeadTransform, scale: float,
        window_left: int | None, weighing: Weighing = SOFTMAX,
    ) -> Tensor:  # fmt: skip
        return self.read(layer, self.write(layer, query_BTQD, key_BTGD, value_BTGD, heads), scale, window_left, weighing)

    def latent(
        self, layer: int, query_latent_BTQL: Tensor, query_rope_BTQR: Tensor, latent_BTE: Tensor, transform: LatentTransform, scale: float
    ) -> Tensor:
        rotated_BTQR = self.write_latent(layer, query_rope_BTQR, latent_BTE, transform)
        return self._attend_latent(layer, query_latent_BTQL, rotated_BTQR, scale)

    def read(self, layer: int, query_BTQD: Tensor, scale: float, window_left: int | None, weighing: Weighing = SOFTMAX) -> Tensor:
        raise NotImplementedError

    def _attend_latent(self, layer: int, query_latent_BTQL: Tensor, query_rope_BTQR: Tensor, scale: float) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)  # Dynamo of torch 2.11 hashes what it calls, before it has fields
class TreeAttention(PagedAttention):
    """Decode-phase attention: a paged prefix, and a window of slots after it under ancestor words."""

    kernels: KernelSet
    kv_pool: Tensor
    table_BP: Tensor
    position_BT: Tensor
    valid_BT: Tensor
    slot_BT: Tensor
    begin_BT: Tensor
    prefix_end_B: Tensor
    ancestors_BTX: Tensor
    """Bit j of a query's words: it sees slot ``prefix_end + j``; its own bit included."""
    own_window: Callable[[Tensor, Tensor, int, float], Tensor] | None = None
    """The same attention by :meth:`~graphspec.kernels.registry.KernelSet.own_window`, where caller and kernels allow it."""
    bound: BoundCall | None = None
    """The same attention over latent rows by a kernel with a host step, where there is one."""
    recurrence: Recurrence | None = None
    further_pools: tuple[Tensor, ...] = ()
    """Pools of the network's layers whose heads have another shape."""
    begins: dict[int, Tensor] = field(default_factory=dict)

    def over(self, pool: int) -> TreeAttention:
        return TreeAttention(
            self.kernels, self.further_pools[pool - 1], self.table_BP, self.position_BT, self.valid_BT, self.slot_BT, self.begin_BT,
            self.prefix_end_B, self.ancestors_BTX,
        )  # fmt: skip

    @property
    def rope_length_BT(self) -> Tensor:
        return self.position_BT + 1

    def visibility(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.begin_BT, self.prefix_end_B, self.ancestors_BTX

    def read(self, layer: int, query_BTQD: Tensor, scale: float, window_left: int | None, weighing: Weighing = SOFTMAX) -> Tensor:
        if self.own_window is not None and window_left is None and weighing == SOFTMAX:
            return self.own_window(query_BTQD, self.kv_pool, layer, scale)
        return self.kernels.tree_attention(
            query_BTQD, self.kv_pool, layer, self.table_BP, self.begin(window_left), self.prefix_end_B, self.ancestors_BTX, scale, *weighing
        )

    def _attend_latent(self, layer: int, query_latent_BTQL: Tensor, query_rope_BTQR: Tensor, scale: float) -> Tensor:
        if self.bound is not None:
            return self.bound.latent(query_latent_BTQL, query_rope_BTQR, self.kv_pool, layer, self.valid_BT, scale)
        return self.kernels.latent_attention(
            query_latent_BTQL, query_rope_BTQR, self.kv_pool, layer, self.table_BP, self.begin_BT, self.prefix_end_B, self.ancestors_BTX,
            scale,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)  # Dynamo of torch 2.11 hashes what it calls, before it has fields
class ChunkAttention(PagedAttention):
    """Prefill attention: a chunk of consecutive prompt tokens, causal, over the paged prefix and itself."""

    kernels: KernelSet
    kv_pool: Tensor
    table_BP: Tensor
    position_BT: Tensor
    rope_length_BT: Tensor
    valid_BT: Tensor
    slot_BT: Tensor
    begin_BT: Tensor
    bound: Mapping[int | None, BoundCall] = field(default_factory=dict)
    """The same attention by kernels with a host step, by the sliding window of a layer."""
    recurrence: Recurrence | None = None
    further_pools: tuple[Tensor, ...] = ()
    """See :class:`TreeAttention`."""
    begins: dict[int, Tensor] = field(default_factory=dict)

    def over(self, pool: int) -> ChunkAttention:
        return ChunkAttention(
            self.kernels, self.further_pools[pool - 1], self.table_BP, self.position_BT, self.rope_length_BT, self.valid_BT, self.slot_BT,
            self.begin_BT,
        )  # fmt: skip

    def visibility(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.begin_BT, None, None

    def read(self, layer: int, query_BTQD: Tensor, scale: float, window_left: int | None, weighing: Weighing = SOFTMAX) -> Tensor:
        if window_left in self.bound:
            return self.bound[window_left].chunk(query_BTQD, self.kv_pool, layer, self.valid_BT, scale)
        return self.kernels.chunk_attention(
            query_BTQD, self.kv_pool, layer, self.table_BP, self.begin(window_left), self.slot_BT, self.valid_BT, scale, *weighing
        )

    def _attend_latent(self, layer: int, query_latent_BTQL: Tensor, query_rope_BTQR: Tensor, scale: float) -> Tensor:
        if None in self.bound:
            return self.bound[None].latent(query_latent_BTQL, query_rope_BTQR, self.kv_pool, layer, self.valid_BT, scale)
        return self.kernels.latent_chunk_attention(
            query_latent_BTQL, query_rope_BTQR, self.kv_pool, layer, self.table_BP, self.begin_BT, self.slot_BT, self.valid_BT, scale
        )


if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..facts import RopeFacts
    from .attention import Attention


def _base_frequency(theta: float, head_dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim))


def _yarn_frequency(rope: RopeFacts, head_dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): interpolate long wavelengths, keep short ones, a linear ramp between."""

    def dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    period = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    keep = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * period) * (1 - keep) + 1.0 / period * keep


def _llama3_frequency(rope: RopeFacts, head_dim: int) -> Tensor:
    """Llama 3.1: divide long wavelengths by the factor, keep short ones, interpolate smoothly between."""
    frequency = _base_frequency(rope.theta, head_dim)
    context, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / frequency
    smooth = (context / wavelength - low) / (high - low)
    medium = (1 - smooth) * frequency / rope.factor + smooth * frequency
    scaled = torch.where(wavelength > context / low, frequency / rope.factor, frequency)
    return torch.where((wavelength >= context / high) & (wavelength <= context / low), medium, scaled)


def _proportional_frequency(rope: RopeFacts, head_dim: int) -> Tensor:
    """The pairs of a whole head, of which a share turns, the fastest ones, and the others stand still."""
    turning = int(rope.partial_rotary_factor * head_dim // 2)
    frequency = _base_frequency(rope.theta, head_dim) / rope.factor
    return torch.cat((frequency[:turning], torch.zeros(head_dim // 2 - turning, device="cpu")))


def rope_frequency(rope: RopeFacts, head_dim: int) -> Tensor:
    """Angular frequency of each rotated pair, float32 ``[D / 2]`` on the CPU; for kind "dynamic" the one of a short sequence.

    Where only part of the head is rotated, D is that part here and in everything below.
    """
    head_dim = rope.rotary_dim(head_dim)
    if rope.kind == NO_ROPE:
        return torch.zeros(head_dim // 2, device="cpu")
    if rope.kind == "linear":
        return _base_frequency(rope.theta, head_dim) / rope.factor
    if rope.kind == "yarn":
        return _yarn_frequency(rope, head_dim)
    if rope.kind == "llama3":
        return _llama3_frequency(rope, head_dim)
    if rope.kind == "proportional":
        return _proportional_frequency(rope, head_dim)
    return _base_frequency(rope.theta, head_dim)


class RotaryEmbedding(nn.Module):
    """cos and sin of each token's position: one table for every position, or frequencies per token where they depend on the length.

    Frequencies and cos / sin are float32 and computed in the order transformers uses, so that both agree to the last bit or nearly so.

    Args:
        rope: kind and parameters.
        head_dim: of the whole head.
        max_positions: rows of the table; positions are clamped into it, which only affects rows that are not read.
        others: further rotations, whose tables follow in the same tensor, ``max_positions`` rows each.
    """

    def __init__(self, rope: RopeFacts, head_dim: int, max_positions: int, others: Sequence[RopeFacts] = ()) -> None:
        super().__init__()
        self.rope, self.rotary_dim, self.max_positions = rope, rope.rotary_dim(head_dim), max_positions
        self.table_LD: Tensor
        self.exponent_D: Tensor
        if rope.kind == "dynamic":
            exponent = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32, device="cpu") / self.rotary_dim
            self.register_buffer("exponent_D", exponent, persistent=False)
        else:
            tables = [self._table(rope, rope_frequency(rope, head_dim))]
            for other in others:
                still = torch.zeros(self.rotary_dim // 2, device="cpu")
                tables.append(self._table(other, still if other.kind == NO_ROPE else rope_frequency(other, head_dim)))
            self.register_buffer("table_LD", torch.cat(tables), persistent=False)

    def _table(self, rope: RopeFacts, frequency: Tensor) -> Tensor:
        angle = torch.arange(self.max_positions, dtype=torch.float32, device="cpu")[:, None] * frequency
        return torch.cat((angle.cos(), angle.sin()), dim=-1) * rope.attention_factor

    def of(self, attention: Attention) -> Rotation:
        """How the query tokens of ``attention`` are rotated."""
        position_BT = attention.position_BT
        rotation: Rotation = self(position_BT, attention.rope_length_BT if self.rope.kind == "dynamic" else position_BT)
        return rotation

    def forward(self, position_BT: Tensor, rope_length_BT: Tensor) -> Rotation:
        """How tokens at int64 positions are rotated; the lengths, int64, matter to kind "dynamic" only."""
        if self.rope.kind == "dynamic":
            angle_BTD = position_BT[..., None].float() * self._dynamic_frequency(rope_length_BT)
            table_LD = torch.cat((angle_BTD.cos(), angle_BTD.sin()), dim=-1).flatten(0, 1)
            return Rotation(table_LD, torch.arange(table_LD.shape[0], device=table_LD.device).view(position_BT.shape))
        return Rotation(self.table_LD, position_BT)

    def _dynamic_frequency(self, rope_length_BT: Tensor) -> Tensor:
        """Dynamic NTK: beyond the trained context the base grows with the length the token was computed at."""
        context, factor = self.rope.original_max_position_embeddings, self.rope.factor
        growth_BT = factor * rope_length_BT.clamp(min=context).float() / context - (factor - 1)
        base_BT = self.rope.theta * growth_BT ** (self.rotary_dim / (self.rotary_dim - 2))
        return 1.0 / (base_BT[..., None] ** self.exponent_D)

"""What a decoder layer sees of attention and paged KV: one callable, nothing of pages, trees or chunks.

Letters are those of :mod:`graphspec.shapes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .kernels.registry import KernelSet


class Attention(Protocol):
    """Positions of the query tokens, and attention over everything they may see, themselves included."""

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
        """bool; an invalid token has zero input, writes no KV, and nobody reads its output."""
        ...

    def __call__(
        self, layer: int, query_BTQD: Tensor, key_BTGD: Tensor, value_BTGD: Tensor, scale: float, window_left: int | None
    ) -> Tensor:
        """Write this token's KV for ``layer``, then attend; returns ``[B, T, Q, D]`` in the dtype of the query.

        ``window_left``: a query at position p sees positions > p - window_left only; None: all of them.
        """
        ...


def _visible_from(prefix_begin: int, position_BT: Tensor, window_left: int | None) -> Tensor:
    begin_BT = torch.full_like(position_BT, prefix_begin)
    return begin_BT if window_left is None else torch.maximum(begin_BT, position_BT - window_left + 1)


@dataclass(frozen=True, slots=True)
class TreeAttention:
    """Decode-phase attention: a paged prefix, and a window of slots behind it under ancestor words."""

    kernels: KernelSet
    kv_pool: Tensor
    """``[layers, 2, pages, page_size, G, D]``."""
    table_BP: Tensor
    position_BT: Tensor
    rope_length_BT: Tensor
    valid_BT: Tensor
    slot_BT: Tensor
    """Logical slot each token's KV is written to, int64."""
    prefix_begin: int
    prefix_end_B: Tensor
    ancestors_BTX: Tensor
    """Bit j of a query's words: it sees slot ``prefix_end + j``; its own bit included."""

    def __call__(
        self, layer: int, query_BTQD: Tensor, key_BTGD: Tensor, value_BTGD: Tensor, scale: float, window_left: int | None
    ) -> Tensor:
        self.kernels.paged_kv_write(self.kv_pool, layer, key_BTGD, value_BTGD, self.table_BP, self.slot_BT, self.valid_BT)
        begin_BT = _visible_from(self.prefix_begin, self.position_BT, window_left)
        return self.kernels.tree_attention(
            query_BTQD, self.kv_pool, layer, self.table_BP, begin_BT, self.prefix_end_B, self.ancestors_BTX, scale
        )


@dataclass(frozen=True, slots=True)
class ChunkAttention:
    """Prefill attention: a chunk of consecutive prompt tokens, causal, over the paged prefix and itself."""

    kernels: KernelSet
    kv_pool: Tensor
    table_BP: Tensor
    position_BT: Tensor
    rope_length_BT: Tensor
    valid_BT: Tensor
    slot_BT: Tensor
    prefix_begin: int

    def __call__(
        self, layer: int, query_BTQD: Tensor, key_BTGD: Tensor, value_BTGD: Tensor, scale: float, window_left: int | None
    ) -> Tensor:
        self.kernels.paged_kv_write(self.kv_pool, layer, key_BTGD, value_BTGD, self.table_BP, self.slot_BT, self.valid_BT)
        begin_BT = _visible_from(self.prefix_begin, self.position_BT, window_left)
        return self.kernels.chunk_attention(query_BTQD, self.kv_pool, layer, self.table_BP, begin_BT, self.slot_BT, self.valid_BT, scale)

"""Attention calls whose work the host divides before each launch, from lengths it knows: what such a call is, and who plans it.

A kernel of this kind reads a work list from device memory. The list belongs to one set of lengths: with another the result is wrong and no
error says so. So a stage declares its planned calls next to its reads and writes, and whoever launches it has them planned first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

Anchor = Literal["root", "window", "chunk"]
"""A slot the host knows of a row before a launch: that of the root (``seq_len``), that of the first window entry
(``seq_len - window_len + 1``), or the first of the prompt chunk."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What a kernel is built for.

    Attributes:
        heads: query heads.
        groups: key/value heads; 1 with latent rows.
        dim: head dimension; of latent rows the compressed part, L.
        rope_dim: the rotated part of latent rows, R; 0: keys and values of heads.
        scale: multiplies the scores.
    """

    heads: int
    groups: int
    dim: int
    rope_dim: int
    scale: float

    @property
    def latent(self) -> bool:
        return self.rope_dim > 0


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """T queries of each lane at consecutive slots, each of which sees the slots from ``begin`` to its own.

    Attributes:
        pool: whose keys and values.
        anchor: from where the slots are counted.
        extent: slots from the anchor to the end of query T - 1.
        tokens: T.
        shape: heads.
        begin: first slot any query sees.
        window: sliding window in slots, the query's own included; None: none.
    """

    pool: Literal["target", "draft"]
    anchor: Anchor
    extent: int
    tokens: int
    shape: HeadShape
    begin: int = 0
    window: int | None = None


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Where one lane's queries stand.

    Attributes:
        pages: page of each column of the row's table, int32 ``[P]``.
        end: slot after query T - 1; ``anchor + extent``.
        known: slot after the last query that counts; the queries after it are padding.
    """

    pages: np.ndarray[tuple[int], np.dtype[np.int32]]
    end: int
    known: int


class BoundCall(Protocol):
    """A planned call as a stage holds it; one method per kind of pool. Both mask padding themselves and never read from the host."""

    def chunk(self, query_BTQD: Tensor, kv_pool: Tensor, layer: int, valid_BT: Tensor, scale: float) -> Tensor:
        """``[B, T, Q, D]`` over keys and values of heads; 0 for an invalid query."""
        ...

    def latent(
        self, query_latent_BTQL: Tensor, query_rope_BTQR: Tensor, latent_pool: Tensor, layer: int, valid_BT: Tensor, scale: float
    ) -> Tensor:
        """``[B, T, Q, L]`` over latent rows; 0 for an invalid query."""
        ...


class HostPlanner(Protocol):
    """What plans the calls of one engine."""

    def plan(self, calls: Mapping[PlannedCall, Sequence[RowSpan]], lanes: int, page_size: int, table_width: int, dtype: str) -> None:
        """Divide the work of every call of one program, for its next launch.

        Args:
            calls: with the rows of the lanes in use; the others are padding.
            lanes: of the program.
            page_size: tokens of a page.
            table_width: columns of a row's page table.
            dtype: of queries and KV.

        Raises:
            CaptureError: the launch would differ in shape from the first one of the same call.
        """
        ...

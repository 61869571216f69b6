"""Attention calls that need a host step before each launch: their description, and the interface of the backend's host step.

A kernel of this kind reads a work list from device memory. The list is valid for one set of row lengths; with other lengths the result is
silently wrong. So a stage declares these calls in addition to its reads and writes, and the cycle takes the host step before it launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

Anchor = Literal["root", "window", "chunk"]
"""A slot of a row that the host knows before a launch: that of the root (``seq_len``), that of the first window entry
(``seq_len - window_len + 1``), or the first of the prompt chunk."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads that a kernel is built for.

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
class PreparedCall:
    """T queries of each lane at consecutive slots, each of which sees the slots from ``begin`` to its own.

    Attributes:
        pool: of its keys and values.
        anchor: slot from which the slots are counted.
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
    """Slots of one lane's queries.

    Attributes:
        pages: page of each column of the row's table, int32 ``[P]``.
        end: slot after query T - 1; ``anchor + extent``.
        known: slot after the last valid query; later queries are padding.
    """

    pages: np.ndarray[tuple[int], np.dtype[np.int32]]
    end: int
    known: int


class BoundCall(Protocol):
    """A call bound to its work list; one method per kind of pool. Both mask padding themselves and never synchronise with the host."""

    def chunk(self, query_BTQD: Tensor, kv_pool: Tensor, layer: int, valid_BT: Tensor, scale: float) -> Tensor:
        """``[B, T, Q, D]`` over keys and values of heads; 0 for an invalid query."""
        ...

    def latent(
        self, query_latent_BTQL: Tensor, query_rope_BTQR: Tensor, latent_pool: Tensor, layer: int, valid_BT: Tensor, scale: float
    ) -> Tensor:
        """``[B, T, Q, L]`` over latent rows; 0 for an invalid query."""
        ...


class HostStep(Protocol):
    """The host step of one engine."""

    def prepare(self, calls: Mapping[PreparedCall, Sequence[RowSpan]], lanes: int, page_size: int, table_width: int, dtype: str) -> None:
        """Make the work list of every call of one program, for its next launch.

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

"""The lists of a planned call: query offsets, key offsets, places of keys, numbers of keys. Host arithmetic; imports no torch.

Every lane has T queries, as in the stages. A causal kernel aligns queries and keys at their ends: query t of a lane with n keys sees keys 0
to ``n - T + t``. So with ``n = end - begin`` query t sees the slots from ``begin`` to its own, whatever n is, and only the length of the
prefix changes between launches.

After the last valid query, slots may be unwritten or have no page. No valid query sees them, but kernels multiply masked values by 0, so
these entries repeat the last valid slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..host_step import PreparedCall, RowSpan

Ints: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class KeyLists:
    """The int32 lists of one plan.

    Attributes:
        query_offsets: ``[B + 1]``, T apart.
        key_offsets: ``[B + 1]`` into ``places``.
        places: pages, or single slots of the pool where ``page_size`` is 1.
        lengths: keys of each lane.
        page_size: tokens of a place.
    """

    query_offsets: Ints
    key_offsets: Ints
    places: Ints
    lengths: Ints
    page_size: int

    @property
    def last_page_lengths(self) -> Ints:
        """Tokens in the last page of each lane."""
        return ((self.lengths - 1) % self.page_size + 1).astype(np.int32)


def by_slot(call: PreparedCall) -> bool:
    """Whether keys are listed slot by slot, because pages would include slots before the first visible or after the last valid one."""
    return call.begin > 0 or call.anchor == "window"


def place_tokens(call: PreparedCall, page_size: int) -> int:
    """Tokens per place of the call's keys."""
    return 1 if by_slot(call) else page_size


def max_places(call: PreparedCall, lanes: int, page_size: int, table_width: int) -> int:
    """Most places of any plan of the call."""
    slots = table_width * page_size + call.tokens
    return lanes * (slots if by_slot(call) else -(-slots // page_size))


def key_lists(call: PreparedCall, spans: Sequence[RowSpan], lanes: int, page_size: int) -> KeyLists:
    """Lists of one launch.

    Args:
        call: the planned call.
        spans: rows of the first lanes. Further lanes read T keys of the dummy page.
        lanes: of the program.
        page_size: tokens of a page.
    """
    size = place_tokens(call, page_size)
    places, lengths = [], []
    for span in spans:
        count = span.end - call.begin
        needed = -(-count // size)
        if size == 1:
            slots = np.arange(call.begin, max(min(span.known, span.end), call.begin + 1))
            found = span.pages[slots // page_size] * page_size + slots % page_size
        else:
            found = span.pages[: max(-(-min(span.known, span.end) // size), 1)]
        places.append(np.concatenate((found, np.full(needed - len(found), found[-1]))))
        lengths.append(count)
    idle = lanes - len(spans)
    places += [np.zeros(-(-call.tokens // size), np.int64)] * idle
    lengths += [call.tokens] * idle
    return KeyLists(
        query_offsets=np.arange(0, (lanes + 1) * call.tokens, call.tokens, dtype=np.int32),
        key_offsets=np.cumsum([0, *map(len, places)]).astype(np.int32),
        places=np.concatenate(places).astype(np.int32),
        lengths=np.asarray(lengths, np.int32),
        page_size=size,
    )

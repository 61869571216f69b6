"""What one of several ranks holds of a model (tensor parallelism, arXiv 1909.08053). Standard library only.

Queries, gates and up projections are cut by rows, what follows them by columns: each rank then has a part of the sum that leaves attention
or MLP. Embedding and language-model head are cut by vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True, slots=True)
class Part:
    """Rows or columns of a stored tensor that a rank holds."""

    whole: int
    """Rows or columns of the stored tensor."""
    pieces: tuple[tuple[int, int], ...]
    """First row or column and number of each run of them, in order."""
    room: int
    """Rows or columns of the rank's own tensor; what lies past the last piece is zero."""


@dataclass(frozen=True, slots=True)
class Share:
    """The place of a model among the ranks that hold it together; one rank holds all of it."""

    rank: int = 0
    size: int = 1
    whole_key_heads: int = 0
    """Key/value heads of all ranks."""
    key_heads: tuple[int, ...] = ()
    """Those of this rank, one for each run of its query heads that share one. Ranks may have the same, and a rank one of them twice."""

    @property
    def split(self) -> bool:
        """The model is spread over several ranks."""
        return self.size > 1

    def part(self, room: int) -> Part:
        """An even part of something of which every rank holds ``room``."""
        return Part(room * self.size, ((room * self.rank, room),), room)

    def key_part(self, width: int) -> Part:
        """Of keys or values, in heads of this width."""
        pieces: list[tuple[int, int]] = []
        for head in self.key_heads:
            begin, length = pieces[-1] if pieces else (0, 0)
            if pieces and begin + length == head * width:
                pieces[-1] = (begin, length + width)
            else:
                pieces.append((head * width, width))
        return Part(self.whole_key_heads * width, tuple(pieces), len(self.key_heads) * width)

    def vocabulary(self, size: int) -> Part:
        """Rows of an embedding or a head of ``size`` tokens. The last ranks may hold fewer than they have room for."""
        room = -(-size // self.size)
        begin = min(self.rank * room, size)
        return Part(size, ((begin, min(room, size - begin)),), room)


def share_of(rank: int, size: int, query_heads: int, key_heads: int) -> Share:
    """The place of one of ``size`` ranks, whose query heads are consecutive.

    Args:
        rank: from 0.
        size: ranks; a divisor of ``query_heads``.
        query_heads, key_heads: of all ranks; the first a multiple of the second.
    """
    own, group = query_heads // size, query_heads // key_heads
    run = gcd(own, group)
    return Share(rank, size, key_heads, tuple((rank * own + query) // group for query in range(0, own, run)))


WHOLE = Share()

"""What one of several ranks holds of a model (tensor parallelism, arXiv 1909.08053). Standard library only.

Query, gate and up projections are cut by rows, and the projections after them by columns, so each rank has a partial sum of what leaves
attention or MLP. Embedding and language-model head are cut by vocabulary. Value heads of recurrent layers are cut as query heads are, and
their key heads as key/value heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows or columns of a stored tensor that a rank holds."""

    full_size: int
    """Rows or columns of the stored tensor."""
    pieces: tuple[tuple[int, int], ...]
    """``(first, count)`` of each consecutive run of them, in order."""
    size: int
    """Rows or columns of the rank's own tensor; those past the last piece are zero."""


def _merged(pieces: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same pieces, as few and as long as possible."""
    found: list[tuple[int, int]] = []
    for first, count in pieces:
        if found and sum(found[-1]) == first:
            found[-1] = (found[-1][0], found[-1][1] + count)
        elif count:
            found.append((first, count))
    return tuple(found)


def joined(*shards: Shard) -> Shard:
    """The shard of a tensor that holds those of several projections in this order; none of them has zeros at its end."""
    pieces, before = [], 0
    for shard in shards:
        assert sum(count for _, count in shard.pieces) == shard.size, "a shard without zeros"
        pieces += [(before + first, count) for first, count in shard.pieces]
        before += shard.full_size
    return Shard(before, _merged(pieces), sum(shard.size for shard in shards))


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model is divided among ranks, seen from one of them; by default a single rank holds everything."""

    rank: int = 0
    size: int = 1
    """Number of ranks."""
    total_key_heads: int = 0
    """Key/value heads of all ranks."""
    key_heads: tuple[int, ...] = ()
    """Key/value heads of this rank, one for each run of its query heads that share one. A head may be held by several ranks, and twice by
    one rank."""
    run: int = 0
    """Query heads of each run."""

    @property
    def sharded(self) -> bool:
        """There is more than one rank."""
        return self.size > 1

    def shard(self, size: int) -> Shard:
        """An even shard: every rank holds ``size`` rows or columns."""
        return Shard(size * self.size, ((size * self.rank, size),), size)

    @property
    def copies(self) -> int:
        """How many times the ranks together hold a key/value head."""
        return self.size * len(self.key_heads) // self.total_key_heads

    @property
    def first_copies(self) -> slice:
        """Places in ``key_heads`` of the first copy of a head on any rank."""
        return slice(-self.rank * len(self.key_heads) % self.copies, None, self.copies)

    def key_shard(self, width: int) -> Shard:
        """The shard of keys or values with heads of this width."""
        pieces = _merged((head * width, width) for head in self.key_heads)
        return Shard(self.total_key_heads * width, pieces, len(self.key_heads) * width)

    def grouped_shard(self, shared: int, *widths: int) -> Shard:
        """The shard of projections that are stored key head by key head.

        Args:
            shared: rows of a key head.
            widths: after them, of one projection after the other, rows of each query head that reads this key head.
        """
        group, pieces = self.run * self.copies, []
        block = shared + group * sum(widths)
        for place, head in enumerate(self.key_heads, self.rank * len(self.key_heads)):
            begin = head * block + shared
            pieces.append((head * block, shared))
            for width in widths:
                pieces.append((begin + place % self.copies * self.run * width, self.run * width))
                begin += group * width
        return Shard(self.total_key_heads * block, _merged(pieces), len(self.key_heads) * (shared + self.run * sum(widths)))

    def vocabulary_shard(self, vocab_size: int) -> Shard:
        """The shard of an embedding or head. The last ranks may hold fewer rows than ``size``."""
        size = -(-vocab_size // self.size)
        begin = min(self.rank * size, vocab_size)
        return Shard(vocab_size, ((begin, min(size, vocab_size - begin)),), size)


def sharding_of(rank: int, size: int, query_heads: int, key_heads: int) -> Sharding:
    """The sharding seen from one of ``size`` ranks; the query heads of a rank are consecutive.

    Args:
        rank: from 0.
        size: ranks; a divisor of ``query_heads``.
        query_heads, key_heads: of all ranks; the first a multiple of the second.
    """
    own, group = query_heads // size, query_heads // key_heads
    run = gcd(own, group)
    return Sharding(rank, size, key_heads, tuple((rank * own + query) // group for query in range(0, own, run)), run)


UNSHARDED = Sharding()

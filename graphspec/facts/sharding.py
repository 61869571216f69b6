"""What one of several ranks holds of a model (tensor parallelism, arXiv 1909.08053). Standard library only.

Query, gate and up projections are cut by rows, and the projections after them by columns, so each rank has a partial sum of what leaves
attention or MLP. Embedding and language-model head are cut by vocabulary.
"""

from __future__ import annotations

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

    @property
    def sharded(self) -> bool:
        """There is more than one rank."""
        return self.size > 1

    def shard(self, size: int) -> Shard:
        """An even shard: every rank holds ``size`` rows or columns."""
        return Shard(size * self.size, ((size * self.rank, size),), size)

    def key_shard(self, width: int) -> Shard:
        """The shard of keys or values with heads of this width."""
        pieces: list[tuple[int, int]] = []
        for head in self.key_heads:
            begin, length = pieces[-1] if pieces else (0, 0)
            if pieces and begin + length == head * width:
                pieces[-1] = (begin, length + width)
            else:
                pieces.append((head * width, width))
        return Shard(self.total_key_heads * width, tuple(pieces), len(self.key_heads) * width)

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
    return Sharding(rank, size, key_heads, tuple((rank * own + query) // group for query in range(0, own, run)))


UNSHARDED = Sharding()

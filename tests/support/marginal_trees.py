"""Trees of a drafter with one distribution per depth, by a heap."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class DraftedTree:
    """Nodes in level order, the root first."""

    token_N: list[int]
    parent_N: list[int]


def best_prefixes(marginal_SV: Tensor, count: int) -> set[tuple[int, ...]]:
    """The ``count`` prefixes of highest probability under independent depths, by a heap."""
    ranked = [sorted(((-float(p), t) for t, p in enumerate(row)), key=lambda x: x[0]) for row in marginal_SV]
    queue = [(ranked[0][0][0], (0,))]
    found: set[tuple[int, ...]] = set()
    while len(found) < count:
        cost, path = heapq.heappop(queue)
        depth = len(path) - 1
        found.add(tuple(ranked[d][rank][1] for d, rank in enumerate(path)))
        if path[-1] + 1 < len(ranked[depth]):
            heapq.heappush(queue, (cost - ranked[depth][path[-1]][0] + ranked[depth][path[-1] + 1][0], (*path[:-1], path[-1] + 1)))
        if depth + 1 < len(ranked):
            heapq.heappush(queue, (cost + ranked[depth + 1][0][0], (*path, 0)))
    return found


def prefixes(tree: Any) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree.token_N)):
        paths.append((*paths[tree.parent_N[node]], tree.token_N[node]))
    return set(paths[1:])

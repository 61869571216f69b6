"""Static draft trees (EAGLE-1, arXiv 2401.15077): a topology fixed beforehand, filled with tokens by rank. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import ConfigError
from ..shapes import CycleShape

KEY = "variant.tree_choices"


@dataclass(frozen=True, slots=True)
class StaticTree:
    """A tree as paths of ranks: ``(0, 2)`` is the third best child of the best child of the root.

    Nodes are numbered in level order, so that parents come first and siblings stand together, best rank first.
    """

    choices: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, choices: Sequence[Sequence[int]]) -> StaticTree:
        """The tree of the paths, in any order.

        Raises:
            ConfigError: no path, a path twice, a negative rank, or a path whose parent is missing.
        """
        paths = sorted((tuple(path) for path in choices), key=lambda path: (len(path), path))
        if not paths or not paths[0]:
            raise ConfigError(KEY, "non-empty lists of ranks, such as [[0], [1], [0, 0]]", [list(path) for path in paths])
        for before, path in pairwise(paths):
            if before == path:
                raise ConfigError(KEY, "every path once", f"{list(path)} twice")
        known = {(), *paths}
        for path in paths:
            if min(path) < 0:
                raise ConfigError(KEY, "ranks from 0 on", list(path))
            if path[:-1] not in known:
                raise ConfigError(KEY, f"the path {list(path[:-1])}, parent of {list(path)}", "no such path")
        return cls(tuple(paths))

    @property
    def shape(self) -> CycleShape:
        """Depth, largest fan-out and nodes; a tree of best children only is a chain."""
        depth, fan_out = len(self.choices[-1]), 1 + max(max(path) for path in self.choices)
        return CycleShape(depth, fan_out, len(self.choices) + 1, "beams" if fan_out == 1 else "nodes")

    def level(self, depth: int) -> list[int]:
        """Numbers of the nodes of one depth, from 1."""
        return [n for n, path in enumerate(self.choices) if len(path) == depth]

    def parent(self, node: int) -> int:
        """Number of a node's parent; -1: the root."""
        path = self.choices[node][:-1]
        return self.choices.index(path) if path else -1

    def rank(self, node: int) -> int:
        """Which of its parent's continuations a node takes, from 0."""
        return self.choices[node][-1]

    def expanded(self, depth: int) -> list[int]:
        """Nodes of one depth that have children: those the drafter runs on."""
        return sorted({self.parent(n) for n in self.level(depth + 1)})

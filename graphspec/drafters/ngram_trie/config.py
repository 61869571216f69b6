"""Numbers of the host trie, with their checks. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ConfigError

MATCH_MODES = ("bfs", "prob")
MAX_CAPACITY = 2**31 - 2


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """How n-grams are stored and how a tree is read from them.

    Raises:
        ConfigError: a value out of range, or two that contradict each other; the key is ``variant.ngram.<field>``.
    """

    match: str = "bfs"
    """``bfs``: recent continuations first. ``prob``: frequent continuations first."""
    min_window: int = 1
    """Tokens of the shortest context suffix that anchors a match."""
    max_window: int = 12
    """Tokens of the longest one."""
    min_breadth: int = 1
    """``bfs``: children taken directly below an anchor of ``max_window`` tokens."""
    max_breadth: int = 10
    """``bfs``: children taken directly below an anchor of ``min_window`` tokens. ``prob``: children considered below any node."""
    branch_length: int = 18
    """Tokens of the longest path below an anchor."""
    capacity: int = 1_000_000
    """Nodes, allocated at once, 40 to 48 bytes each; at least ``max_window + branch_length``, one whole path."""

    def __post_init__(self) -> None:
        if self.match not in MATCH_MODES:
            raise ConfigError("variant.ngram.match", "one of " + ", ".join(MATCH_MODES), repr(self.match))
        for name in ("min_window", "max_window", "min_breadth", "max_breadth", "branch_length", "capacity"):
            value: object = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"variant.ngram.{name}", "an integer >= 1", repr(value))
        if self.max_window < self.min_window:
            raise ConfigError("variant.ngram.max_window", f"at least min_window = {self.min_window}", self.max_window)
        if self.max_breadth < self.min_breadth:
            raise ConfigError("variant.ngram.max_breadth", f"at least min_breadth = {self.min_breadth}", self.max_breadth)
        if not self.depth <= self.capacity <= MAX_CAPACITY:
            expected = f"max_window + branch_length = {self.depth} nodes or more, at most {MAX_CAPACITY}"
            raise ConfigError("variant.ngram.capacity", expected, self.capacity, "the trie must hold one whole path")

    @property
    def depth(self) -> int:
        """Longest n-gram the trie stores: an anchor and the path below it."""
        return self.max_window + self.branch_length

"""How many tokens a row's next cycle can draft, where drafts are copied from the row's own text. Host side; no torch."""

from __future__ import annotations

from collections.abc import Sequence


class RepeatIndex:
    """The tokens of a row, and where each run of ``window`` of them ended first.

    :func:`~graphspec.kernels.tree.ngram_match.ngram_match` drafts what followed an earlier occurrence of the last ``window`` tokens. So it
    finds nothing where there is none, and never more than lie between the first one and the end.

    Args:
        window: tokens that must recur, ``variant.ngram.min_window``.
    """

    __slots__ = ("_first", "_tokens", "_window")

    def __init__(self, window: int) -> None:
        self._window = window
        self._tokens: list[int] = []
        self._first: dict[tuple[int, ...], int] = {}

    def follow(self, prompt: Sequence[int], output: Sequence[int]) -> int:
        """Read what is new of a text that only grows, at a cost of its length; returns the most tokens that can be drafted after it."""
        tokens, window = self._tokens, self._window
        place = len(tokens)
        tokens += prompt[place:]
        tokens += output[len(tokens) - len(prompt) :]
        first = last = -1
        for last in range(max(place, window - 1), len(tokens)):
            first = self._first.setdefault(tuple(tokens[last + 1 - window : last + 1]), last)
        if first < 0 and len(tokens) >= window:
            last = len(tokens) - 1
            first = self._first[tuple(tokens[-window:])]
        return last - first

"""A drafter on the host, as the scheduler uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .request import Request

Nodes = tuple[list[int], list[int]]
"""Tokens and parents of the proposed nodes; a parent is a place in the same list, -1 the root."""


def with_forced(requests: Sequence[Request], trees: list[Nodes], maximum: int) -> list[Nodes]:
    """The trees of these requests; where a grammar forces what follows a root, that run in their place."""
    found = []
    for request, tree in zip(requests, trees, strict=True):
        run = list(request.grammar.forced(maximum)) if request.grammar is not None else []
        found.append((run, list(range(-1, len(run) - 1))) if run else tree)
    return found


class Proposer(Protocol):
    """A drafter on the host, as the scheduler uses it. When called, every token up to the root is known."""

    def admit(self, request: Request) -> None:
        """The request takes a row; its prompt is about to be read."""
        ...

    def propose(self, requests: Sequence[Request]) -> list[Nodes]:
        """Nodes for each request's next cycle."""
        ...

    def observe(self, request: Request, new: int) -> None:
        """The last ``new`` tokens of the request's output have just become known."""
        ...

"""Who gets a free row: the requests that wait, in order of priority and arrival, who may overtake whom, and whose time is over."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from .request import Request

LOOK_AHEAD = 16
"""Waiting requests that one admission looks at after the first that does not fit: the queue may be long, and this runs in every cycle."""
MOST_OVERTAKEN = 16
"""Later requests that may be admitted before one that does not fit; then all wait for it. Small requests keep the pages busy while a large
one waits, and it waits for at most this many of them."""


class Queue:
    """Requests that wait for a row: the lowest ``priority`` first, and of equal ones the earliest."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        """In order. A step looks here before it calls anything: usually nobody waits."""

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, request: Request) -> bool:
        place = bisect_left(self.requests, request.precedence(), key=Request.precedence)
        return place < len(self.requests) and self.requests[place] is request

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def add(self, request: Request) -> None:
        """Queue a request; one that comes back from a row has its old place."""
        insort(self.requests, request, key=Request.precedence)

    def remove(self, request: Request) -> None:
        """Take a request out that is in here."""
        del self.requests[bisect_left(self.requests, request.precedence(), key=Request.precedence)]
        request.overtaken = 0

    def admit(self, place: Callable[[Request], bool]) -> None:
        """Offer requests a place in turn. Whoever does not fit waits, and later ones go first, as far as they may.

        Args:
            place: takes the request out of this queue and returns True, or does neither. After False nothing has changed.
        """
        passed: list[Request] = []
        # Those that were passed are the first of the queue.
        while len(passed) <= LOOK_AHEAD and len(passed) < len(self.requests):
            request = self.requests[len(passed)]
            if not place(request):
                passed.append(request)
            else:
                for other in passed:
                    other.overtaken += 1
            if any(other.overtaken >= MOST_OVERTAKEN for other in passed):
                return


class Deadlines:
    """When requests end at the latest.

    Args:
        clock: seconds; that of :attr:`graphspec.engine.request.RequestMetrics.arrived`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.due: dict[Request, float] = {}
        """When each request that has a deadline is due. A step looks here before it reads the clock."""
        self._next = math.inf

    def add(self, request: Request) -> None:
        """Note when a request is due, where it says so."""
        if request.deadline is not None:
            self.due[request] = due = request.metrics.arrived + request.deadline
            self._next = min(self._next, due)

    def remove(self, request: Request) -> None:
        """A request has ended."""
        self.due.pop(request, None)

    def overdue(self) -> list[Request]:
        """Requests whose time is over."""
        if self._next == math.inf or (now := self._clock()) < self._next:
            return []
        over = [request for request, due in self.due.items() if due <= now]
        self._next = min((due for due in self.due.values() if due > now), default=math.inf)
        return over

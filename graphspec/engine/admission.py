"""Admission: the queue of waiting requests, how far they may overtake each other, and their deadlines."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable

from .request import Request

LOOK_AHEAD = 16
"""Requests that one admission tries after the first that does not fit. Bounded because the queue may be long and this runs every cycle."""
MAX_OVERTAKEN = 16
"""Later requests that may be admitted before one that does not fit. Small requests use the pages while a large one waits, but after this
many of them all others wait for it."""
MAX_OUTRANKED = 16
"""Later requests of a lower ``priority`` value that may be admitted before the oldest one that waits. Then that one goes first, and so at
least one row in seventeen is given by arrival: nobody waits for ever, and most rows go by priority however many others wait."""


class Queue:
    """Requests that wait for a row: lowest ``priority`` first, then earliest arrival.

    A request that has ``m`` older ones before it is admitted after at most ``(m + 1) * MAX_OUTRANKED`` later ones, given that it fits.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        """Waiting requests in order. The scheduler checks this list before it calls :meth:`admit`: usually it is empty."""
        self._arrivals: list[Request] = []
        """The same in order of arrival."""
        self._outranked = 0
        """Later requests that were admitted since the oldest one last was."""

    def __contains__(self, request: Request) -> bool:
        place = bisect_left(self.requests, request.precedence(), key=Request.precedence)
        return place < len(self.requests) and self.requests[place] is request

    def add(self, request: Request) -> None:
        """Queue a request; a preempted one gets its old place."""
        # What is in both may be removed, and a step may fail between any two lines.
        insort(self._arrivals, request, key=_arrival)
        insort(self.requests, request, key=Request.precedence)

    def remove(self, request: Request) -> None:
        """Remove a request, which must be in the queue."""
        del self.requests[bisect_left(self.requests, request.precedence(), key=Request.precedence)]
        del self._arrivals[bisect_left(self._arrivals, request.arrival, key=_arrival)]
        request.overtaken = 0

    def admit(self, place: Callable[[Request], bool]) -> None:
        """Try to place requests in order. One that does not fit waits, and later ones may overtake it up to :data:`MAX_OVERTAKEN` times.

        Args:
            place: removes the request from this queue and returns True, or returns False and changes nothing.
        """
        passed: list[Request] = []
        # The requests passed over are the first of the queue.
        while len(passed) <= LOOK_AHEAD and len(passed) < len(self.requests):
            if not passed and self._outranked >= MAX_OUTRANKED:
                self._promote(self._arrivals[0])
            request, oldest = self.requests[len(passed)], self._arrivals[0]
            if not place(request):
                passed.append(request)
            else:
                self._outranked = 0 if request is oldest else self._outranked + 1
                for other in passed:
                    other.overtaken += 1
            if any(other.overtaken >= MAX_OVERTAKEN for other in passed):
                return

    def _promote(self, request: Request) -> None:
        """Give the oldest request the highest priority that waits, for good: it must not be preempted for those that it now goes before."""
        first = self.requests[0]
        if request is not first:
            overtaken = request.overtaken
            self.remove(request)
            request.priority, request.overtaken = first.priority, overtaken
            self.add(request)


def _arrival(request: Request) -> int:
    return request.arrival


class Deadlines:
    """The deadlines of live requests.

    Args:
        clock: returns seconds, on the clock of :attr:`graphspec.engine.request.RequestMetrics.arrived`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.due: dict[Request, float] = {}
        """Due time of each request with a deadline. The scheduler checks this before it reads the clock."""
        self._next = math.inf

    def add(self, request: Request) -> None:
        """Note when a request is due, if it has a deadline."""
        if request.deadline is not None:
            self.due[request] = due = request.metrics.arrived + request.deadline
            self._next = min(self._next, due)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended."""
        self.due.pop(request, None)

    def overdue(self) -> list[Request]:
        """Requests past their deadline."""
        if self._next == math.inf or (now := self._clock()) < self._next:
            return []
        over = [request for request, due in self.due.items() if due <= now]
        self._next = min((due for due in self.due.values() if due > now), default=math.inf)
        return over

"""What an engine learns of itself: load and cycle times for dashboards, and whether its first traffic shows a wrong draft."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from ..graphs.programs import Key
from ..plan.plan import Plan
from ..shapes import GraphKey
from .request import Request


@dataclass(frozen=True, slots=True)
class CycleTimes:
    """Cycles of one kind.

    Attributes:
        count: cycles read.
        seconds: their total time, each from its launch, or from the previous result if that came later, to its own result.
    """

    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Load:
    """An engine at one moment.

    Attributes:
        running: requests that have rows.
        waiting: requests without one.
        pages_used: pages that requests hold.
        pages: pages there are.
        cycles: by bucket and draft depth, since the engine was made.
        with_grammar: the same for cycles in which a row had a grammar, so that the host filled masks and only one was in flight. Compared
            with the others, their mean time shows what a grammar costs all rows of its batch.
        answers: the engine's thread takes calls, and no error has left the engine without knowing what is in flight.
    """

    running: int
    waiting: int
    pages_used: int
    pages: int
    cycles: dict[tuple[int, int], CycleTimes]
    with_grammar: dict[tuple[int, int], CycleTimes]
    answers: bool


class Meter:
    """Sums up the times of cycles. One thread writes; any thread may read."""

    def __init__(self) -> None:
        self._sums: dict[GraphKey, list[float]] = {}
        """How often each program ran, and seconds."""
        self._key: Key | None = None
        self._sum: list[float] = []
        self._last = 0.0

    def note(self, key: Key, launched: float, read: float) -> None:
        """Record a launch whose result was read.

        Args:
            key: its program.
            launched, read: times in seconds, on one clock.
        """
        begin, self._last = launched if launched > self._last else self._last, read
        # This runs every cycle, usually for the same program: skip the lookup.
        if key is not self._key:
            self._key, self._sum = key, self._sums.setdefault(key, [0.0, 0.0]) if isinstance(key, GraphKey) else [0.0, 0.0]
        self._sum[0] += 1
        self._sum[1] += read - begin

    def times(self, *, grammar: bool = False) -> dict[tuple[int, int], CycleTimes]:
        """Cycle times by bucket and draft depth. ``grammar=True`` counts only cycles in which a row had a grammar."""
        times: dict[tuple[int, int], CycleTimes] = {}
        for key, (count, seconds) in dict(self._sums).items():
            if key.sampling.grammar or not grammar:
                kind = key.bucket, key.shape.num_steps
                before = times.get(kind, CycleTimes(0, 0.0))
                times[kind] = CycleTimes(before.count + int(count), before.seconds + seconds)
        return times


logger = logging.getLogger(__name__)

CYCLES = 64
"""Whole cycles that are counted."""
MIN_ACCEPTANCE_LENGTH = 1.05
"""New tokens per cycle below which a draft network is suspected; a drafter that is never right has 1."""


class AcceptanceTest:
    """Counts the first :data:`CYCLES` cycles in which a draft network proposed something; does nothing afterwards.

    A drafter that is hardly ever right is more often a wrong checkpoint than a bad draft.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._tokens = self._cycles = 0
        self.done = not plan.variant.has_network

    def observe(self, requests: Iterable[Request]) -> None:
        """Count finished requests; warns once when :data:`CYCLES` were seen and hardly anything was accepted."""
        if self.done:
            return
        for request in requests:
            runs = [tokens for tokens, _ in request.metrics.drafted_cycles()]
            self._tokens, self._cycles = self._tokens + sum(runs), self._cycles + len(runs)
        if self._cycles < CYCLES:
            return
        self.done = True
        length = self._tokens / self._cycles
        if length < MIN_ACCEPTANCE_LENGTH:
            assert self._plan.draft is not None
            logger.warning(
                "the draft is almost never accepted: %.2f tokens per cycle over %d cycles. Is %s a draft for %s, of variant %s, with the "
                "right norm flags and tapped layers?",
                length,
                self._cycles,
                self._plan.draft.path,
                self._plan.target.path,
                self._plan.variant.name,
            )

"""What an engine has to do at one moment, and what it has done since it was made: figures for dashboards."""

from __future__ import annotations

from dataclasses import dataclass

from ..graphs.programs import Key
from ..shapes import GraphKey


@dataclass(frozen=True, slots=True)
class CycleTimes:
    """Cycles of one kind.

    Attributes:
        count: how many were read.
        seconds: that they took together, each from its launch, or from the result before it where that came later, to its own result.
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
        with_grammar: those of them in which a row had a grammar, so that the host filled masks and one was in flight. Their mean time
            next to that of the others is what all rows of such a batch pay.
    """

    running: int
    waiting: int
    pages_used: int
    pages: int
    cycles: dict[tuple[int, int], CycleTimes]
    with_grammar: dict[tuple[int, int], CycleTimes]


class Meter:
    """Times cycles. One thread notes; any may look."""

    def __init__(self) -> None:
        self._sums: dict[GraphKey, list[float]] = {}
        """Of each program: how often it ran, and seconds."""
        self._key: Key | None = None
        self._sum: list[float] = []
        self._last = 0.0

    def note(self, key: Key, launched: float, read: float) -> None:
        """Count a launch that was read.

        Args:
            key: its program.
            launched, read: when; seconds of one clock.
        """
        begin, self._last = launched if launched > self._last else self._last, read
        # In every cycle, and mostly of the same program.
        if key is not self._key:
            self._key, self._sum = key, self._sums.setdefault(key, [0.0, 0.0]) if isinstance(key, GraphKey) else [0.0, 0.0]
        self._sum[0] += 1
        self._sum[1] += read - begin

    def cycles(self) -> dict[tuple[int, int], CycleTimes]:
        """By bucket and draft depth."""
        return self._times(grammar=False)

    def with_grammar(self) -> dict[tuple[int, int], CycleTimes]:
        """Those of them in which a row had a grammar."""
        return self._times(grammar=True)

    def _times(self, *, grammar: bool) -> dict[tuple[int, int], CycleTimes]:
        """Of all programs, or of those with a grammar alone."""
        times: dict[tuple[int, int], CycleTimes] = {}
        for key, (count, seconds) in dict(self._sums).items():
            if key.sampling.grammar or not grammar:
                kind = key.bucket, key.shape.num_steps
                before = times.get(kind, CycleTimes(0, 0.0))
                times[kind] = CycleTimes(before.count + int(count), before.seconds + seconds)
        return times

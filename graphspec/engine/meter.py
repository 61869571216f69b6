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
        self._cycles: dict[tuple[int, int], CycleTimes] = {}
        self._with_grammar: dict[tuple[int, int], CycleTimes] = {}
        self._last = 0.0

    def note(self, key: Key, launched: float, read: float) -> None:
        """Count a launch that was read.

        Args:
            key: its program.
            launched, read: when; seconds of one clock.
        """
        begin, self._last = max(launched, self._last), read
        if isinstance(key, GraphKey):
            kind = key.bucket, key.shape.num_steps
            for times in (self._cycles, self._with_grammar) if key.sampling.grammar else (self._cycles,):
                before = times.get(kind, CycleTimes(0, 0.0))
                times[kind] = CycleTimes(before.count + 1, before.seconds + read - begin)

    def cycles(self) -> dict[tuple[int, int], CycleTimes]:
        """By bucket and draft depth."""
        return dict(self._cycles)

    def with_grammar(self) -> dict[tuple[int, int], CycleTimes]:
        """Those of them in which a row had a grammar."""
        return dict(self._with_grammar)

"""Interrupts at a chosen line of chosen files: as Ctrl-C may come between any two, and as a step of an engine may fail."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphspec.engine.engine import Engine

Interrupt = KeyboardInterrupt


class Lines:
    """Counts the lines that run, and raises before one of them.

    Attributes:
        count: lines so far.
        where: ``file:line`` at which it raised; empty while it has not.
    """

    def __init__(self, wanted: Callable[[CodeType], bool], at: int | None, error: type[BaseException] = Interrupt) -> None:
        self._wanted, self._at, self._error = wanted, at, error
        self.count = 0
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call":
            return self if self._wanted(frame.f_code) else None
        if event == "line":
            if self.count == self._at:
                self._at = None
                self.where = f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
                raise self._error
            self.count += 1
        return self


@contextmanager
def interrupted(codes: Iterable[CodeType] | Iterable[str], at: int | None) -> Iterator[Lines]:
    """Raise :class:`KeyboardInterrupt` inside before line number ``at`` of what runs in some places; None: only count.

    Args:
        codes: code objects, or ends of file names.
        at: counted from 0 over all of them.
    """
    lines = Lines(_within(codes), at)
    before = sys.gettrace()
    sys.settrace(lines)
    try:
        yield lines
    finally:
        sys.settrace(before)


class Fault(Exception):  # noqa: N818
    """The error that a step raises."""


@contextmanager
def failing(engine: Engine, codes: Iterable[CodeType] | Iterable[str], at: int | None) -> Iterator[Lines]:
    """Raise :class:`Fault` inside before line number ``at`` of what the engine's own thread runs in some places; None: only count."""
    lines = Lines(_within(codes), at, Fault)
    engine.between_steps(lambda: sys.settrace(lines))
    try:
        yield lines
    finally:
        engine.between_steps(lambda: sys.settrace(None))


def _within(codes: Iterable[CodeType] | Iterable[str]) -> Callable[[CodeType], bool]:
    places = tuple(codes)
    names = tuple(place for place in places if isinstance(place, str))
    # Python ignores what a finalizer raises.
    return lambda code: code in places or (code.co_filename.endswith(names or ("\0",)) and code.co_name != "__del__")

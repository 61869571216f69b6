"""Progress of what takes long, on stderr: bars in a terminal or a notebook, elsewhere log lines. Rich is imported when a bar is drawn."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

Progress = Callable[[str, int, int], None]
"""A user's own, called as ``progress(phase, done, total)``."""

logger = logging.getLogger("graphspec")


class Display(Protocol):
    """Shows phases; each ends when ``done`` is ``total``."""

    def __call__(self, phase: str, done: int, total: int, note: str = "", /) -> None:
        """Show that ``done`` of ``total`` are done; ``note``: what is under way."""

    def close(self) -> None:
        """Take away what is left of phases that did not end."""


class Calls:
    """Calls a user's own function, or none."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress

    def __call__(self, phase: str, done: int, total: int, note: str = "", /) -> None:
        if self._progress is not None:
            self._progress(phase, done, total)

    def close(self) -> None:
        pass


class Bars:
    """A bar for each phase, with its note at the end.

    Args:
        console: where.
        stay: bars stay when they are full; otherwise they disappear with the last one.
    """

    def __init__(self, console: Console, *, stay: bool = False) -> None:
        self._console, self._stay = console, stay
        self._bars: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, phase: str, done: int, total: int, note: str = "", /) -> None:
        bars = self._bars or self._make()
        if phase not in self._tasks:
            self._tasks[phase] = bars.add_task(phase, completed=done, total=total, note=note)
            bars.start()
        # What is under way may not let another thread draw for a while.
        bars.update(self._tasks[phase], completed=done, total=total, note=note, refresh=bool(note))
        if bars.finished and not self._stay:
            self.close()

    def _make(self) -> RichProgress:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        text, note = TextColumn("{task.description}"), TextColumn("{task.fields[note]}", markup=False)
        columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), note)
        # What a program prints meanwhile is its output, and may go elsewhere.
        self._bars = RichProgress(*columns, console=self._console, transient=not self._stay, redirect_stdout=False)
        return self._bars

    def close(self) -> None:
        bars, self._bars, self._tasks = self._bars, None, {}
        if bars is not None:
            bars.stop()


class LogLines:
    """A log line for each phase when it has ended: what was done, and how long it took."""

    def __init__(self) -> None:
        self._phases: dict[str, tuple[float, list[str]]] = {}

    def __call__(self, phase: str, done: int, total: int, note: str = "", /) -> None:
        began, notes = self._phases.setdefault(phase, (time.perf_counter(), []))
        if note:
            notes.append(note)
        if done >= total:
            del self._phases[phase]
            logger.info("%s: %d of %d in %.1f s%s", phase, done, total, time.perf_counter() - began, ": " * bool(notes) + "; ".join(notes))

    def close(self) -> None:
        self._phases.clear()


LINE_SECONDS = 30.0
"""Between two lines about a phase that goes on."""


class _Lines:
    """Prints notes, phases that have ended, and now and then how far others are, as lines."""

    def __init__(self, console: Console) -> None:
        self._console, self._printed = console, time.monotonic()

    def __call__(self, phase: str, done: int, total: int, note: str = "", /) -> None:
        from rich.text import Text

        if note or done == total or time.monotonic() - self._printed >= LINE_SECONDS:
            self._console.print(Text(f"{phase} {done}/{total} {note}".rstrip()), soft_wrap=True)
            self._printed = time.monotonic()

    def close(self) -> None:
        pass


def automatic() -> Display:
    """Bars that disappear, or log lines where nothing can be drawn on stderr."""
    terminal = _is_terminal()
    if not terminal and "IPython" not in sys.modules:
        return LogLines()
    from rich.console import Console

    console = Console(stderr=True)
    # Without widgets, a notebook shows a warning in place of bars.
    drawn = find_spec("ipywidgets") is not None if console.is_jupyter else terminal
    return Bars(console) if drawn else LogLines()


def _is_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # closed
        return False


def display_of(progress: Progress | bool | None) -> Callable[[], Display]:
    """What makes the displays of an engine.

    Args:
        progress: a user's own function, called in place of one; False: none; None or True: :func:`automatic`.
    """
    if progress is None or progress is True:
        return automatic
    return lambda: Calls(progress or None)


@contextmanager
def progress_bars(console: Console | None = None, *, lines: bool = False) -> Iterator[Display]:
    """One bar per phase for as long as the context lasts.

    Args:
        console: where; default stderr.
        lines: bars stay when they are full, and without a terminal, as in a log file, notes and finished phases are printed as lines.
    """
    from rich.console import Console

    console = console or Console(stderr=True)
    display: Display = Bars(console, stay=lines) if console.is_terminal else _Lines(console) if lines else LogLines()
    try:
        yield display
    finally:
        display.close()

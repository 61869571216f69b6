"""Progress bars on stderr; nothing, or plain lines, where stderr is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

ProgressCallback = Callable[[str, int, int], None]


@contextmanager
def progress_bars(console: Console | None = None) -> Iterator[ProgressCallback]:
    """Bars on stderr, one per stage; yields ``callback(stage, done, total)``. Silent when stderr is no terminal."""
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield advance


class TrainingProgress(Protocol):
    """Called with a stage, its units done and in all, and a short note."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None: ...


@contextmanager
def training_progress(console: Console | None = None) -> Iterator[TrainingProgress]:
    """Bars on stderr, one per stage, each with a note at its end; plain lines where stderr is no terminal, as in a log file."""
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(stage: str, done: int, total: int, note: str = "") -> None:
            if not console.is_terminal:
                if note or done == total:
                    console.print(Text(f"{stage} {done}/{total} {note}".rstrip()), soft_wrap=True)
                return
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, note="")
            bars.update(tasks[stage], completed=done, total=total, note=note)

        yield advance

"""Progress on stderr: bars in a terminal, elsewhere plain lines or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text


@contextmanager
def progress_bars(console: Console | None = None, *, lines: bool = False) -> Iterator[Callable[..., None]]:
    """One bar per stage; yields ``callback(stage, done, total, note="")``, whose note is shown at the end of the bar.

    Args:
        console: where; default stderr.
        lines: bars stay when they are full, and without a terminal, as in a log file, notes and finished stages are printed as lines.
    """
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console, transient=not lines, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(stage: str, done: int, total: int, note: str = "") -> None:
            if not console.is_terminal:
                if lines and (note or done == total):
                    console.print(Text(f"{stage} {done}/{total} {note}".rstrip()), soft_wrap=True)
                return
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, note="")
            bars.update(tasks[stage], completed=done, total=total, note=note)

        yield advance

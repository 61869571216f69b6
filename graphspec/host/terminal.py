"""Tables and a line of status in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text


def table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[str] = (), *, caption: str = "",
    footers: Sequence[str] = (), bold: Collection[int] = (),
) -> Table:  # fmt: skip
    """Rows of text, which is shown as it is. Columns are of figures, on the right and never wrapped, but those of ``words``.

    Args:
        title: above the table.
        headings: of the columns.
        rows: cells; missing ones at the end are empty.
        words: headings of the columns on the left.
        caption: below the table.
        footers: of the columns.
        bold: numbers of the rows to stress.
    """
    shown = Table(
        title=title, title_justify="left", caption=caption or None, caption_justify="left", box=SIMPLE_HEAD, pad_edge=False,
        collapse_padding=True, show_footer=bool(footers),
    )  # fmt: skip
    for place, heading in enumerate(headings):
        footer = footers[place] if place < len(footers) else ""
        figures = heading not in words
        shown.add_column(heading, Text(footer), justify="right" if figures else "left", no_wrap=figures)
    for number, row in enumerate(rows):
        shown.add_row(*map(Text, row), style="bold" if number in bold else None)
    return shown


@contextmanager
def status(*, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """Shows in stderr's terminal what is going on. Elsewhere it prints lines, or nothing without ``lines``."""
    err = Console(stderr=True)
    if err.is_terminal:
        with err.status("") as shown:
            yield shown.update
    else:
        yield lambda text: err.print(Text(text), soft_wrap=True) if lines else None


def say(*sentences: str) -> None:
    """Print sentences to stdout, each on a line of any length."""
    console = Console()
    for sentence in sentences:
        console.print(Text(sentence), soft_wrap=True)

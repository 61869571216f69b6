"""What every chart of the report has in common: its parts, how numbers are spelled, colours by role, labels beside what they name.

A figure is plotly's JSON (``data`` and ``layout``). Its colours are names of CSS variables such as ``--accent``: the page puts the values
of the reader's light or dark scheme in their place. Text is escaped, for plotly reads a part of HTML in it. Imports neither torch nor
plotly.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .results import Side

SUBJECT_COLOURS = ("--accent", "--c2", "--c3", "--c4", "--c5", "--c6")
BASELINE_COLOURS = ("--g1", "--g2")
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "star")
DASH = "\N{EN DASH}"
"""Where there is no value."""
TIMES = "\N{MULTIPLICATION SIGN}"
LABEL_GAP = 17
"""Pixels between the middles of two labels that name lines."""
ROW = 58
"""Pixels of a horizontal bar with its label above."""
MOST_ROWS = 12
MOST_SIDES = 8
"""Rows of charts that look into single sides."""
MOST_LINES = 6


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under headings; the first column names the row."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart, or the sentence that says why it isn't there.

    Attributes:
        id: of the element it is drawn in.
        title: what it shows, in a few words.
        lede: how to read it.
        figure: plotly's ``data`` and ``layout``; None: left out.
        numbers: the same as a table.
        missing: what the files would have to hold.
        wide: it takes the whole width of the page.
    """

    id: str
    title: str
    lede: str
    figure: dict[str, Any] | None = None
    numbers: Table | None = None
    missing: str = ""
    wide: bool = True


@dataclass(frozen=True, slots=True)
class Style:
    """How the lines and marks of one side look, the same in every chart."""

    colour: str
    symbol: str
    dash: str


@dataclass(slots=True)
class Palette:
    """Hands every label its style: subjects in the order they come, the first one in the accent; what they are compared with in greys."""

    sides: Sequence[Side]
    styles: dict[str, Style] = field(init=False)

    def __post_init__(self) -> None:
        self.styles = {}
        for colours, subject in ((SUBJECT_COLOURS, True), (BASELINE_COLOURS, False)):
            group = sorted((side for side in self.sides if side.subject is subject), key=lambda side: bool(side.get("synthetic")))
            labels = dict.fromkeys(side.label for side in group)
            for index, label in enumerate(labels):
                dash = "solid" if subject else ("solid", "dash", "dashdot")[index // len(colours) % 3]
                symbol = SYMBOLS[index // len(colours) % len(SYMBOLS)] if subject else ("circle", "square", "diamond")[index % 3]
                self.styles[label] = Style(colours[index % len(colours)], symbol, dash)

    def __getitem__(self, side: Side) -> Style:
        return self.styles[side.label]


def spell(value: float | None, unit: str = "") -> str:
    """Three digits that matter, thousands apart: ``12,345``, ``885``, ``1.68``, ``0.0421``; a dash where there is no value."""
    if value is None or not math.isfinite(value):
        return DASH
    size = abs(value)
    if size and size < 0.001:
        text = f"{value:.1e}"
    else:
        digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 or not size else 2 - math.floor(math.log10(size))
        text = f"{value:,.{digits}f}"
    return f"{text} {unit}".rstrip()


def spell_tick(value: float) -> str:
    """A round number beside an axis: ``0.05``, ``2``, ``10,000``."""
    return f"{value:,g}"


def spell_count(count: float | None) -> str:
    """A mean of whole numbers: ``64``, ``63.5``; a dash where there is none."""
    return DASH if count is None else f"{count:.1f}".removesuffix(".0")


def few(shown: int, all_: int, which: str = "first") -> str:
    """The sentence that says how many are drawn, empty where all are."""
    return f" Drawn are the {which} {shown} of {all_}." if shown < all_ else ""


def named(side: Side, more: str = "") -> str:
    """The label for a legend, marks on a line of their own."""
    return escape(side.label + more) + (f"<br>{escape(' · '.join(side.marks))}" if side.marks else "")


def floor_mark(x: Sequence[float | None], rows: Sequence[float], hover: str) -> dict[str, Any]:
    """Triangles under the bars of ``rows``, where they would end at the floor."""
    marker = {"symbol": "triangle-up", "size": 9, "color": "--ink"}
    return {
        "type": "scatter", "mode": "markers", "x": list(x), "y": [row - 0.27 for row in rows], "name": "floor", "marker": marker,
        "cliponaxis": False, "showlegend": False, "hovertemplate": hover + "<extra></extra>",
    }  # fmt: skip


def escape(text: object) -> str:
    """``text`` for a label: plotly shows it as it stands."""
    return html.escape(str(text), quote=False)


def plural(count: int, word: str) -> str:
    """``1 round``, ``5 rounds``."""
    return f"{count} {word}" + ("" if count == 1 else "s")


def layout(height: int, *, x: dict[str, Any] | None = None, y: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A layout in the report's own style: thin grid, no frame, no legend."""
    axis = {
        "gridcolor": "--grid",
        "gridwidth": 1,
        "zeroline": False,
        "showline": False,
        "ticks": "",
        "tickfont": {"color": "--soft", "size": 12},
        "title": {"font": {"color": "--soft", "size": 12}, "standoff": 10},
        "fixedrange": True,
        "automargin": True,
    }
    base: dict[str, Any] = {
        "height": height,
        "margin": {"l": 12, "r": 16, "t": 14, "b": 44, "pad": 4},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif", "size": 13, "color": "--ink"},
        "hoverlabel": {"bgcolor": "--surface", "bordercolor": "--line", "font": {"color": "--ink", "size": 13}, "align": "left"},
        "hovermode": "closest",
        "dragmode": False,
        "showlegend": False,
        "legend": {"orientation": "h", "x": 0, "y": -0.18, "yanchor": "top", "font": {"size": 12, "color": "--ink"}},
    }
    return {**base, "xaxis": _merge(axis, x), "yaxis": _merge(axis, y), **more}


def _merge(axis: dict[str, Any], more: dict[str, Any] | None) -> dict[str, Any]:
    merged = {**axis, **(more or {})}
    if isinstance(merged["title"], str):
        merged["title"] = {**axis["title"], "text": merged["title"]}
    return merged


def row_axis(count: int) -> dict[str, Any]:
    """The y axis of ``count`` horizontal rows, the first on top, without ticks: labels stand above the bars."""
    return {"range": [-0.45, count - 0.3], "showgrid": False, "showticklabels": False, "automargin": False}


def row_labels(labels: Sequence[str], *, escaped: bool = False) -> list[dict[str, Any]]:
    """Annotations above the bars of :func:`row_axis`, at the left edge, so that long names fit on a phone; they hide grid lines."""
    return [
        {
            "text": label if escaped else escape(label), "name": "row", "x": 0, "xref": "paper", "y": len(labels) - 1 - index,
            "yref": "y", "yshift": 23, "xanchor": "left", "yanchor": "middle", "showarrow": False, "align": "left",
            "font": {"size": 12.5, "color": "--ink"}, "bgcolor": "--surface", "borderpad": 1,
        }
        for index, label in enumerate(labels)
    ]  # fmt: skip


def end_labels(ends: Sequence[tuple[float, float, str, str]], pixels: float, low: float, high: float) -> list[dict[str, Any]]:
    """Names behind the last points of lines, moved apart where they would overlap.

    Args:
        ends: x and y in the units of the axes (logarithms on a logarithmic one), text, colour.
        pixels: height of the plot; ``low`` to ``high`` is what its y axis spans.
    """
    annotations: list[dict[str, Any]] = []
    scale = pixels / (high - low or 1)
    last = -math.inf
    for x, y, text, colour in sorted(ends, key=lambda end: end[1]):
        middle = max((y - low) * scale, last + LABEL_GAP)
        last = middle
        annotations.append({
            "text": escape(text), "name": "direct", "x": x, "y": y, "xanchor": "left", "yanchor": "middle", "xshift": 9,
            "yshift": round(middle - (y - low) * scale, 1), "showarrow": False, "align": "left", "font": {"size": 12, "color": colour},
        })  # fmt: skip
    return annotations


def label_margin(labels: Sequence[str]) -> int:
    """Pixels that the longest of ``labels`` takes beside a plot."""
    return 24 + round(6.6 * max(map(len, labels), default=0))


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... from ``low`` to ``high``."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [digit * 10.0**decade for decade in decades for digit in (1, 2, 5) if low <= digit * 10.0**decade <= high]

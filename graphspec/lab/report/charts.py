"""Common parts of all charts: axes, colours by role, labels.

Figures are plotly's objects, which refuse keys and values that plotly does not have. Their colours are CSS variables such as
``var(--accent)``, which plotly passes through; the page replaces them by the values of the reader's light or dark scheme. Text goes through
:func:`plotly_text`, because plotly interprets some HTML. Imports plotly, and no torch.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

from ..measure.results import Results, SideRecord, unique
from .tables import Table, plural, spell_tick

SUBJECT_COLOURS = ("var(--accent)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)")
BASELINE_COLOURS = ("var(--g1)", "var(--g2)")
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "star")
BURST_COLOURS = tuple(f"var(--b{index})" for index in range(1, 7))
BASELINE_BURST_COLOURS = tuple(f"var(--n{index})" for index in range(1, 7))
OUTLINE = {"color": "var(--surface)", "width": 1.5}
"""Between neighbouring marks."""
LOG_FROM = 8.0
"""Values that span more than this factor are drawn on a logarithmic axis."""
LABEL_GAP = 17
"""Pixels between the middles of two labels that name lines."""
ROW = 58
"""Pixels of a horizontal bar with its label above."""
MAX_ROWS = 12
MAX_SIDES = 8
"""Most rows of a chart with one row per side."""
MAX_LINES = 6


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart, or a sentence that says why there is none.

    Attributes:
        figure: what plotly draws; None: the chart is left out.
        wide: whether it takes the whole width of the page.
    """

    id: str
    title: str
    lede: str
    figure: go.Figure | None = None
    numbers: Table | None = None
    missing: str = ""
    wide: bool = True


@dataclass(frozen=True, slots=True)
class Style:
    """Style of the lines and markers of one side, the same in every chart."""

    colour: str
    symbol: str
    dash: str


@dataclass(slots=True)
class Palette:
    """Assigns each label a style: subjects in order of appearance, the first in the accent colour; baselines in greys."""

    sides: Sequence[SideRecord]
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

    def __getitem__(self, side: SideRecord) -> Style:
        return self.styles[side.label]


def plotly_text(text: object) -> str:
    """``text`` escaped for a label or a tooltip, where plotly interprets tags and entities."""
    return html.escape(str(text), quote=False)


def marked(side: SideRecord, more: str = "") -> str:
    """A side's label, then its marks."""
    return " · ".join([side.label + more, *side.marks])


def titled(side: SideRecord, several_batches: bool) -> str:
    """A side's marks, then its label, with its batch where there are several; marks come first so that they are never cut off."""
    return " · ".join([*side.marks, side.label, *([f"batch {side.batch}"] if several_batches else [])])


def named(side: SideRecord, more: str = "") -> str:
    """The label for a legend, with marks on a second line."""
    return plotly_text(side.label + more) + (f"<br>{plotly_text(' · '.join(side.marks))}" if side.marks else "")


def spell_line(label: str, line: Sequence[SideRecord]) -> tuple[str, str, list[str]]:
    """The name of a side's batches, joined by a line, with all their marks; their entry in the legend; and the name of each."""
    name = " · ".join(unique([label, *(mark for side in line for mark in side.marks)]))
    legend = next((named(side) for side in line if side.marks), plotly_text(label))
    return name, legend, [plotly_text(titled(side, several_batches=True)) for side in line]


def smallest_batches(sides: Iterable[SideRecord]) -> tuple[list[SideRecord], bool]:
    """The sides with the smallest batches, at most :data:`MAX_SIDES`, and whether their batches differ."""
    shown = sorted(sides, key=lambda side: side.batch)[:MAX_SIDES]
    return shown, len({side.batch for side in shown}) > 1


def drafting_sides(results: Results, palette: Palette, key: str) -> tuple[list[SideRecord], int]:
    """Sides with figures of acceptance under ``key``, at most :data:`MAX_LINES`, and how many there are."""
    sides: dict[str, SideRecord] = {}
    # Acceptance varies with the batch by chance only, so the smallest batch represents all.
    for side in sorted(results.sides, key=lambda side: side.batch):
        found = side.get(key, [])
        if any(share is not None for share in (found.values() if isinstance(found, dict) else found)):
            sides.setdefault(side.label, side)
    # The first sides have distinct colours; those whose acceptance is not the drafter's own are subdued.
    ranked = sorted(sides.values(), key=lambda side: (bool(side.get("synthetic")), list(palette.styles).index(side.label)))
    return ranked[:MAX_LINES], len(ranked)


def burst_colours(size: int, sizes: Sequence[int], *, subject: bool) -> tuple[str, str]:
    """Colours of a burst of ``size`` tokens and of its text, where bursts have the ascending ``sizes``."""
    index, levels = sizes.index(size), len(BURST_COLOURS)
    level = index if len(sizes) <= levels else round(index * (levels - 1) / (len(sizes) - 1))
    return (BURST_COLOURS if subject else BASELINE_BURST_COLOURS)[level], "var(--ink)" if level < 3 else "var(--burst-ink)"


def shown_note(shown: int, all_: int, which: str = "first") -> str:
    """A sentence with the number of drawn items; empty where all are drawn."""
    return f" Drawn are the {which} {shown} of {all_}." if shown < all_ else ""


def floor_note(sides: Sequence[SideRecord]) -> str:
    """Says of how many sides the floor is left out; empty: of none."""
    beaten = sum(side.beats_floor for side in sides)
    if not beaten:
        return ""
    whose = f"{beaten} of {plural(len(sides), 'side')}"
    return f" The floor of {whose} is left out: cycles were faster, since what they read was nearer than the memory it is priced by."


def floor_mark(x: Sequence[float | None], rows: Sequence[float], hover: str) -> go.Scatter:
    """Triangles under the bars of ``rows``, at the values of the floor."""
    marker = {"symbol": "triangle-up", "size": 9, "color": "var(--ink)"}
    return go.Scatter(
        mode="markers", x=x, y=[row - 0.27 for row in rows], name="floor", marker=marker, cliponaxis=False, showlegend=False,
        hovertemplate=hover + "<extra></extra>",
    )  # fmt: skip


def drawing(data: Sequence[Any], height: int, *, x: dict[str, Any], y: dict[str, Any], **more: Any) -> go.Figure:
    """A figure in the report's style: thin grid, no frame, no legend.

    Args:
        x: additional or overriding properties of its x axis; likewise ``y``.
        more: additional or overriding properties of its layout.
    """
    axis = {
        "gridcolor": "var(--grid)",
        "gridwidth": 1,
        "zeroline": False,
        "showline": False,
        "ticks": "",
        "tickfont": {"color": "var(--soft)", "size": 12},
        "title": {"font": {"color": "var(--soft)", "size": 12}, "standoff": 10},
        "fixedrange": True,
        "automargin": True,
    }
    family = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"
    hover = {"bgcolor": "var(--surface)", "bordercolor": "var(--line)", "font": {"color": "var(--ink)", "size": 13}, "align": "left"}
    base = go.Layout(
        template=go.layout.Template(),  # an empty one: plotly's default adds seven kilobytes to every figure
        height=height,
        margin={"l": 12, "r": 16, "t": 14, "b": 44, "pad": 4},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": family, "size": 13, "color": "var(--ink)"},
        hoverlabel=hover,
        hovermode="closest",
        dragmode=False,
        showlegend=False,
        legend={"orientation": "h", "x": 0, "y": -0.18, "yanchor": "top", "font": {"size": 12, "color": "var(--ink)"}},
        xaxis=axis,
        yaxis=axis,
    )
    return go.Figure(data, base.update(xaxis=x, yaxis=y, **more))


def points(style: Style, x: Sequence[Any], y: Sequence[Any], name: str, hover: str, width: float = 2.2, **more: Any) -> go.Scatter:
    """A line with markers in the style of its side."""
    return go.Scatter(
        mode="lines+markers", x=x, y=y, name=name, cliponaxis=False, hovertemplate=hover + "<extra></extra>",
        line={"color": style.colour, "width": width, "dash": style.dash},
        marker={"color": style.colour, "symbol": style.symbol, "size": 8, "line": OUTLINE}, **more,
    )  # fmt: skip


def stacked(
    x: Sequence[Any], rows: Sequence[int], name: str, colour: Any, ink: str, text: Sequence[str], hover: str, **more: Any
) -> go.Bar:
    """Parts of horizontal bars, of the same kind in every row, with ``text`` where it fits."""
    return go.Bar(
        orientation="h", x=x, y=rows, width=0.38, name=name, marker={"color": colour, "line": OUTLINE}, text=text, textposition="inside",
        insidetextanchor="middle", textangle=0, textfont={"color": ink, "size": 11}, hovertemplate=hover + "<extra></extra>", **more,
    )  # fmt: skip


def row_drawing(
    data: Sequence[Any], labels: Sequence[go.layout.Annotation], pixels: int, *, x: dict[str, Any], below: int = 66, **more: Any
) -> go.Figure:
    """A figure of horizontal rows of ``pixels`` each, with their labels (:func:`row_labels`), and ``below`` pixels for the axis."""
    return drawing(data, len(labels) * pixels + below, x=x, y=row_axis(len(labels)), annotations=labels, **more)


def span(values: Sequence[float]) -> tuple[float, float, bool]:
    """Ends of an axis for positive ``values``, and whether it is logarithmic, in which case the ends are logarithms."""
    low, high = min(values), max(values)
    if low > 0 and high / low > LOG_FROM:
        return math.log10(low) - 0.08, math.log10(high) + 0.08, True
    return 0.0, high * 1.1, False


def log_axis(low: float, high: float) -> dict[str, Any]:
    """A logarithmic axis between two exponents of 10."""
    marks = log_ticks(10**low, 10**high)
    return {"type": "log", "range": [low, high], "tickvals": marks, "ticktext": [spell_tick(mark) for mark in marks]}


def row_axis(count: int) -> dict[str, Any]:
    """The y axis of ``count`` horizontal rows, the first on top, without ticks: labels are above the bars."""
    return {"range": [-0.45, count - 0.3], "showgrid": False, "showticklabels": False, "automargin": False}


def row_labels(
    labels: Sequence[str], *, bold: Sequence[str] = (), colours: Sequence[str] = (), shift: int = 23
) -> list[go.layout.Annotation]:
    """Annotations above the bars of :func:`row_axis`, at the left edge, so that long names fit on a phone; they hide grid lines.

    Args:
        colours: of the labels, where the bars' colours do not show the role of a side.
    """
    return [
        go.layout.Annotation(
            text=(f"<b>{plotly_text(bold[index])}</b>   " if bold else "") + plotly_text(label), name="row", x=0, xref="paper",
            y=len(labels) - 1 - index, yref="y", yshift=shift, xanchor="left", yanchor="middle", showarrow=False, align="left",
            font={"size": 12.5, "color": colours[index] if colours else "var(--ink)"}, bgcolor="var(--surface)", borderpad=1,
        )
        for index, label in enumerate(labels)
    ]  # fmt: skip


def end_labels(ends: Sequence[tuple[float, float, str, str]], pixels: float, low: float, high: float) -> list[go.layout.Annotation]:
    """Names to the right of the last points of lines, moved apart where they would overlap.

    Args:
        ends: x and y in the units of the axes (logarithms on a logarithmic one), text, colour.
        pixels: height of the plot, whose y axis is from ``low`` to ``high``.
    """
    annotations = []
    scale = pixels / (high - low or 1)
    last = -math.inf
    for x, y, text, colour in sorted(ends, key=lambda end: end[1]):
        middle = max((y - low) * scale, last + LABEL_GAP)
        last = middle
        annotations.append(go.layout.Annotation(
            text=plotly_text(text), name="direct", x=x, y=y, xanchor="left", yanchor="middle", xshift=9,
            yshift=round(middle - (y - low) * scale, 1), showarrow=False, align="left", font={"size": 12, "color": colour},
        ))  # fmt: skip
    return annotations


def label_margin(labels: Sequence[str]) -> int:
    """Pixels that the longest of ``labels`` takes next to a plot."""
    return 24 + round(6.6 * max(map(len, labels), default=0))


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... from ``low`` to ``high``."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [digit * 10.0**decade for decade in decades for digit in (1, 2, 5) if low <= digit * 10.0**decade <= high]

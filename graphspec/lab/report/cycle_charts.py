"""Charts of cycles: acceptance by position, the stages of a cycle, gaps between tokens, and bursts of tokens."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from ..measure.results import Results, SideRecord, percent_of_floor, unique
from .charts import (
    ROW,
    Chart,
    Palette,
    burst_colours,
    drafting_sides,
    drawing,
    end_labels,
    floor_mark,
    floor_note,
    label_margin,
    log_axis,
    marked,
    named,
    plotly_text,
    points,
    row_drawing,
    row_labels,
    shown_note,
    smallest_batches,
    stacked,
    titled,
)
from .tables import DASH, Table, spell

STAGE_COLOURS = tuple(f"var(--s{index})" for index in range(1, 10))
BINS = 48
RIDGE = 92
"""Pixels of one row of the distribution of gaps."""


def acceptance(results: Results, palette: Palette) -> list[Chart]:
    """Two charts: the share of drafts accepted up to each position, and at each position given the ones before."""
    forms = (
        ("acceptance_unconditional", "Accepted up to position k", "Share of cycles whose first k drafts were all accepted."),
        ("acceptance_conditional", "Accepted at position k, given the ones before", "Share of drafts accepted where all before them were."),
    )  # fmt: skip
    return [_acceptance(results, palette, key, title, lede) for key, title, lede in forms]


def _acceptance(results: Results, palette: Palette, key: str, title: str, lede: str) -> Chart:
    id_ = key.replace("_", "-")
    shown, known = drafting_sides(results, palette, key)
    if not shown:
        return Chart(id_, title, "", missing=f"no side with {key}", wide=False)
    data, ends = [], []
    for side in shown:
        shares = side.record[key]
        style = palette[side]
        length = side.number("acceptance_length")
        note = f", {spell(length)}" if length else ""
        name = marked(side, note)
        hover = f"{plotly_text(name)}<br>position %{{x}}: <b>%{{y:.1%}}</b>"
        data.append(points(style, list(range(1, len(shares) + 1)), shares, named(side, note), hover))
        last = max(index for index, share in enumerate(shares) if share is not None)
        ends.append((float(last + 1), float(shares[last]), name, style.colour))
    maximum = max(len(side.record[key]) for side in shown)
    height = 330
    drawn = drawing(
        data,
        height,
        x={"dtick": 1, "tick0": 1, "range": [0.8, maximum + 0.2], "title_text": "draft position k", "showgrid": False},
        y={"range": [0, 1.04], "tickformat": ".0%", "dtick": 0.25},
        annotations=end_labels(ends, height - 58, 0, 1.04),
        margin={"r": label_margin([text for _, _, text, _ in ends])},
    )
    lede += " After each name its acceptance length, in tokens per cycle." * any(side.number("acceptance_length") for side in shown)
    lede += shown_note(len(shown), known)
    rows = [[marked(side), spell(side.number("acceptance_length")),
             *(spell(share) for share in side.record[key]), *[DASH] * (maximum - len(side.record[key]))] for side in shown]  # fmt: skip
    numbers = Table(["side", "acceptance length", *map(str, range(1, maximum + 1))], rows)
    return Chart(id_, title, lede, drawn, numbers, wide=False)


def stages(results: Results, palette: Palette) -> Chart:
    """The stages of one cycle end to end, with the floor. Bars are coloured by stage, names by side."""
    title = "Where a cycle's time goes"
    sides = [side for side in results.sides if any(stage.get("ms") is not None for stage in side.get("stages", []))]
    if not sides:
        return Chart("stages", title, "", missing="no side with timed stages")
    shown, several = smallest_batches(sides)
    names = unique(str(stage["name"]) for side in shown for stage in side.record["stages"])
    data = []
    longest = max(float(sum(stage.get("ms") or 0 for stage in side.record["stages"])) for side in shown)
    for index, name in enumerate(names):
        colour, shown_name = STAGE_COLOURS[index % len(STAGE_COLOURS)], plotly_text(name.replace("_", " "))
        bars = [(len(shown) - 1 - row, _stage(side, name)) for row, side in enumerate(shown)]
        bars = [(row, stage) for row, stage in bars if stage.get("ms") is not None]
        floor_texts = [[plotly_text(_floor_text(stage))] for _, stage in bars]
        hover = f"{plotly_text(name)}: <b>%{{x:.3g}} ms</b>%{{customdata[0]}}"
        data.append(stacked(
            [stage["ms"] for _, stage in bars], [row for row, _ in bars], shown_name, colour, "var(--bar-ink)", [shown_name] * len(bars),
            hover, customdata=floor_texts, showlegend=True,
        ))  # fmt: skip
    floors = [(len(shown) - 1 - row, side.floor_ms) for row, side in enumerate(shown)]
    floors_shown = [(row, floor) for row, floor in floors if floor]
    if floors_shown:
        x, y = [floor for _, floor in floors_shown], [row for row, _ in floors_shown]
        data.append(floor_mark(x, y, "floor of the cycle: <b>%{x:.3g} ms</b>"))
    labels = row_labels([titled(side, several) + _share(side) for side in shown], colours=[palette[side].colour for side in shown])
    drawn = row_drawing(
        data,
        labels,
        ROW + 4,
        x={"range": [0, max(longest, *(floor for _, floor in floors_shown), 0) * 1.03], "title_text": "ms per cycle", "nticks": 7},
        below=110,
        barmode="stack",
        uniformtext={"minsize": 10, "mode": "hide"},
        showlegend=True,
        legend={"traceorder": "normal", "yref": "container", "y": 0.0, "yanchor": "bottom"},
        margin={"b": 88},
    )
    rows = [
        [titled(side, several_batches=True), str(stage["name"]), spell(stage.get("ms")), spell(stage.get("floor_ms")),
         spell(_stage_percent(stage)), _size(stage.get("bytes"))]
        for side in shown for stage in side.record["stages"]
    ]  # fmt: skip
    lede = "Each stage timed in a run of its own; the run without timers decides the speed."
    lede += " The triangle is the cycle's floor: its bytes at the bandwidth measured in the same run." if floors_shown else ""
    lede += floor_note(shown)
    lede += shown_note(len(shown), len(sides))
    numbers = Table(["side", "stage", "ms", "floor, ms", "% of floor", "bytes moved"], rows)
    return Chart("stages", title, lede, drawn, numbers)


def _share(side: SideRecord) -> str:
    percent = side.percent_of_floor
    return f", {percent:.0f} % of floor" if percent is not None else ""


def _stage(side: SideRecord, name: str) -> dict[str, Any]:
    return next((stage for stage in side.record["stages"] if stage["name"] == name), {})


def _size(size: float | None) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size and size >= scale:
            return spell(size / scale, unit)
    return spell(size, "B") if size is not None else DASH


def _stage_percent(stage: dict[str, Any]) -> float | None:
    """None for a stage that is faster than its floor, which is none then."""
    floor, spent = stage.get("floor_ms"), stage.get("ms")
    return percent_of_floor(floor, spent) if floor is not None and spent is not None else None


def _floor_text(stage: dict[str, Any]) -> str:
    floor, percent = stage.get("floor_ms"), _stage_percent(stage)
    parts = [f"floor {spell(floor)} ms" if floor is not None else "", f"{spell(percent)} %" if percent is not None else "",
             f"{_size(stage['bytes'])} moved" if stage.get("bytes") else ""]  # fmt: skip
    text = ", ".join(part for part in parts if part)
    return f"; {text}" if text else ""


def gaps(results: Results, palette: Palette) -> Chart:
    """Distribution of the gaps between arriving tokens, one row per side."""
    title = "Gaps between tokens"
    found = [side for side in results.sides if len(_gaps(side)) > 1]
    shown, several = smallest_batches(found)
    samples = [(side, _gaps(side)) for side in shown]
    if not samples:
        return Chart("gaps", title, "", missing="no side with itl_samples_ms", wide=False)
    everything = [value for _, values in samples for value in values]
    low, high = math.log10(min(everything)) - 0.03, math.log10(max(everything)) + 0.03
    edges = [10 ** (low + (high - low) * index / BINS) for index in range(BINS + 1)]
    data = []
    rows = []
    for index, (side, values) in enumerate(samples):
        base, colour = float(len(samples) - 1 - index), palette[side].colour
        counts = _counts(values, edges)
        x = [edge for edge in edges for _ in (0, 1)]
        y = [base, *(base + 0.5 * count / max(counts) for count in counts for _ in (0, 1)), base]
        ends = [edges[0], edges[-1]]
        data.append(go.Scatter(mode="lines", x=ends, y=[base, base], line={"width": 0}, hoverinfo="skip", showlegend=False))
        data.append(go.Scatter(
            mode="lines", x=x, y=y, name=plotly_text(side.label), fill="tonexty", fillcolor=colour, hoverinfo="skip", opacity=0.85,
            line={"color": colour, "width": 1.4, "shape": "linear"},
        ))  # fmt: skip
        known = {part: side.number("itl_ms", part) for part in ("p50", "p90", "p99")}
        for part, at in known.items():
            if at:
                data.append(go.Scatter(
                    mode="lines", x=[at, at], y=[base - 0.05, base + 0.1], name=part, showlegend=False,
                    line={"color": "var(--ink)", "width": 2},
                    hovertemplate=f"{plotly_text(titled(side, several))}<br>{part}: <b>%{{x:.3g}} ms</b><extra></extra>",
                ))  # fmt: skip
        rows.append([titled(side, several_batches=True), *(spell(at) for at in known.values()), str(len(values))])
    drawn = drawing(
        data,
        len(samples) * RIDGE + 66,
        x={**log_axis(low, high), "title_text": "ms between events"},
        y={"range": [-0.12, len(samples) - 0.1], "showgrid": False, "showticklabels": False, "automargin": False},
        annotations=row_labels([titled(side, several) for side, _ in samples], shift=60),
    )
    lede = "Tokens of one cycle arrive together, so a gap lies between bursts, not tokens: compare sides by TPOT. Ticks: p50, p90, p99."
    lede += shown_note(len(samples), len(found))
    numbers = Table(["side", "p50, ms", "p90, ms", "p99, ms", "samples"], rows)
    return Chart("gaps", title, lede, drawn, numbers, wide=False)


def _gaps(side: SideRecord) -> list[float]:
    return [float(gap) for gap in side.get("itl_samples_ms", []) if gap > 0]


def _counts(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    counts = [0] * (len(edges) - 1)
    for value in values:
        counts[min(max(bisect_right(edges, value) - 1, 0), len(counts) - 1)] += 1
    return counts


def bursts(results: Results) -> Chart:
    """Number of tokens that arrive together."""
    title = "Tokens that arrive together"
    sides = [side for side in results.sides if sum(side.get("burst_tokens", {}).values()) > 0]
    if not sides:
        return Chart("bursts", title, "", missing="no side with burst_tokens", wide=False)
    shown, several = smallest_batches(sides)
    sizes = sorted({int(size) for side in shown for size in side.record["burst_tokens"]})
    data = []
    rows = [len(shown) - 1 - row for row in range(len(shown))]
    for size in sizes:
        shares = [side.record["burst_tokens"].get(str(size), 0) / sum(side.record["burst_tokens"].values()) for side in shown]
        colours, inks = zip(*(burst_colours(size, sizes, subject=side.subject) for side in shown), strict=True)
        text = [str(size) if share else "" for share in shares]
        data.append(stacked(shares, rows, str(size), colours, inks[0], text, f"{size} at once: <b>%{{x:.1%}}</b> of bursts"))
    drawn = row_drawing(
        data,
        row_labels([titled(side, several) for side in shown]),
        ROW + 4,
        x={"range": [0, 1], "tickformat": ".0%", "title_text": "share of bursts", "nticks": 6},
        barmode="stack",
        uniformtext={"minsize": 10, "mode": "hide"},
        margin={"r": 26},
    )
    counts = [(titled(side, several_batches=True), side.record["burst_tokens"]) for side in shown]
    cells = [[name, *(str(found.get(str(size), 0)) for size in sizes)] for name, found in counts]
    lede = "Bursts by how many tokens they bring; the numbers in the bars are tokens." + shown_note(len(shown), len(sides))
    return Chart("bursts", title, lede, drawn, Table(["side", *map(str, sizes)], cells), wide=False)

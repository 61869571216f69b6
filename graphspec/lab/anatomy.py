"""Charts of what happens inside: acceptance by position, the stages of a cycle, the gaps between tokens and the bursts they come in."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from .canvas import (
    DASH,
    MOST_LINES,
    MOST_SIDES,
    ROW,
    Chart,
    Palette,
    Table,
    end_labels,
    escape,
    few,
    floor_mark,
    label_margin,
    layout,
    log_ticks,
    named,
    row_axis,
    row_labels,
    spell,
    spell_tick,
)
from .figures import titled
from .results import Results, Side, unique

STAGE_COLOURS = ("--s1", "--s2", "--s3", "--s4", "--s5", "--s6", "--s7", "--s8")
BURST_COLOURS = ("--b1", "--b2", "--b3", "--b4", "--b5", "--b6")
BINS = 48
RIDGE = 92
"""Pixels of one row of the distribution of gaps."""


def acceptance(results: Results, palette: Palette) -> list[Chart]:
    """Share of drafts accepted up to each position, and at each position given the ones before."""
    forms = (
        ("acceptance_unconditional", "Accepted up to position k", "Share of cycles whose first k drafts were all accepted."),
        ("acceptance_conditional", "Accepted at position k, given the ones before", "Share of drafts accepted where all before them were."),
    )  # fmt: skip
    return [_acceptance(results, palette, key, title, lede) for key, title, lede in forms]


def _acceptance(results: Results, palette: Palette, key: str, title: str, lede: str) -> Chart:
    id_ = key.replace("_", "-")
    sides: dict[str, Side] = {}
    # The batch changes what is accepted by chance only: the smallest stands for all.
    for side in sorted(results.sides, key=lambda side: side.batch):
        if any(share is not None for share in side.get(key, [])):
            sides.setdefault(side.label, side)
    if not sides:
        return Chart(id_, title, "", missing=f"no side with {key}", wide=False)
    # The first ones have colours of their own; those whose acceptance says nothing of the drafter stand back.
    ranked = sorted(sides.values(), key=lambda side: (bool(side.get("synthetic")), list(palette.styles).index(side.label)))
    shown = ranked[:MOST_LINES]
    data, ends = [], []
    for side in shown:
        shares = side.record[key]
        style = palette[side]
        length = side.number("acceptance_length")
        told = f", {spell(length)}" if length else ""
        name = " · ".join([side.label + told, *side.marks])
        data.append({
            "type": "scatter", "mode": "lines+markers", "x": list(range(1, len(shares) + 1)), "y": shares, "name": named(side, told),
            "cliponaxis": False, "line": {"color": style.colour, "width": 2.2, "dash": style.dash},
            "marker": {"color": style.colour, "symbol": style.symbol, "size": 7, "line": {"color": "--surface", "width": 1.5}},
            "hovertemplate": f"{escape(name)}<br>position %{{x}}: <b>%{{y:.1%}}</b><extra></extra>",
        })  # fmt: skip
        last = max(index for index, share in enumerate(shares) if share is not None)
        ends.append((float(last + 1), float(shares[last]), name, style.colour))
    most = max(len(side.record[key]) for side in shown)
    height = 330
    drawn = layout(
        height,
        x={"dtick": 1, "tick0": 1, "range": [0.8, most + 0.2], "title": "draft position k", "showgrid": False},
        y={"range": [0, 1.04], "tickformat": ".0%", "dtick": 0.25},
        annotations=end_labels(ends, height - 58, 0, 1.04),
    )
    drawn["margin"]["r"] = label_margin([text for _, _, text, _ in ends])
    lede += (
        " Behind each name its acceptance length, in tokens per cycle." if any(side.number("acceptance_length") for side in shown) else ""
    )
    lede += few(len(shown), len(ranked))
    rows = [[" · ".join([side.label, *side.marks]), spell(side.number("acceptance_length")),
             *(spell(share) for share in side.record[key]), *[DASH] * (most - len(side.record[key]))] for side in shown]  # fmt: skip
    numbers = Table(["side", "acceptance length", *map(str, range(1, most + 1))], rows)
    return Chart(id_, title, lede, {"data": data, "layout": drawn}, numbers, wide=False)


def stages(results: Results) -> Chart:
    """The stages of one cycle end to end, with the floor beside them."""
    title = "Where a cycle's time goes"
    sides = [side for side in results.sides if any(stage.get("ms") is not None for stage in side.get("stages", []))]
    if not sides:
        return Chart("stages", title, "", missing="no side with timed stages")
    sides.sort(key=lambda side: side.batch)
    shown = sides[:MOST_SIDES]
    several = len({side.batch for side in shown}) > 1
    names = unique(str(stage["name"]) for side in shown for stage in side.record["stages"])
    data: list[dict[str, Any]] = []
    longest = max(_total(side) for side in shown)
    for index, name in enumerate(names):
        colour, shown_name = STAGE_COLOURS[index % len(STAGE_COLOURS)], escape(name.replace("_", " "))
        bars = [(len(shown) - 1 - row, _stage(side, name)) for row, side in enumerate(shown)]
        bars = [(row, stage) for row, stage in bars if stage.get("ms") is not None]
        told = [[escape(_floor_told(stage))] for _, stage in bars]
        data.append({
            "type": "bar", "orientation": "h", "x": [stage["ms"] for _, stage in bars], "y": [row for row, _ in bars], "width": 0.38,
            "name": shown_name, "marker": {"color": colour, "line": {"color": "--surface", "width": 1.5}}, "text": [shown_name] * len(bars),
            "textposition": "inside", "insidetextanchor": "middle", "textangle": 0, "textfont": {"color": "--bar-ink", "size": 11},
            "customdata": told, "showlegend": True,
            "hovertemplate": f"{escape(name)}: <b>%{{x:.3g}} ms</b>%{{customdata[0]}}<extra></extra>",
        })  # fmt: skip
    floors = [(len(shown) - 1 - row, side.number("floor_ms")) for row, side in enumerate(shown)]
    marked = [(row, floor) for row, floor in floors if floor]
    if marked:
        x, y = [floor for _, floor in marked], [row for row, _ in marked]
        data.append(floor_mark(x, y, "floor of the cycle: <b>%{x:.3g} ms</b>"))
    labels = [titled(side, several) + _share(side) for side in shown]
    drawn = layout(
        len(shown) * (ROW + 4) + 110,
        x={"range": [0, max(longest, *(floor for _, floor in marked), 0) * 1.03], "title": "ms per cycle", "nticks": 7},
        y=row_axis(len(shown)),
        annotations=row_labels(labels),
        barmode="stack",
        uniformtext={"minsize": 10, "mode": "hide"},
        showlegend=True,
    )
    drawn["legend"] |= {"traceorder": "normal", "yref": "container", "y": 0.0, "yanchor": "bottom"}
    drawn["margin"]["b"] = 88
    rows = [
        [titled(side, several_batches=True), str(stage["name"]), spell(stage.get("ms")), spell(stage.get("floor_ms")),
         spell(stage.get("percent_of_floor")), _size(stage.get("bytes"))]
        for side in shown for stage in side.record["stages"]
    ]  # fmt: skip
    lede = "Each stage timed in a run of its own; the run without timers decides the speed."
    lede += " The triangle is the cycle's floor: its bytes at the bandwidth measured in the same run." if marked else ""
    lede += few(len(shown), len(sides))
    numbers = Table(["side", "stage", "ms", "floor, ms", "% of floor", "bytes moved"], rows)
    return Chart("stages", title, lede, {"data": data, "layout": drawn}, numbers)


def _share(side: Side) -> str:
    percent = side.number("percent_of_floor")
    return f", {percent:.0f} % of floor" if percent is not None else ""


def _total(side: Side) -> float:
    return float(sum(stage.get("ms") or 0 for stage in side.record["stages"]))


def _stage(side: Side, name: str) -> dict[str, Any]:
    return next((stage for stage in side.record["stages"] if stage["name"] == name), {})


def _size(size: float | None) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size and size >= scale:
            return spell(size / scale, unit)
    return spell(size, "B") if size is not None else DASH


def _floor_told(stage: dict[str, Any]) -> str:
    floor, percent = stage.get("floor_ms"), stage.get("percent_of_floor")
    parts = [f"floor {spell(floor)} ms" if floor is not None else "", f"{spell(percent)} %" if percent is not None else "",
             f"{_size(stage['bytes'])} moved" if stage.get("bytes") else ""]  # fmt: skip
    told = ", ".join(part for part in parts if part)
    return f"; {told}" if told else ""


def gaps(results: Results, palette: Palette) -> Chart:
    """How the gaps between tokens that arrive are distributed, one row a side."""
    title = "Gaps between tokens"
    samples = [(side, [float(gap) for gap in side.get("itl_samples_ms", []) if gap > 0]) for side in results.sides]
    found = sorted(((side, values) for side, values in samples if len(values) > 1), key=lambda sample: sample[0].batch)
    samples = found[:MOST_SIDES]
    if not samples:
        return Chart("gaps", title, "", missing="no side with itl_samples_ms", wide=False)
    everything = [value for _, values in samples for value in values]
    low, high = math.log10(min(everything)) - 0.03, math.log10(max(everything)) + 0.03
    edges = [10 ** (low + (high - low) * index / BINS) for index in range(BINS + 1)]
    data: list[dict[str, Any]] = []
    several = len({side.batch for side, _ in samples}) > 1
    rows = []
    for index, (side, values) in enumerate(samples):
        base, colour = float(len(samples) - 1 - index), palette[side].colour
        counts = _counts(values, edges)
        x = [edge for edge in edges for _ in (0, 1)]
        y = [base, *(base + 0.5 * count / max(counts) for count in counts for _ in (0, 1)), base]
        data.append({"type": "scatter", "mode": "lines", "x": [edges[0], edges[-1]], "y": [base, base], "line": {"width": 0},
                     "hoverinfo": "skip", "showlegend": False})  # fmt: skip
        data.append({
            "type": "scatter", "mode": "lines", "x": x, "y": y, "name": escape(side.label), "fill": "tonexty", "hoverinfo": "skip",
            "line": {"color": colour, "width": 1.4, "shape": "linear"}, "fillcolor": colour, "opacity": 0.85,
        })  # fmt: skip
        known = {part: side.number("itl_ms", part) for part in ("p50", "p90", "p99")}
        for part, at in known.items():
            if at:
                data.append({
                    "type": "scatter", "mode": "lines", "x": [at, at], "y": [base - 0.05, base + 0.1], "name": part, "showlegend": False,
                    "line": {"color": "--ink", "width": 2},
                    "hovertemplate": f"{escape(side.label)}<br>{part}: <b>%{{x:.3g}} ms</b><extra></extra>",
                })  # fmt: skip
        rows.append([titled(side, several_batches=True), *(spell(at) for at in known.values()), str(len(values))])
    ticks = log_ticks(10**low, 10**high)
    labels = row_labels([titled(side, several) for side, _ in samples])
    for label in labels:
        label["yshift"] = 60
    drawn = layout(
        len(samples) * RIDGE + 66,
        x={
            "type": "log",
            "range": [low, high],
            "tickvals": ticks,
            "ticktext": [spell_tick(tick) for tick in ticks],
            "title": "ms between events",
        },
        y={"range": [-0.12, len(samples) - 0.1], "showgrid": False, "showticklabels": False, "automargin": False},
        annotations=labels,
    )
    lede = "Tokens of one cycle arrive together, so a gap lies between bursts, not tokens: compare sides by TPOT. Ticks: p50, p90, p99."
    lede += few(len(samples), len(found))
    numbers = Table(["side", "p50, ms", "p90, ms", "p99, ms", "samples"], rows)
    return Chart("gaps", title, lede, {"data": data, "layout": drawn}, numbers, wide=False)


def _counts(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    counts = [0] * (len(edges) - 1)
    for value in values:
        counts[min(max(bisect_right(edges, value) - 1, 0), len(counts) - 1)] += 1
    return counts


def bursts(results: Results) -> Chart:
    """How many tokens arrive together."""
    title = "Tokens that arrive together"
    sides = [side for side in results.sides if sum(side.get("burst_tokens", {}).values()) > 0]
    if not sides:
        return Chart("bursts", title, "", missing="no side with burst_tokens", wide=False)
    sides.sort(key=lambda side: side.batch)
    shown = sides[:MOST_SIDES]
    sizes = sorted({int(size) for side in shown for size in side.record["burst_tokens"]})
    several = len({side.batch for side in shown}) > 1
    data = []
    for index, size in enumerate(sizes):
        shares = [side.record["burst_tokens"].get(str(size), 0) / sum(side.record["burst_tokens"].values()) for side in shown]
        level = index if len(sizes) <= len(BURST_COLOURS) else round(index * (len(BURST_COLOURS) - 1) / (len(sizes) - 1))
        data.append({
            "type": "bar", "orientation": "h", "x": shares, "y": [len(shown) - 1 - row for row in range(len(shown))], "width": 0.38,
            "name": str(size), "marker": {"color": BURST_COLOURS[level], "line": {"color": "--surface", "width": 1.5}},
            "text": [str(size) if share else "" for share in shares], "textposition": "inside", "insidetextanchor": "middle",
            "textangle": 0, "textfont": {"size": 11, "color": "--ink" if level < 3 else "--burst-ink"},
            "hovertemplate": f"{size} at once: <b>%{{x:.1%}}</b> of bursts<extra></extra>",
        })  # fmt: skip
    drawn = layout(
        len(shown) * (ROW + 4) + 66,
        x={"range": [0, 1], "tickformat": ".0%", "title": "share of bursts", "nticks": 6},
        y=row_axis(len(shown)),
        annotations=row_labels([titled(side, several) for side in shown]),
        barmode="stack",
        uniformtext={"minsize": 10, "mode": "hide"},
    )
    rows = [[titled(side, several_batches=True), *(str(side.record["burst_tokens"].get(str(size), 0)) for size in sizes)] for side in shown]
    lede = "Bursts by how many tokens they bring; the numbers in the bars are tokens." + few(len(shown), len(sides))
    drawn["margin"]["r"] = 26
    return Chart("bursts", title, lede, {"data": data, "layout": drawn}, Table(["side", *map(str, sizes)], rows), wide=False)

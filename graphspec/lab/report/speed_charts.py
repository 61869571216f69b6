"""Charts of speed: tokens per second, ratios to baselines, the sweep of shapes, predictions, plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import plotly.graph_objects as go

from ..measure.results import ONCE, Line, Results, SideRecord, unique
from .charts import (
    BASELINE_COLOURS,
    MAX_LINES,
    MAX_ROWS,
    OUTLINE,
    ROW,
    SUBJECT_COLOURS,
    Chart,
    Palette,
    drawing,
    end_labels,
    floor_mark,
    floor_note,
    label_margin,
    log_axis,
    marked,
    plotly_text,
    points,
    row_drawing,
    row_labels,
    shown_note,
    span,
    spell_line,
    titled,
)
from .tables import DASH, TIMES, Table, plural, spell


def floor_of(side: SideRecord) -> float | None:
    """Tokens/s if every cycle took exactly its floor: acceptance length * batch / floor; None if one of these is unknown, or beaten."""
    floor, length = side.floor_ms, side.number("acceptance_length")
    return length * side.batch * 1e3 / floor if floor and length else None


def throughput(results: Results, palette: Palette) -> Chart:
    """Tokens/s against batch, with the floor; bars where the files have one batch only."""
    title = "Tokens per second"
    sides = [side for side in results.sides if side.speed]
    if not sides:
        return Chart("throughput", title, "", missing="no side with tokens_per_second whose output was equal")
    several = len({side.batch for side in sides}) > 1
    numbers = Table(
        ["side", "batch", "tokens/s, median", "p10", "p90", "per user", "at the floor"],
        [
            [
                marked(side), str(side.batch),
                *(spell(side.number("tokens_per_second", part)) for part in ("median", "p10", "p90")),
                spell(side.number("tokens_per_second_per_user", "median")), spell(floor_of(side)),
            ]
            for side in sides
        ],
    )  # fmt: skip
    if not several:
        batch = plural(sides[0].batch, "request") + " at once"
        return _throughput_bars(title, sides, palette, numbers, batch)
    ranked = sorted(sides, key=lambda side: (side.subject, side.speed or 0), reverse=True)
    lines = unique(side.label for side in ranked)
    # A side with one batch would be a dot; next to lines, it appears in the table only.
    long = [label for label in lines if len({side.batch for side in sides if side.label == label}) > 1]
    subjects = [label for label in long or lines if any(side.subject for side in sides if side.label == label)][:MAX_LINES]
    shown = subjects + [label for label in long or lines if label not in subjects][: MAX_LINES - len(subjects) // 2]
    lede = "All requests together, by requests at once. Dots are medians over rounds, thin bars p10 to p90."
    lede += " Dashed: the floor, if every cycle took only the time its bytes need." if any(floor_of(side) for side in sides) else ""
    lede += floor_note(sides)
    lede += f" Drawn are {len(shown)} of {len(lines)} sides; the numbers below have all." if len(lines) > len(shown) else ""
    return Chart("throughput", title, lede, _throughput_lines([s for s in sides if s.label in shown], palette), numbers)


def _throughput_lines(sides: Sequence[SideRecord], palette: Palette) -> go.Figure:
    floors = [floor_of(side) for side in sides]
    values = [value for value in (*(side.speed for side in sides), *floors) if value]
    low, high, log = span(values)
    batches = sorted({side.batch for side in sides})
    height = 440
    data: list[go.Scatter] = []
    ends: list[tuple[float, float, str, str]] = []
    for label in unique(side.label for side in sides):
        line = sorted((side for side in sides if side.label == label), key=lambda side: side.batch)
        style = palette[line[0]]
        name, legend, names = spell_line(label, line)
        speeds = [side.speed or 0.0 for side in line]
        x = [side.batch for side in line]
        if any(floor_of(side) for side in line):
            data.append(go.Scatter(
                mode="lines", x=x, y=[floor_of(side) for side in line], name=f"{plotly_text(name)}, floor", opacity=0.75, showlegend=False,
                line={"color": style.colour, "width": 1.2, "dash": "4px,4px"}, customdata=names,
                hovertemplate="%{customdata}<br>floor: %{y:,.0f} tokens/s<extra></extra>",
            ))  # fmt: skip
        spread = [(side.number("tokens_per_second", "p10"), side.number("tokens_per_second", "p90")) for side in line]
        bars = {
            "type": "data", "symmetric": False, "thickness": 1, "width": 0, "color": style.colour,
            "array": [(p90 or speed) - speed for (_, p90), speed in zip(spread, speeds, strict=True)],
            "arrayminus": [speed - (p10 or speed) for (p10, _), speed in zip(spread, speeds, strict=True)],
        }  # fmt: skip
        hover, width = "%{customdata}: <b>%{y:,.0f}</b> tokens/s", 2.6 if line[0].subject else 1.8
        data.append(points(style, x, speeds, legend, hover, width, customdata=names, error_y=bars))
        ends.append((math.log10(x[-1]), math.log10(speeds[-1]) if log else speeds[-1], name, style.colour))
    y_axis: dict[str, Any] = {"range": [low, high], "title_text": "tokens/s", "tickformat": ",.0f"} | (log_axis(low, high) if log else {})
    x_axis = {"type": "log", "tickvals": batches, "ticktext": [str(batch) for batch in batches], "title_text": "requests at once",
              "range": [math.log10(batches[0]) - 0.04, math.log10(batches[-1]) + 0.04], "showgrid": False}  # fmt: skip
    labels, margin = end_labels(ends, height - 58, low, high), {"r": label_margin([text for _, _, text, _ in ends])}
    return drawing(data, height, x=x_axis, y=y_axis, annotations=labels, margin=margin)


def _throughput_bars(title: str, sides: list[SideRecord], palette: Palette, numbers: Table, batch: str) -> Chart:
    ranked = sorted(sides, key=lambda side: side.speed or 0, reverse=True)
    shown = ranked[:MAX_ROWS]
    speeds = [side.speed or 0.0 for side in shown]
    floors = [floor_of(side) for side in shown]
    rows = [len(shown) - 1 - index for index in range(len(shown))]
    spread = [(side.number("tokens_per_second", "p10"), side.number("tokens_per_second", "p90")) for side in shown]
    names = [plotly_text(titled(side, several_batches=False)) for side in shown]
    data = [go.Bar(
        orientation="h", x=speeds, y=rows, width=0.34, name="tokens/s", cliponaxis=False,
        marker={"color": [palette[side].colour for side in shown], "line": {"width": 0}},
        text=[f"<b>{spell(speed)}</b>" for speed in speeds], textposition="outside", textfont={"color": "var(--ink)", "size": 13},
        customdata=[[name, spell(low), spell(high)] for name, (low, high) in zip(names, spread, strict=True)],
        hovertemplate="%{customdata[0]}<br><b>%{x:,.0f}</b> tokens/s, p10 %{customdata[1]}, p90 %{customdata[2]}<extra></extra>",
    )]  # fmt: skip
    if any(floors):
        data.append(floor_mark(floors, rows, "floor: %{x:,.0f} tokens/s"))
    maximum = max([*speeds, *(floor for floor in floors if floor)])
    lede = f"All requests together, {batch}; median over rounds."
    lede += " The triangle is the floor, if every cycle took only the time its bytes need." if any(floors) else ""
    lede += floor_note(shown)
    lede += shown_note(len(shown), len(ranked), "fastest")
    x_axis = {"range": [0, maximum * 1.13], "title_text": "tokens/s", "tickformat": ",.0f", "nticks": 6}
    labels = row_labels([titled(side, several_batches=False) for side in shown])
    drawn = row_drawing(data, labels, ROW, x=x_axis)
    return Chart("throughput", title, lede, drawn, numbers)


def comparison(results: Results, palette: Palette) -> Chart:
    """Ratio of each side to the one it was compared with: the median and every round."""
    title = "Against the baselines"
    sides = [side for side in results.sides if side.number("ratio", "median")]
    if not sides:
        return Chart("comparison", title, "", missing="no side with a ratio to another one")
    shown = sorted(sides, key=lambda side: side.number("ratio", "median") or 0, reverse=True)[:MAX_ROWS]
    several = len({side.batch for side in sides}) > 1
    data: list[go.Bar | go.Scatter] = []
    maximum, minimum, rows = 1.0, 1.0, []
    for index, side in enumerate(shown):
        row = len(shown) - 1 - index
        ratio: dict[str, Any] = side.get("ratio")
        middle = float(ratio["median"])
        rounds = [float(value) for value in ratio.get("rounds") or []]
        maximum, minimum = max(maximum, middle, *rounds), min(minimum, middle, *rounds)
        colour, to = palette[side].colour, plotly_text(ratio.get("to", "the baseline"))
        data.append(go.Bar(
            orientation="h", base=[1.0], x=[middle - 1.0], y=[row], width=0.26, name=plotly_text(side.label),
            marker={"color": colour, "opacity": 0.32}, hoverinfo="skip",
        ))  # fmt: skip
        data.append(go.Scatter(
            mode="markers", x=rounds, y=[row] * len(rounds), name="rounds", marker={"color": colour, "size": 6, "opacity": 0.6},
            hovertemplate=f"a round: %{{x:.3f}}x {to}<extra></extra>",
        ))  # fmt: skip
        kind = "the only round" if side.rounds == 1 else "median"
        data.append(go.Scatter(
            mode="markers", x=[middle], y=[row], name=kind, cliponaxis=False,
            marker={"color": colour, "symbol": "line-ns", "size": 16, "line": {"width": 3, "color": colour}},
            hovertemplate=f"{kind}: <b>%{{x:.3f}}x</b> {to}<extra></extra>",
        ))  # fmt: skip
        rows.append([titled(side, several_batches=True), str(ratio.get("to", "")), spell(middle), spell(min(rounds, default=None)),
                     spell(side.lower_end("ratio")), spell(max(rounds, default=None)), str(len(rounds))])  # fmt: skip
    width = maximum - min(minimum, 1.0)
    low, high = (minimum - 0.04 * width if minimum < 1 else 1.0), maximum + 0.03 * width + 0.01
    names = [f"{titled(side, several)}, against {side.get('ratio').get('to', 'the baseline')}" for side in shown]
    rule = {"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper", "line": {"color": "var(--soft)", "width": 1.2}}
    labels = row_labels(names, bold=[spell(side.number("ratio", "median")) + TIMES for side in shown])
    x_axis = {"range": [low, high], "title_text": "times as many tokens/s", "ticksuffix": TIMES, "nticks": 7}
    drawn = row_drawing(data, labels, ROW, x=x_axis, shapes=[rule | {"layer": "below"}])
    lede = "Both sides took turns on the same work. Every dot is the ratio of one round, the bar ends at their median."
    lede += f" Left of 1{TIMES} is slower." if minimum < 1 else ""
    lede += shown_note(len(shown), len(sides), "largest")
    numbers = Table(["side", "compared with", "median", "least", "p10", "most", "rounds"], rows)
    return Chart("comparison", title, lede, drawn, numbers)


def shapes(results: Results) -> list[Chart]:
    """One heat map for every drafter and batch that was measured in several shapes; sides that are not comparable are kept apart."""
    groups: dict[tuple[str, ...], list[SideRecord]] = {}
    for side in results.sides:
        if side.subject and side.shape and side.speed:
            record = side.record
            about = [str(record.get(key, "")) for key in ("runtime", "dtype", "temperature")]
            group = (str(side.get("variant", "drafts")), f"batch {side.batch}", *about, side.hardware, " · ".join(side.caveats))
            groups.setdefault(group, []).append(side)
    charts: list[Chart] = []
    several = [len({group[part] for group in groups}) > 1 for part in range(7)]
    for group, sides in groups.items():
        shapes_ = [side.shape for side in sides if side.shape]
        if len({(s, n) for s, _, n in shapes_}) > 2:
            by, name = 2, "tokens verified per request (N)"
        elif len({(s, k) for s, k, _ in shapes_}) > 2:
            by, name = 1, "branches per node (K)"
        else:
            continue
        title = "Shapes: " + ", ".join(part for i, part in enumerate(group) if part and (i < 2 or i == len(group) - 1 or several[i]))
        charts.append(_heat_map(f"shapes-{len(charts)}", title, sides, by, name))
    if charts:
        return charts
    return [Chart("shapes", "Shapes", "", missing="fewer than three shapes (S, K, N) of one drafter at one batch")]


def _heat_map(id_: str, title: str, sides: list[SideRecord], by: int, name: str) -> Chart:
    by_ratio = all(side.number("ratio", "median") for side in sides)

    def value(side: SideRecord) -> float:
        return (side.number("ratio", "median") if by_ratio else side.speed) or 0.0

    ranked = sorted(sides, key=value)
    # The best side of a cell is written last.
    cells = {(side.shape[0], side.shape[by]): side for side in ranked if side.shape}
    steps, others = sorted({s for s, _ in cells}), sorted({other for _, other in cells})
    grid = [[cells.get((s, other)) for other in others] for s in steps]
    unit = TIMES if by_ratio else ""
    best = ranked[-1].shape or (0, 0, 0)
    text = [[f"<b>{spell(value(side))}{unit}</b><br>{_other(side, by)}" if side else "" for side in row] for row in grid]
    heat = go.Heatmap(
        x=list(range(len(others))), y=list(range(len(steps))), xgap=3, ygap=3, showscale=False, hoverongaps=False,
        z=[[value(side) if side else None for side in row] for row in grid], colorscale=[[0, "var(--heat-0)"], [1, "var(--heat-1)"]],
        text=text, texttemplate="%{text}", textfont={"size": 12, "color": "var(--ink)"},
        customdata=[[_cell_text(side) if side else "" for side in row] for row in grid], hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip
    x, y = others.index(best[by]), steps.index(best[0])
    frame = {"type": "rect", "x0": x - 0.49, "x1": x + 0.49, "y0": y - 0.48, "y1": y + 0.48}
    drawn = drawing(
        [heat],
        max(200, len(steps) * 62 + 70),
        x={"tickvals": heat.x, "ticktext": [str(other) for other in others], "title_text": name, "showgrid": False},
        y={"tickvals": heat.y, "ticktext": [str(s) for s in steps], "title_text": "draft depth (S)", "showgrid": False},
        shapes=[frame | {"line": {"color": "var(--accent)", "width": 2.5}}],
    )
    to = unique(str(side.get("ratio").get("to")) for side in sides) if by_ratio else []
    lede = (f"Times the tokens/s of {' or '.join(to)}" if by_ratio else "Tokens/s") + f"; the best, {best}, is framed."
    lede += " Where several shapes share a cell, their best is shown." if len(cells) < len(sides) else ""
    rows = [[str(side.shape), spell(side.speed), spell(side.number("ratio", "median")), spell(side.number("acceptance_length")),
             ", ".join(side.marks)] for side in reversed(ranked)]  # fmt: skip
    return Chart(id_, title, lede, drawn, Table(["S, K, N", "tokens/s", "ratio", "acceptance length", "marks"], rows))


def _other(side: SideRecord, by: int) -> str:
    assert side.shape is not None
    return (f"N={side.shape[2]}" if by == 1 else f"K={side.shape[1]}") + f", {ONCE}" * (ONCE in side.marks)


def _cell_text(side: SideRecord) -> str:
    ratio = side.number("ratio", "median")
    parts = [f"{side.shape}", f"{spell(side.speed)} tokens/s", f"{spell(ratio)}{TIMES} {side.get('ratio').get('to')}" if ratio else ""]
    length = side.number("acceptance_length")
    return "<br>".join(plotly_text(part) for part in [*parts, f"acceptance length {spell(length)}" if length else "", *side.marks] if part)


def prediction(results: Results) -> Chart:
    """Predicted against measured time of cycles and stages."""
    title = "Predicted against measured"
    lines = [line for line in results.predictions if line.record["predicted_ms"] > 0 and line.record["measured_ms"] > 0]
    if not lines:
        return Chart("prediction", title, "", missing="no prediction of a cycle that was also measured", wide=False)
    times = [value for line in lines for value in (line.record["predicted_ms"], line.record["measured_ms"])]
    low, high = math.log10(min(times)) - 0.12, math.log10(max(times)) + 0.12
    ends = [10**low, 10**high]
    band = [1.1 * ends[0], 1.1 * ends[1], 0.9 * ends[1], 0.9 * ends[0]]
    data = [
        go.Scatter(x=[*ends, *reversed(ends)], y=band, fill="toself", fillcolor="var(--band)", mode="lines", line={"width": 0},
                   hoverinfo="skip", name="within 10 %"),
        go.Scatter(x=ends, y=ends, mode="lines", line={"color": "var(--soft)", "width": 1}, hoverinfo="skip", name="equal"),
    ]  # fmt: skip
    subjects = {line.place: all(side.subject for side in results.predicted(line)) for line in lines}
    for whole, subject in ((False, False), (False, True), (True, False), (True, True)):
        group = [line for line in lines if ((line.record.get("stage") is None), subjects[line.place]) == (whole, subject)]
        marker: dict[str, Any] = {"color": (SUBJECT_COLOURS if subject else BASELINE_COLOURS)[0], "size": 10 if whole else 8}
        marker |= {"symbol": "circle", "line": OUTLINE} if whole else {"symbol": "circle-open"}
        if group:
            data.append(go.Scatter(
                mode="markers", x=[line.record["measured_ms"] for line in group], y=[line.record["predicted_ms"] for line in group],
                name=("whole cycles" if whole else "stages") + ("" if subject else " of plain decoding"), marker=marker,
                customdata=[plotly_text(_predicted_name(line, results)) for line in group],
                hovertemplate="%{customdata}<br>predicted %{y:.3g} ms, measured %{x:.3g} ms<extra></extra>",
            ))  # fmt: skip
    axis = log_axis(low, high)
    drawn = drawing(data, 400, x={**axis, "title_text": "measured, ms"}, y={**axis, "title_text": "predicted, ms"})
    cycles = [line for line in lines if line.record.get("stage") is None]
    lede = "On the line the prediction is right; the band is ±10 %. Filled: whole cycles, open: single stages."
    lede += " Grey: plain decoding." if not all(subjects.values()) else ""
    if cycles:
        lede += f" Median error of {plural(len(cycles), 'cycle')}: {100 * median(abs(_error(line)) for line in cycles):.0f} %."
    rows = [[_predicted_name(line, results), str(line.get("shape", DASH)), spell(line.record["predicted_ms"]),
             spell(line.record["measured_ms"]), f"{100 * _error(line):+.0f} %"] for line in lines]  # fmt: skip
    numbers = Table(["what", "S, K, N", "predicted, ms", "measured, ms", "error"], rows)
    return Chart("prediction", title, lede, drawn, numbers, wide=False)


def _error(line: Line) -> float:
    return float(line.record["predicted_ms"] / line.record["measured_ms"] - 1)


def _predicted_name(line: Line, results: Results) -> str:
    marks = unique(mark for side in results.predicted(line) for mark in side.marks)
    parts = [*marks, line.get("case", ""), f"batch {line.get('batch')}" if line.get("batch") else "", line.get("stage") or "whole cycle"]
    return ", ".join(str(part) for part in parts if part)

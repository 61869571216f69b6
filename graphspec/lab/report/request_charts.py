"""Charts of requests: one of them on a time axis, throughput against time per token, and acceptance within texts and by prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import plotly.graph_objects as go

from ..measure.results import BY_REQUEST, FIRST_REQUEST, Results, SideRecord, model, unique
from .charts import (
    MAX_LINES,
    OUTLINE,
    ROW,
    Chart,
    Palette,
    burst_colours,
    drafting_sides,
    drawing,
    end_labels,
    label_margin,
    log_axis,
    marked,
    named,
    plotly_text,
    points,
    row_drawing,
    row_labels,
    shown_note,
    span,
    spell_line,
    titled,
)
from .tables import Table, plural, spell

HEIGHT = 330


def pareto(results: Results, palette: Palette) -> Chart:
    """All requests' tokens/s against a token's time in one request, with the sides that no other one beats in both."""
    title = "Throughput against time per token"
    sides = [side for side in results.sides if side.speed and _token_time(side)]
    if not sides:
        return Chart("pareto", title, "", missing="no side with tokens_per_second and tpot_ms", wide=False)
    best = front([side for side in sides if not side.caveats])
    on_front = {id(side) for side in best}
    ranked = sorted(sides, key=lambda side: (id(side) not in on_front, not side.subject, -(side.speed or 0)))
    # Next to lines, a side with one batch is a dot without a name.
    lines = [label for label in unique(side.label for side in ranked) if len({side.batch for side in sides if side.label == label}) > 1]
    labels = (lines or unique(side.label for side in ranked))[:MAX_LINES]
    shown = [side for side in sides if side.label in labels]
    dots = [side for side in sides if side not in shown and not side.marks]
    drawn_sides = [*shown, *dots]
    (left, right, log_x), (low, high, log_y) = span([*map(_token_time, drawn_sides)]), span([side.speed or 0.0 for side in drawn_sides])
    data = [_front(best)] * (len(best) > 1)
    hover = "%{customdata}<br><b>%{y:,.0f}</b> tokens/s, <b>%{x:.3g} ms</b> per token"
    if dots:
        data.append(go.Scatter(
            mode="markers", x=[*map(_token_time, dots)], y=[side.speed for side in dots], name="other sides", showlegend=False,
            marker={"color": "var(--edge)", "size": 6}, customdata=[plotly_text(titled(side, several_batches=True)) for side in dots],
            hovertemplate=hover + "<extra></extra>",
        ))  # fmt: skip
    ends = []
    for label in labels:
        line = sorted((side for side in shown if side.label == label), key=lambda side: side.batch)
        style = palette[line[0]]
        x, y = [_token_time(side) for side in line], [side.speed or 0.0 for side in line]
        name, legend, names = spell_line(label, line)
        data.append(points(style, x, y, legend, hover, 2.6 if line[0].subject else 1.8, customdata=names))
        ends.append((math.log10(x[-1]) if log_x else x[-1], math.log10(y[-1]) if log_y else y[-1], name, style.colour))
    x_axis = {"range": [left, right], "title_text": "ms per output token, p50"} | (log_axis(left, right) if log_x else {"nticks": 6})
    y_axis = {"range": [low, high], "title_text": "tokens/s"} | (log_axis(low, high) if log_y else {"tickformat": ",.0f"})
    names, margin = end_labels(ends, HEIGHT - 58, low, high), {"r": label_margin([text for _, _, text, _ in ends])}
    drawn = drawing(data, HEIGHT, x=x_axis, y=y_axis, annotations=names, margin=margin)
    lede = "All requests together against one request's wait: up and to the left is better."
    lede += " A line joins the batches of a side." if lines else ""
    lede += " On the dotted line, no other side is better in both." if len(best) > 1 else ""
    all_ = len({side.label for side in sides})
    lede += f" Named are {len(labels)} of {all_} sides." if len(labels) < all_ else ""
    rows = [
        [marked(side), str(side.batch), spell(side.speed), spell(_token_time(side)), "yes" if id(side) in on_front else "no"]
        for side in sides
    ]
    return Chart("pareto", title, lede, drawn, Table(["side", "batch", "tokens/s", "TPOT p50, ms", "unbeaten"], rows), wide=False)


def _token_time(side: SideRecord) -> float:
    return side.number("tpot_ms", "p50") or 0.0


def _front(best: Sequence[SideRecord]) -> go.Scatter:
    return go.Scatter(
        mode="lines", x=[*map(_token_time, best)], y=[side.speed for side in best], name="front", hoverinfo="skip", showlegend=False,
        line={"color": "var(--soft)", "width": 1.2, "dash": "2px,4px", "shape": "hv"},
    )  # fmt: skip


def front(sides: Sequence[SideRecord]) -> list[SideRecord]:
    """The sides that no other one matches in time per token and beats in speed, or the reverse, by rising time."""
    found: list[SideRecord] = []
    for side in sorted(sides, key=lambda side: (_token_time(side), -(side.speed or 0.0))):
        if not found or (side.speed or 0.0) > (found[-1].speed or 0.0):
            found.append(side)
    return found


def arrivals(results: Results, lead: SideRecord | None) -> Chart:
    """When the tokens of one request arrived, for ``lead`` and what it is compared with, on one time axis."""
    title = "One request, side by side"
    shown = [] if lead is None else _alongside(results, lead)
    if not shown:
        return Chart("arrivals", title, "", missing=f"no speculating side with {FIRST_REQUEST}")
    runs = [[(float(moment), int(tokens)) for moment, tokens in side.record[FIRST_REQUEST]] for side in shown]
    # With 0, which none has, a single token gets a colour that stands out from the ground.
    sizes = sorted({0, *(tokens for run in runs for _, tokens in run[1:])})
    data, rows = [], []
    for index, (side, run) in enumerate(zip(shown, runs, strict=True)):
        row = len(shown) - 1 - index
        starts = [0.0, *(moment for moment, _ in run[:-1])]
        spans = [moment - start for (moment, _), start in zip(run, starts, strict=True)]
        parts = [(slice(0, 1), "first token"), (slice(1, None), side.label)]
        for part, name in parts:
            counts = [tokens for _, tokens in run[part]]
            first = part.start == 0
            colours = ["var(--s1)"] if first else [burst_colours(count, sizes, subject=side.subject)[0] for count in counts]
            ink = ["var(--bar-ink)"] if first else [burst_colours(count, sizes, subject=side.subject)[1] for count in counts]
            text = ["" if first or count == 1 else str(count) for count in counts]
            after = [[moment, plural(count, "token")] for moment, count in run[part]]
            data.append(go.Bar(
                orientation="h", base=starts[part], x=spans[part], y=[row] * len(counts), width=0.38, name=plotly_text(name), text=text,
                textposition="inside", insidetextanchor="middle", textangle=0, textfont={"color": ink, "size": 11}, customdata=after,
                marker={"color": colours, "line": {**OUTLINE, "width": 0.8}}, cliponaxis=False,
                hovertemplate="after %{customdata[0]:.4g} ms: <b>%{customdata[1]}</b><extra></extra>",
            ))  # fmt: skip
        rows.append([titled(side, several_batches=True), spell(run[0][0]), spell(run[-1][0]), str(sum(t for _, t in run)), str(len(run))])
    names = [
        f"{titled(side, several_batches=False)}: {sum(t for _, t in run)} tokens in {spell(run[-1][0])} ms"
        for side, run in zip(shown, runs, strict=True)
    ]
    longest = max(run[-1][0] for run in runs)
    x_axis = {"range": [0, longest * 1.01], "title_text": "ms since the request was sent", "nticks": 7}
    drawn = row_drawing(data, row_labels(names), ROW + 4, x=x_axis, barmode="overlay", uniformtext={"minsize": 9, "mode": "hide"})
    lede = (
        f"The first prompt at batch {shown[0].batch}, in the round of median speed. A bar ends when its tokens arrive; its shade and number"
    )
    lede += " say how many. The first bar is the time to the first token."
    return Chart("arrivals", title, lede, drawn, Table(["side", "first token, ms", "last, ms", "tokens", "deliveries"], rows))


def _alongside(results: Results, lead: SideRecord) -> list[SideRecord]:
    """``lead``, then plain decoding and the side its ratio is to, measured on the same work; empty where ``lead`` has no times."""
    if not lead.get(FIRST_REQUEST):
        return []
    keys = ("batch", "requests", "input_tokens", "output_tokens", "temperature", "ignore_eos")
    place = (lead.hardware, model(lead.provenance))
    others = [
        side for side in results.sides
        if side is not lead and side.get(FIRST_REQUEST) and all(side.record.get(key) == lead.record.get(key) for key in keys)
        and (side.hardware, model(side.provenance)) == place
    ]  # fmt: skip
    to = lead.get("ratio", {}).get("to")
    return [lead, *(side for side in others if side.record["role"] == "none" or side.record["side"] == to)]


def along_text(results: Results, palette: Palette) -> Chart:
    """Tokens per cycle by the number of tokens generated before it."""
    title, key = "Acceptance along the text", "acceptance_along_text"
    shown, known = drafting_sides(results, palette, key)
    if not shown:
        return Chart("along-text", title, "", missing=f"no side with {key}", wide=False)
    data, ends, rows = [], [], []
    longest = max(len(side.record[key]) * int(side.number("stretch_tokens") or 1) for side in shown)
    high = 1.08 * max(value for side in shown for value in side.record[key] if value is not None)
    for side in shown:
        style, lengths, stretch = palette[side], side.record[key], int(side.number("stretch_tokens") or 1)
        middles = [(index + 0.5) * stretch for index in range(len(lengths))]
        ranges = [f"{index * stretch + 1} to {(index + 1) * stretch}" for index in range(len(lengths))]
        hover = f"{plotly_text(marked(side))}<br>token %{{customdata}}: <b>%{{y:.2f}}</b> tokens per cycle"
        data.append(points(style, middles, lengths, named(side), hover, customdata=ranges))
        last = max(index for index, value in enumerate(lengths) if value is not None)
        ends.append((middles[last], float(lengths[last]), marked(side), style.colour))
        rows += [[marked(side), part, spell(value)] for part, value in zip(ranges, lengths, strict=True)]
    drawn = drawing(
        data,
        HEIGHT,
        x={"title_text": "token of the output", "showgrid": False, "range": [0, longest], "nticks": 6},
        y={"range": [0, high], "title_text": "tokens per cycle", "nticks": 6},
        annotations=end_labels(ends, HEIGHT - 58, 0, high),
        margin={"r": label_margin([text for _, _, text, _ in ends])},
    )
    lede = "Mean over all prompts and rounds of the cycles that began in a stretch of the output." + shown_note(len(shown), known)
    return Chart("along-text", title, lede, drawn, Table(["side", "tokens", "tokens per cycle"], rows), wide=False)


def by_prompt(results: Results, palette: Palette) -> Chart:
    """Tokens per cycle of every prompt, one row per side."""
    title = "Acceptance by prompt"
    shown, known = drafting_sides(results, palette, BY_REQUEST)
    if not shown:
        return Chart("by-prompt", title, "", missing=f"no side with {BY_REQUEST}", wide=False)
    data, rows = [], []
    for index, side in enumerate(shown):
        row, colour, found = len(shown) - 1 - index, palette[side].colour, side.record[BY_REQUEST]
        name, lengths = plotly_text(marked(side)), [float(value) for value in found.values()]
        data.append(go.Scatter(
            mode="markers", x=lengths, y=[row] * len(lengths), name=name, marker={"color": colour, "size": 8, "opacity": 0.55},
            customdata=[int(number) + 1 for number in found], cliponaxis=False,
            hovertemplate=f"{name}<br>prompt %{{customdata}}: <b>%{{x:.2f}}</b> tokens per cycle<extra></extra>",
        ))  # fmt: skip
        middle = side.number("acceptance_length") or fmean(lengths)
        data.append(go.Scatter(
            mode="markers", x=[middle], y=[row], name="all prompts", cliponaxis=False,
            marker={"color": colour, "symbol": "line-ns", "size": 16, "line": {"width": 3, "color": colour}},
            hovertemplate="all prompts: <b>%{x:.2f}</b> tokens per cycle<extra></extra>",
        ))  # fmt: skip
        ranked = sorted((value, int(number) + 1) for number, value in found.items())
        rows.append([marked(side), spell(middle), *(f"{spell(value)} (prompt {number})" for value, number in (ranked[0], ranked[-1]))])
    low, high = min(min(trace.x) for trace in data), max(max(trace.x) for trace in data)
    x_axis = {"range": [low - 0.12 * (high - low) - 0.05, high + 0.05 * (high - low) + 0.05], "title_text": "tokens per cycle", "nticks": 6}
    drawn = row_drawing(data, row_labels([titled(side, several_batches=False) for side in shown]), ROW, x=x_axis)
    lede = "Every dot is a prompt, over all rounds; the bar is all of them together." + shown_note(len(shown), known)
    return Chart("by-prompt", title, lede, drawn, Table(["side", "all prompts", "lowest", "highest"], rows), wide=False)

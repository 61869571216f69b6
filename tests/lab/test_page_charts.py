"""graphspec report: its charts, their colours, and the mark of figures from a single round."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphspec.lab.measure import results
from graphspec.lab.report import charts, cycle_charts, request_charts, speed_charts
from graphspec.lab.report import tables as spelling
from tests.support.report_page import WEB, charts_of, render
from tests.support.report_records import provenance, ratio, read, side

CSS = (WEB / "style.css").read_text(encoding="utf-8")


# Charts


def test_every_chart_is_one_plotly_knows(whole):
    found = charts_of(whole[1])
    expected = {
        "throughput",
        "comparison",
        "arrivals",
        "pareto",
        "acceptance-unconditional",
        "acceptance-conditional",
        "along-text",
        "by-prompt",
        "stages",
        "gaps",
        "bursts",
        "shapes-0",
        "prediction",
    }
    assert set(found) == expected
    for chart in found.values():
        go.Figure(data=chart["data"], layout=chart["layout"])


def test_a_key_that_plotly_does_not_know_is_an_error_when_the_chart_is_made():
    made = charts.drawing([go.Scatter(x=[1])], 300, x={"title_text": "x"}, y={})
    assert (made.layout.xaxis.title.text, made.layout.xaxis.title.font.color) == ("x", "var(--soft)")
    with pytest.raises(ValueError, match="titel"):
        charts.drawing([], 300, x={"titel_text": "x"}, y={})
    with pytest.raises(ValueError, match="color"):
        charts.drawing([], 300, x={"gridcolor": "--grid"}, y={})


def test_a_chart_without_data_is_left_out_and_listed(tmp_path):
    bare = {key: value for key, value in side("x", "subject", 1, 100.0).items() if key in results.IDENTITY} | {"kind": "side"}
    bare["tokens_per_second"] = {"median": 100.0}
    _, document = render(tmp_path, [bare])
    assert set(charts_of(document)) == {"throughput"}
    text = "".join(document.words)
    for sentence in (
        "Against the baselines: no side", "One request, side by side: no speculating side",
        "Throughput against time per token: no side",
        "Acceptance along the text: no side", "Acceptance by prompt: no side",
        "Accepted up to position k: no side", "Where a cycle's time goes: no side", "Gaps between tokens: no side",
        "Tokens that arrive together: no side", "Shapes: fewer than three", "Predicted against measured: no prediction",
        "A generation, cycle by cycle: no recorded", "Latency percentiles: no side", "Memory and build: no side",
    ):  # fmt: skip
        assert sentence in text
    assert not any(attributes.get("id") == "viewer" for _, attributes in document.elements)


def test_nothing_is_left_out_of_a_whole_file(whole):
    assert not any(attributes.get("id") == "left-out" for _, attributes in whole[1].elements)


def test_the_floor_line_is_acceptance_times_batch_over_floor(tmp_path):
    lines = [side("x", "subject", batch, 100.0 * batch, [2, 1, 3], floor_ms=2.5, acceptance_length=3.0) for batch in (1, 4)]
    chart = speed_charts.throughput(
        read(tmp_path, [provenance(), *lines]), charts.Palette(found := read(tmp_path, [provenance(), *lines]).sides)
    )
    assert chart.figure is not None
    [floor] = [trace for trace in chart.figure.data if trace.name.endswith("floor")]
    assert floor.x == (1, 4)
    assert floor.y == pytest.approx((1200.0, 4800.0))
    assert len(found) == 2


def test_a_floor_that_was_beaten_is_left_out_and_said_so(tmp_path):
    """Of older files too, which have a percentage above 100."""
    fast = side("fast", "subject", 1, 800.0, [2, 1, 3])
    cycle = fast["cycle_ms"]["median"]
    fast |= {"floor_ms": 6.25 * cycle, "percent_of_floor": 625.0}
    fast["stages"][0] |= {"floor_ms": 3 * fast["stages"][0]["ms"], "percent_of_floor": 300.0}
    lines = [provenance(), fast, side("none", "none", 1, 500.0)]
    _, document = render(tmp_path, lines)
    text = "".join(document.words)
    assert "625" not in text and "300 %" not in text and text.count("The floor of 1 of 2 sides is left out: cycles were faster") == 2
    found = read(tmp_path, lines)
    for chart in (speed_charts.throughput(found, charts.Palette(found.sides)), cycle_charts.stages(found, charts.Palette(found.sides))):
        [floor] = [trace for trace in chart.figure.data if trace.name == "floor"]
        assert len([value for value in floor.x if value is not None]) == 1, "that of the other side"
    assert [one.beats_floor for one in found.sides] == [True, False] and found.sides[0].percent_of_floor is None
    assert found.sides[1].percent_of_floor == 62.0 and "62 % of floor" in json.dumps(charts_of(document)["stages"])


def test_one_batch_is_drawn_as_bars_with_the_floor(tmp_path):
    found = read(
        tmp_path, [provenance(), side("x", "subject", 1, 800.0, [2, 1, 3]), side("none", "none", 1, 500.0), side("hf", "hf", 1, 300.0)]
    )
    chart = speed_charts.throughput(found, charts.Palette(found.sides))
    assert chart.figure is not None
    bars, floor = chart.figure.data
    assert list(bars.x) == [one.speed for one in found.sides]
    assert [value is None for value in floor.x] == [False, False, True]


def test_the_heat_map_frames_the_best_shape(tmp_path):
    lines = [side(f"t{s}{n}", "subject", 1, 100.0 * s + n, [s, 4, n], ratio=ratio("none", s + n / 100)) for s in (2, 3) for n in (4, 8)]
    [chart] = speed_charts.shapes(read(tmp_path, [provenance(), *lines]))
    assert chart.figure is not None
    [heat] = chart.figure.data
    assert [list(row) for row in heat.z] == [[2.04, 2.08], [3.04, 3.08]]
    [frame] = chart.figure.layout.shapes
    assert ((frame.x0 + frame.x1) / 2, (frame.y0 + frame.y1) / 2) == (1, 1)
    reported = side("reported", "subject", 1, 9999.0, [3, 4, 8], synthetic=True, equal=None)
    [chart] = speed_charts.shapes(read(tmp_path, [provenance(), *lines, reported]))
    assert chart.figure is not None
    assert chart.figure.data[0].z == heat.z
    by_branches = [side(f"k{s}{k}", "subject", 1, 100.0, [s, k, 16]) for s in (2, 3) for k in (1, 4)]
    [chart] = speed_charts.shapes(read(tmp_path, [provenance(), *by_branches]))
    assert chart.figure is not None
    assert chart.figure.layout.xaxis.ticktext == ("1", "4")


def test_subjects_are_drawn_in_accents_and_baselines_in_greys(tmp_path):
    """In every chart: the colour of a trace, of a single bar or, where colours distinguish stages, of the row's name."""
    plain = {"kind": "prediction", "case": "p", "batch": 1, "shape": [0, 1, 1], "predicted_ms": 1.0, "measured_ms": 2.0}
    sides = [side("ours", "subject", batch, 9.0, [2, 1, 3], case="p", ratio=ratio("none", 1.5)) for batch in (1, 4)]
    sides += [side("none", "none", batch, 5.0, case="p", ratio=ratio("hf", 2.0)) for batch in (1, 4)]
    sides.append(side("hf", "hf", 1, 2.5, acceptance_unconditional=[0.5], acceptance_conditional=[0.5],
                      acceptance_along_text=[1.5], acceptance_by_request={"0": 1.5}))  # fmt: skip
    document = render(tmp_path, [provenance(), *sides, plain, {**plain, "shape": [2, 1, 3]}])[1]
    greys = {f"var(--{letter}{index})" for letter in "gn" for index in range(1, 7)}
    accents = {*charts.SUBJECT_COLOURS, *charts.BURST_COLOURS}
    drawn = charts_of(document)
    for name, chart in drawn.items():
        labels = chart["layout"].get("annotations", [])
        if name == "stages":
            reported = [(label["text"], label["font"]["color"]) for label in labels]
        elif name == "bursts":
            reported = [(label["text"], trace["marker"]["color"][row]) for trace in chart["data"] for row, label in enumerate(labels)]
        elif name == "arrivals":
            reported = [(trace["name"], colour) for trace in chart["data"] for colour in trace["marker"]["color"]]
        else:
            reported = [(trace.get("name", ""), (trace.get("line", {}) | trace.get("marker", {})).get("color")) for trace in chart["data"]]
        if name == "prediction":
            reported = [
                ("none" if "plain" in trace else "ours", colour) for trace, colour in reported if trace.startswith(("whole", "stages"))
            ]
        roles = [(next((who for who in ("ours", "none", "hf") if who in text), None), colour) for text, colour in reported]
        assert {"ours"} < {who for who, _ in roles if who}, name
        wrong = [(who, colour) for who, colour in roles if who and colour not in (accents if who == "ours" else greys)]
        assert not wrong, name


def test_plain_and_speculative_share_one_time_axis(tmp_path):
    """Bars end when tokens arrived; other work, other machines and other sides are not next to it."""
    ours = side("ours", "subject", 1, 9.0, [2, 1, 3], ratio=ratio("none", 1.5), first_request=[[5.0, 1], [9.0, 3], [12.5, 1], [16.0, 2]])
    plain = side("none", "none", 1, 5.0, first_request=[[4.0, 1], [7.0, 1], [10.0, 1]])
    others = [side("none", "none", 4, 5.0), side("none", "none", 1, 5.0, output_tokens=7), side("hf", "hf", 1, 5.0)]
    found = read(tmp_path, [provenance(), ours, *others, plain, provenance(cpu="Another"), side("none", "none", 1, 5.0)])
    chart = request_charts.arrivals(found, found.sides[0])
    first, bars, plain_first, plain_bars = chart.figure.data
    assert (first.base, first.x, bars.base, bars.x) == ((0.0,), (5.0,), (5.0, 9.0, 12.5), (4.0, 3.5, 3.5))
    assert (plain_first.x, plain_bars.base, plain_bars.x) == ((4.0,), (4.0, 7.0), (3.0, 3.0))
    assert bars.text == ("3", "", "2") and set(bars.y) == {1} and set(plain_bars.y) == {0}
    assert bars.marker.color[0] != bars.marker.color[1] and chart.figure.layout.xaxis.range == pytest.approx((0, 16.16))
    labels = [label.text for label in chart.figure.layout.annotations]
    assert [label.partition(", ")[0].partition(":")[0] for label in labels] == ["ours", "none"]
    assert [label.partition(": ")[2] for label in labels] == ["7 tokens in 16.0 ms", "3 tokens in 10.0 ms"]
    assert request_charts.arrivals(found, None).figure is None
    del found.sides[0].record["first_request"]
    assert request_charts.arrivals(found, found.sides[0]).figure is None


def test_the_front_holds_what_no_other_side_beats_in_both(tmp_path):
    """In speed and in time per token; a side that can't be compared is never on it."""
    known = [("slow", 10.0, 1.0), ("beaten", 9.0, 1.5), ("middle", 30.0, 2.0), ("equal", 30.0, 3.0), ("fast", 50.0, 4.0)]
    lines = [
        side(name, "subject", 1, speed, [2, 1, 3], tpot_ms={"p50": time}, tokens_per_second={"median": speed})
        for name, speed, time in known
    ]
    lines.append(side("forced", "subject", 1, 99.0, [2, 1, 3], tpot_ms={"p50": 0.5}, synthetic=True, equal=None))
    found = read(tmp_path, [provenance(), *lines])
    assert [one.label for one in request_charts.front(found.sides[:5])] == ["slow", "middle", "fast"]
    chart = request_charts.pareto(found, charts.Palette(found.sides))
    front, *points = chart.figure.data
    assert (front.x, front.line.shape) == ((1.0, 2.0, 4.0), "hv")
    assert front.y == (10.0, 30.0, 50.0)
    assert {trace.name.partition("<br>")[0]: trace.x for trace in points} == {name: (time,) for name, _, time in known} | {"forced": (0.5,)}
    assert {row[0].partition(" ·")[0]: row[-1] for row in chart.numbers.rows if row[-1] == "yes"}.keys() == {"slow", "middle", "fast"}


def test_next_to_lines_a_single_batch_is_a_dot_without_a_name(tmp_path):
    lines = [side("long", "subject", batch, 9.0 * batch, [2, 1, 3]) for batch in (4, 1)] + [side("short", "subject", 1, 5.0, [3, 1, 4])]
    lines.append(side("forced", "subject", 1, 6.0, [3, 1, 4], synthetic=True, equal=None))
    found = read(tmp_path, [provenance(), *lines])
    chart = request_charts.pareto(found, charts.Palette(found.sides))
    assert [label.text for label in chart.figure.layout.annotations] == ["long"]
    dots, line = chart.figure.data[-2:]
    assert dots.customdata == ("short · batch 1",) and line.name == "long" and line.customdata == ("long · batch 1", "long · batch 4")
    assert "Named are 1 of 3 sides." in chart.lede and len(chart.numbers.rows) == 4


def test_acceptance_is_drawn_along_the_text_and_by_prompt(tmp_path):
    ours = side("ours", "subject", 1, 9.0, [2, 1, 3], acceptance_length=2.5, acceptance_along_text=[3.0, None, 2.0], stretch_tokens=10,
                acceptance_by_request={"0": 2.0, "3": 3.0})  # fmt: skip
    found = read(tmp_path, [provenance(), ours, side("none", "none", 1, 5.0), side("ours", "subject", 8, 9.0, [2, 1, 3])])
    along, prompts = (draw(found, charts.Palette(found.sides)) for draw in (request_charts.along_text, request_charts.by_prompt))
    [line] = along.figure.data
    assert (line.x, line.y, line.customdata) == ((5.0, 15.0, 25.0), (3.0, None, 2.0), ("1 to 10", "11 to 20", "21 to 30"))
    assert along.figure.layout.annotations[0].x == 25.0 and along.figure.layout.xaxis.range == (0, 30)
    dots, together = prompts.figure.data
    assert (dots.x, dots.customdata, together.x) == ((2.0, 3.0), (1, 4), (2.5,))
    assert prompts.numbers.rows == [["ours", "2.50", "2.00 (prompt 1)", "3.00 (prompt 4)"]]


def test_the_distribution_of_gaps_counts_every_sample():
    counts = cycle_charts._counts([1.0, 1.5, 2.0, 3.9, 4.0], [1.0, 2.0, 3.0, 4.0])
    assert counts == [2, 1, 2]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "\u2013"), (float("nan"), "\u2013"), (0, "0.00"), (12345.6, "12,346"), (885.4, "885"), (52.81, "52.8"), (1.675, "1.68"),
     (0.0421, "0.0421"), (-3.14159, "-3.14"), (0.00001, "1.0e-05")],
)  # fmt: skip
def test_numbers_are_spelled_with_three_digits(value, text):
    assert spelling.spell(value) == text


@given(st.lists(st.floats(0, 100, allow_subnormal=False), min_size=1, max_size=8))
def test_labels_after_lines_never_overlap(values):
    labels = charts.end_labels([(0.0, value, str(value), "var(--ink)") for value in values], 300, 0, 100)
    middles = sorted(label.y * 3 + label.yshift for label in labels)
    assert all(upper - lower > charts.LABEL_GAP - 0.2 for lower, upper in pairwise(middles))


# Rounds


def rated(label: str, rounds: list[float], **more: Any) -> dict[str, Any]:
    """A subject with one ratio a round, and a speed that is the median ratio."""
    middle = sorted(rounds)[len(rounds) // 2]
    speeds = {"median": middle, "p10": min(rounds), "p90": max(rounds), "rounds": rounds}
    reported = {"ratio": {"to": "none", "median": middle, "rounds": rounds}, "rounds": len(rounds), "tokens_per_second": speeds}
    return side(label, "subject", 1, 1.0, [2, 1, 3], **reported, **more)


STEADY = [1.5, 1.51, 1.52, 1.53, 1.54]


@pytest.mark.parametrize("other", [[1.0, 1.1, 1.8, 1.9, 2.0], [3.0]], ids=["wide", "one round"])
def test_the_headline_goes_by_the_lower_end_of_the_rounds(tmp_path, other):
    text = "".join(render(tmp_path, [provenance(), rated("other", other), rated("steady", STEADY), side("none", "none", 1, 1.0)])[1].words)
    assert "Largest gain measured: steady, batch 1" in text
    assert f"1.50{spelling.TIMES}the tokens/s of none, p10 of 5 rounds; median 1.52{spelling.TIMES}" in text
    assert "tokens/s at batch 1, median of 5 rounds" in text


def test_a_single_round_is_marked_wherever_its_figures_stand(tmp_path):
    """In the headline, in every row of a table and in every chart; the same side measured in five rounds has no such mark."""
    for rounds, marked in (([3.0], True), (STEADY, False)):
        found = [side(f"other {n}", "subject", 1, 2.0, [n, 1, n + 1], ratio=ratio("none", 2.0)) for n in (3, 4)]
        found[1:1] = [rated("lonely", rounds, case="c"), side("none", "none", 1, 1.0, case="c")]
        predicted = {"kind": "prediction", "case": "c", "batch": 1, "shape": [2, 1, 3], "predicted_ms": 1.0, "measured_ms": 2.0}
        text, document = render(tmp_path, [provenance(), predicted, *found])
        charts = charts_of(document)
        assert {"throughput", "comparison", "stages", "gaps", "bursts", "shapes-0", "prediction", "acceptance-conditional"} <= set(charts)
        for name, chart in charts.items():
            labels = [a["text"] for a in chart["layout"].get("annotations", []) if "lonely" in a["text"]]
            if name == "shapes-0":
                [labels] = [[cell for row in chart["data"][0]["text"] for cell in row if cell.startswith(("<b>3.00", "<b>1.52"))]]
            if name == "prediction":
                labels = chart["data"][-1]["customdata"]
            if name == "arrivals":
                assert not labels, "of the headline's side, which a single round never is next to others"
                continue
            assert labels, name
            assert all(("n=1" in label) is marked for label in labels), name
        rows = re.findall(r'<tr><th scope="row">[^/]*lonely.*?</tr>', text, re.DOTALL)
        assert len(rows) > 8
        assert all(("n=1" in row) is marked for row in rows)
        reported = "".join(document.words)
        assert ("Nothing says how far the figures marked n=1 vary, those of: lonely." in reported) is marked
        assert ("tokens/s at batch 1, one round" in reported) is False
    text, document = render(tmp_path, [provenance(), rated("lonely", [3.0]), side("none", "none", 1, 1.0)])
    names = [label["text"] for label in charts_of(document)["arrivals"]["layout"]["annotations"]]
    assert [name.partition(":")[0] for name in names] == ["n=1 · lonely", "none"]
    tiles = next(part for part in text.split("\n") if 'class="tiles"' in part)
    assert 'title="measured in one round' in tiles
    assert "the tokens/s of none, one round" in tiles
    assert "tokens/s at batch 1, one round" in tiles


# Colours


def scheme(*, dark: bool) -> dict[str, str]:
    light_text, dark_text = CSS.split("@media (prefers-color-scheme: dark)")[:2]
    found = dict(re.findall(r"(--[\w-]+): ([^;]+);", light_text))
    return {**found, **dict(re.findall(r"(--[\w-]+): ([^;]+);", dark_text.split("* { box-sizing")[0]))} if dark else found


def variable(colour: str) -> str:
    return colour.removeprefix("var(").removesuffix(")")


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


TEXT_ON = [("--ink", "--bg"), ("--ink", "--surface"), ("--soft", "--bg"), ("--soft", "--surface"), ("--accent", "--bg"),
           ("--accent", "--surface"), ("--accent-ink", "--accent"), ("--warn", "--warn-soft"), ("--ink", "--warn-soft"),
           ("--ink", "--accent-soft"), ("--accent", "--accent-soft"), ("--ink", "--heat-0"),
           ("--ink", "--heat-1")]  # fmt: skip
TEXT_ON += [("--bar-ink", variable(colour)) for colour in cycle_charts.STAGE_COLOURS]
TEXT_ON += [(variable(colour), "--surface") for colour in (*charts.SUBJECT_COLOURS, *charts.BASELINE_COLOURS)]
for scale in (charts.BURST_COLOURS, charts.BASELINE_BURST_COLOURS):
    TEXT_ON += [("--ink" if level < 3 else "--burst-ink", variable(colour)) for level, colour in enumerate(scale)]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(dark):
    colours = scheme(dark=dark)
    low = {}
    for text, ground in TEXT_ON:
        lighter, darker = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
        if (contrast := (lighter + 0.05) / (darker + 0.05)) < 4.5:
            low[text, ground] = round(contrast, 2)
    assert not low


def test_every_colour_of_a_chart_has_a_value_in_both_schemes(whole):
    used = set(re.findall(r'"var\((--[\w-]+)\)"', whole[1].scripts["charts-data"]))
    assert {"--accent", "--soft", "--grid"} <= used
    assert used <= set(scheme(dark=False))
    dark_only = set(re.findall(r"(--[\w-]+): ", CSS.split("@media (prefers-color-scheme: dark)")[1].split("* { box-sizing")[0]))
    assert used <= dark_only

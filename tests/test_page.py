"""graphspec report: what it reads, what it never shows, and a page that is complete in itself."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphspec import cli
from graphspec.errors import ConfigError
from graphspec.lab import anatomy, canvas, figures, page, results
from tests._report_records import HOSTILE, PROMPT, generation, provenance, ratio, read, records, side, write

CSS = (Path(page.__file__).parent / "web" / "style.css").read_text(encoding="utf-8")
STUB = "window.Plotly = { react() {} };"
NO_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "numpy", "plotly", "transformers"}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
import graphspec.lab.page
"""


class Document(HTMLParser):
    """Elements with their attributes, texts of scripts, and the text a reader sees."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.words: list[str] = []
        self._inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = dict(attrs).get("id") or f"{tag}{len(self.elements)}"

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is None:
            self.words.append(data)
        else:
            self.scripts[self._inside] = self.scripts.get(self._inside, "") + data


def render(tmp_path: Path, lines: list[dict[str, Any]]) -> tuple[str, Document]:
    text = page.page(read(tmp_path, lines), STUB)
    return text, Document(text)


def charts_of(document: Document) -> dict[str, dict[str, Any]]:
    return {chart["id"]: chart for chart in json.loads(document.scripts["charts-data"])}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Document]:
    return render(tmp_path_factory.mktemp("whole"), records())


def test_the_report_imports_neither_torch_nor_numpy():
    done = subprocess.run([sys.executable, "-c", NO_TORCH], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# What must not be shown, and what must


def spoken(speed: float) -> set[str]:
    return {f"{speed:.0f}", f"{speed:.1f}", f"{speed / 2:.0f}"}


@pytest.mark.parametrize("equal", [True, False])
def test_a_side_that_is_not_equal_shows_no_figure_anywhere(tmp_path, equal):
    wrong = side("wrong", "subject", 2, 7531.0, [2, 1, 3], equal=equal, equality="1 of 8 differs", case="c", ratio=ratio("none", 6.173))
    wrong["tokens_per_second"] = {"median": 7531.0, "p10": 7531.0, "p90": 7531.0, "rounds": [7531.0]}
    wrong["ttft_ms"] = {"mean": 8642.0, "p50": 8642.0, "p90": 8642.0, "p99": 8642.0}
    plain = side("plain", "none", 2, 500.0, case="c", ratio=ratio("wrong", 5.4321))
    predicted = {"kind": "prediction", "case": "c", "batch": 2, "shape": [2, 1, 3], "predicted_ms": 1.0, "measured_ms": 9.753}
    text, document = render(tmp_path, [provenance(), wrong, plain, predicted])
    tell_tales = ["7531", "7,531", "8642", "8,642", "6.17", "5.43", "9.75"]
    shown = [word for word in tell_tales if word in "".join(document.words) + document.scripts["charts-data"]]
    assert bool(shown) is equal
    if not equal:
        assert not [word for word in tell_tales if word in text]
        assert "1 of 8 differs" in text
        assert '<span class="mark loud" title="1 of 8 differs">not equal</span>' in text


def test_marks_stand_beside_every_figure_of_a_marked_side(tmp_path):
    marked = side("eagle3 told", "subject", 1, 900.0, [3, 1, 4], synthetic=True, lossy=True, equal=None, ratio=ratio("none", 2.0))
    _, document = render(tmp_path, [provenance(), marked, side("none", "none", 1, 450.0)])
    text = "".join(document.words)
    assert "Synthetic. Acceptance was set" in text
    assert "Lossy. The accept rule" in text
    for chart in charts_of(document).values():
        named = [a["text"] for a in chart["layout"].get("annotations", []) if "eagle3 told" in a["text"]]
        named += [trace["name"] for trace in chart["data"] if trace.get("name", "").startswith("eagle3 told")] if not named else []
        assert named, chart["id"]
        assert all("SYNTHETIC" in name and "LOSSY" in name for name in named), chart["id"]
    tile = next(part for part in text.split("\n") if "tokens/s at batch 1" in part)
    assert "SYNTHETIC" in tile


def test_a_busy_machine_is_said_above_the_figures(tmp_path):
    busy, free = side("eagle3", "subject", 1, 900.0, [3, 1, 4], core_wait=0.62), side("none", "none", 1, 450.0, core_wait=0.01)
    text = "".join(render(tmp_path, [provenance(), busy, free])[1].words)
    assert (
        "Busy machine. Other programs kept the processor busy, or there are more threads than cores." in text
        and "per second timed: eagle3, batch 1 0.62." in text
    )
    text = "".join(render(tmp_path, [provenance(), free, side("old", "subject", 1, 900.0, [3, 1, 4])])[1].words)
    assert "Busy machine" not in text


@pytest.mark.parametrize(("gpu", "cautious"), [(False, True), (True, False)])
def test_cpu_figures_carry_a_caution_and_the_name_of_the_machine(tmp_path, gpu, cautious):
    _, document = render(tmp_path, records(gpu=gpu))
    text = "".join(document.words)
    assert ("not what a GPU will do" in text) is cautious
    assert ("NVIDIA H200" in text) is gpu


def test_a_configured_key_stays_out_of_the_page(whole):
    text, document = whole
    assert "api_key" in "".join(document.words)
    assert "secret-key" not in text


def test_the_page_opens_with_the_best_side_that_earned_its_acceptance(tmp_path):
    found = read(tmp_path, records())
    opened = page.best(found)
    assert opened is not None
    assert not opened.get("synthetic")
    earned = [one.number("ratio", "median") for one in found.sides if one.subject and one.equal and one.get("ratio")]
    assert opened.number("ratio", "median") == max(earned)


# Charts


def test_every_chart_is_one_plotly_knows(whole):
    found = charts_of(whole[1])
    expected = {
        "throughput",
        "comparison",
        "acceptance-unconditional",
        "acceptance-conditional",
        "stages",
        "gaps",
        "bursts",
        "shapes-0",
        "prediction",
    }
    assert set(found) == expected
    light = scheme(dark=False)

    def coloured(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: coloured(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [coloured(inner) for inner in value]
        return light[value] if isinstance(value, str) and value.startswith("--") else value

    for chart in found.values():
        go.Figure(data=coloured(chart["data"]), layout=coloured(chart["layout"]))


def test_a_chart_without_data_is_left_out_and_said(tmp_path):
    bare = {key: value for key, value in side("x", "subject", 1, 100.0).items() if key in results.IDENTITY} | {"kind": "side"}
    bare["tokens_per_second"] = {"median": 100.0}
    _, document = render(tmp_path, [bare])
    assert set(charts_of(document)) == {"throughput"}
    text = "".join(document.words)
    for sentence in (
        "Against the baselines: no side", "Accepted up to position k: no side", "Where a cycle's time goes: no side",
        "Gaps between tokens: no side",
        "Tokens that arrive together: no side", "Shapes: fewer than three", "Predicted against measured: no prediction",
        "A generation, cycle by cycle: no recorded", "Latency percentiles: no side", "Memory and build: no side",
    ):  # fmt: skip
        assert sentence in text
    assert not any(attributes.get("id") == "viewer" for _, attributes in document.elements)


def test_nothing_is_left_out_of_a_whole_file(whole):
    assert not any(attributes.get("id") == "left-out" for _, attributes in whole[1].elements)


def test_the_floor_line_is_acceptance_times_batch_over_floor(tmp_path):
    lines = [side("x", "subject", batch, 100.0 * batch, [2, 1, 3], floor_ms=2.5, acceptance_length=3.0) for batch in (1, 4)]
    chart = figures.throughput(
        read(tmp_path, [provenance(), *lines]), canvas.Palette(found := read(tmp_path, [provenance(), *lines]).sides)
    )
    assert chart.figure is not None
    [floor] = [trace for trace in chart.figure["data"] if trace["name"].endswith("floor")]
    assert floor["x"] == [1, 4]
    assert floor["y"] == pytest.approx([1200.0, 4800.0])
    assert len(found) == 2


def test_one_batch_is_drawn_as_bars_with_the_floor_beside(tmp_path):
    found = read(
        tmp_path, [provenance(), side("x", "subject", 1, 800.0, [2, 1, 3]), side("none", "none", 1, 500.0), side("hf", "hf", 1, 300.0)]
    )
    chart = figures.throughput(found, canvas.Palette(found.sides))
    assert chart.figure is not None
    bars, floor = chart.figure["data"]
    assert bars["x"] == [one.number("tokens_per_second", "median") for one in found.sides]
    assert [value is None for value in floor["x"]] == [False, False, True]


def test_the_heat_map_frames_the_best_shape(tmp_path):
    lines = [side(f"t{s}{n}", "subject", 1, 100.0 * s + n, [s, 4, n], ratio=ratio("none", s + n / 100)) for s in (2, 3) for n in (4, 8)]
    [chart] = figures.shapes(read(tmp_path, [provenance(), *lines]))
    assert chart.figure is not None
    [heat] = chart.figure["data"]
    assert heat["z"] == [[2.04, 2.08], [3.04, 3.08]]
    frame = chart.figure["layout"]["shapes"][0]
    assert ((frame["x0"] + frame["x1"]) / 2, (frame["y0"] + frame["y1"]) / 2) == (1, 1)
    told = side("told", "subject", 1, 9999.0, [3, 4, 8], synthetic=True, equal=None)
    [chart] = figures.shapes(read(tmp_path, [provenance(), *lines, told]))
    assert chart.figure is not None
    assert chart.figure["data"][0]["z"] == heat["z"]
    by_branches = [side(f"k{s}{k}", "subject", 1, 100.0, [s, k, 16]) for s in (2, 3) for k in (1, 4)]
    [chart] = figures.shapes(read(tmp_path, [provenance(), *by_branches]))
    assert chart.figure is not None
    assert chart.figure["layout"]["xaxis"]["ticktext"] == ["1", "4"]


def test_the_distribution_of_gaps_counts_every_sample():
    counts = anatomy._counts([1.0, 1.5, 2.0, 3.9, 4.0], [1.0, 2.0, 3.0, 4.0])
    assert counts == [2, 1, 2]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "\u2013"), (float("nan"), "\u2013"), (0, "0.00"), (12345.6, "12,346"), (885.4, "885"), (52.81, "52.8"), (1.675, "1.68"),
     (0.0421, "0.0421"), (-3.14159, "-3.14"), (0.00001, "1.0e-05")],
)  # fmt: skip
def test_numbers_are_spelled_with_three_digits(value, text):
    assert canvas.spell(value) == text


@given(st.lists(st.floats(0, 100, allow_subnormal=False), min_size=1, max_size=8))
def test_labels_behind_lines_never_overlap(values):
    labels = canvas.end_labels([(0.0, value, str(value), "--ink") for value in values], 300, 0, 100)
    middles = sorted(label["y"] * 3 + label["yshift"] for label in labels)
    assert all(upper - lower > canvas.LABEL_GAP - 0.2 for lower, upper in pairwise(middles))


# The page itself


def scheme(*, dark: bool) -> dict[str, str]:
    light_text, dark_text = CSS.split("@media (prefers-color-scheme: dark)")[:2]
    found = dict(re.findall(r"(--[\w-]+): ([^;]+);", light_text))
    return {**found, **dict(re.findall(r"(--[\w-]+): ([^;]+);", dark_text.split("* { box-sizing")[0]))} if dark else found


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


TEXT_ON = [("--ink", "--bg"), ("--ink", "--surface"), ("--soft", "--bg"), ("--soft", "--surface"), ("--accent", "--bg"),
           ("--accent", "--surface"), ("--accent-ink", "--accent"), ("--warn", "--warn-soft"), ("--ink", "--warn-soft"),
           ("--ink", "--accent-soft"), ("--accent", "--accent-soft"), ("--ink", "--heat-0"),
           ("--ink", "--heat-1"), ("--g1", "--surface")]  # fmt: skip
TEXT_ON += [("--bar-ink", colour) for colour in anatomy.STAGE_COLOURS] + [(colour, "--surface") for colour in canvas.SUBJECT_COLOURS]
TEXT_ON += [("--ink" if level < 3 else "--burst-ink", colour) for level, colour in enumerate(anatomy.BURST_COLOURS)]


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
    used = set(re.findall(r'"(--[\w-]+)"', whole[1].scripts["charts-data"]))
    assert {"--accent", "--soft", "--grid"} <= used
    assert used <= set(scheme(dark=False))
    dark_only = set(re.findall(r"(--[\w-]+): ", CSS.split("@media (prefers-color-scheme: dark)")[1].split("* { box-sizing")[0]))
    assert used <= dark_only


def test_the_page_asks_for_nothing(whole):
    text, document = whole
    assert len(text.encode()) < 300_000
    addresses = set(re.findall(r"\b(?:https?|ftp|wss?):[^\s\"'`<)]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}
    for tag, attributes in document.elements:
        assert not {"src", "srcset", "data", "action", "poster"} & set(attributes), tag
        assert attributes.get("href", "#").startswith("#")
        assert tag not in ("link", "iframe", "object", "embed", "img", "base")
    assert "url(" not in text
    assert "@import" not in text


def test_the_policy_allows_exactly_the_scripts_of_the_page(whole):
    _, document = whole
    policy = next(attributes["content"] for _, attributes in document.elements if attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    code = [text for name, text in document.scripts.items() if name.startswith("script")]
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in code}
    assert len(hashes) == 3
    assert set(re.findall(r"'sha256-[^']+'", policy)) == hashes
    assert policy.startswith("default-src 'none';")
    assert "unsafe-eval" not in policy


def test_hostile_text_stays_text(tmp_path):
    evil = side(
        f"evil {HOSTILE}", "subject", 1, 100.0, [2, 1, 3], case=HOSTILE, equality=HOSTILE, ratio=ratio(HOSTILE, 2.0), runtime=HOSTILE
    )
    evil["stages"] = [{"name": HOSTILE, "ms": 1.0}]
    evil["memory"] = [{"name": HOSTILE, "bytes": 1}]
    told = generation(text=HOSTILE * 4, side=HOSTILE, prompt=HOSTILE)
    plain = {**provenance(), "cpu": HOSTILE, "revision": HOSTILE, "config": {HOSTILE: HOSTILE, "model": HOSTILE}}
    text, document = render(tmp_path, [plain, evil, told, {"kind": "plan", "batch": 1, "shape": HOSTILE, "model": HOSTILE}])
    assert [tag for tag, _ in document.elements].count("script") == 5
    assert not [tag for tag, attributes in document.elements if tag == "img" or any(name.startswith("on") for name in attributes)]
    # Browsers end a script at more than "</script>", and begin one inside at "<!--<script": no such character may be there at all.
    assert not set("<>&") & set(document.scripts["generations-data"] + document.scripts["charts-data"])
    [shown] = json.loads(document.scripts["generations-data"])
    assert shown["prompt"] == HOSTILE
    assert shown["cycles"][0]["nodes"][0][1] == told["cycles"][0]["nodes"][0]["text"]
    # plotly reads tags in labels: none but those the report writes itself.
    labels = json.dumps([[a["text"] for a in chart["layout"].get("annotations", [])] for chart in charts_of(document).values()])
    assert set(re.findall(r"<[^>]*>", labels)) <= {"<b>", "</b>", "<br>"}
    assert "&lt;img src=x" in labels
    assert text.isprintable() or "\x00" not in text


def test_the_viewer_gets_every_cycle(tmp_path):
    told = generation()
    told["cycles"][0]["nodes"][1]["probability"] = None
    _, document = render(tmp_path, [provenance(), told])
    [shown] = json.loads(document.scripts["generations-data"])
    assert shown["prompt"].startswith(PROMPT)
    assert [cycle["emitted"] for cycle in shown["cycles"]] == [cycle["emitted"] for cycle in told["cycles"]]
    for ours, theirs in zip(shown["cycles"], told["cycles"], strict=True):
        for (token, text, parent, probability, accepted), node in zip(ours["nodes"], theirs["nodes"], strict=True):
            assert (token, text, parent, bool(accepted)) == (node["token"], node["text"], node["parent"], node["accepted"])
            assert probability == (None if node["probability"] is None else pytest.approx(node["probability"], rel=1e-3))


def test_a_generation_of_a_marked_side_carries_its_marks(tmp_path):
    told = side("x", "subject", 1, 10.0, [2, 1, 3], synthetic=True, equal=None, case="c")
    _, document = render(tmp_path, [provenance(), told, generation(side="x", case="c"), generation(side="y", case="y on c")])
    names = [one["name"] for one in json.loads(document.scripts["generations-data"])]
    assert names == ["SYNTHETIC · not compared · x · c", "y on c"]


def test_the_command_writes_one_file(tmp_path, capsys):
    write(tmp_path / "in", records())
    out = tmp_path / "new" / "report.html"
    with pytest.raises(SystemExit) as done:
        cli.main(["report", f"report.files=[{tmp_path / 'in'}]", f"report.out={out}", "format=json"])
    assert done.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert told["out"] == str(out)
    assert told["bytes"] == out.stat().st_size > 1_000_000
    text = out.read_text(encoding="utf-8")
    assert text.count("<!doctype html>") == 1
    assert page.plotly_script() in text


def test_the_wheel_takes_the_parts_of_the_page_along():
    folder = Path(page.__file__).parent
    config = tomllib.loads((folder.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    taken = {file for pattern in config["tool"]["setuptools"]["package-data"]["graphspec.lab"] for file in folder.glob(pattern)}
    parts = set((folder / "web").iterdir())
    assert {file.name for file in parts} == {"template.html", "viewer.html", "style.css", "charts.js", "viewer.js"}
    assert parts <= taken


def test_memory_parts_of_one_name_are_added_and_estimates_marked(tmp_path):
    parts = [("KV pools, 67 pages", 1024, False), ("KV pools, 3 pages", 1024, False), ("workspace", 4096, True)]
    memory = [{"name": name, "bytes": size, "estimate": estimate} for name, size, estimate in parts]
    text = "".join(render(tmp_path, [provenance(), side("x", "subject", 1, 10.0, memory=memory)])[1].words)
    assert "togetherKV poolsworkspacex, batch 16.0 KiB2.0 KiB~4.0 KiB" in text


def test_lone_surrogates_do_not_keep_the_page_from_being_written(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "plotly_script", lambda: STUB)
    write(tmp_path, [provenance(), generation(prompt="half \ud83d", side="half \ud83d"), side("half \ud83d", "subject", 1, 10.0)])
    out = tmp_path / "report.html"
    with pytest.raises(SystemExit) as done:
        cli.main(["report", f"report.files=[{tmp_path}]", f"report.out={out}"])
    assert done.value.code == 0
    assert json.loads(Document(out.read_text(encoding="utf-8")).scripts["generations-data"])[0]["prompt"] == "half \ud83d"


def test_what_keeps_the_page_from_being_written_is_said(tmp_path, monkeypatch, capsys):
    write(tmp_path, [provenance(), side("x", "subject", 1, 10.0)])
    with pytest.raises(SystemExit) as done:
        cli.main(["report", f"report.files=[{tmp_path}]", f"report.out={tmp_path}"])
    assert done.value.code == 2
    assert "report.out" in capsys.readouterr().err

    def absent(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(page.resources, "files", absent)
    with pytest.raises(ConfigError, match=r"graphspec\[report\]"):
        page.plotly_script()

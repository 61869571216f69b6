"""The report in a real browser: charts are drawn, the viewer steps, hostile text stays text, and no request leaves the page."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from graphspec.lab.measure.results import read_results
from graphspec.lab.report import page as report
from tests.support.report_records import HOSTILE, provenance, records, side, write

pytestmark = pytest.mark.browser

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
ARGUMENTS += ["--disable-component-update", "--disable-sync", "--no-first-run"]
CHARTS = ["throughput", "comparison", "arrivals", "pareto", "acceptance-unconditional", "acceptance-conditional", "along-text", "by-prompt"]
CHARTS += ["stages", "gaps", "bursts", "shapes-0", "prediction"]
MARKS = ".bars .point path, .scatterlayer .points path, .scatterlayer .js-line, .heatmaplayer image"
HOSTILE_GENERATION = 3
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    assert path, "these tests need Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    return records()


@pytest.fixture(scope="module")
def file(lines: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    out = folder / "report.html"
    out.write_text(report.page(read_results([str(write(folder, lines))]), report.plotly_script()), encoding="utf-8")
    return out


@pytest.fixture
def open_page(browser: Browser, file: Path) -> Iterator[Open]:
    """A function that opens the report; afterwards, any console error or network request of the browser fails the test."""
    complaints: list[str] = []
    contexts = []

    def open_(width: int = 1400, scheme: str = "light") -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce", offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: request.url == file.as_uri() or complaints.append(f"request: {request.url[:100]}"))
        page.goto(file.as_uri())
        page.wait_for_function("() => document.querySelectorAll('.js-plotly-plot').length === document.querySelectorAll('.chart').length")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not complaints


def path_of(page: Page) -> list[str]:
    """Texts of the nodes that are lit, in order."""
    return page.locator("#viewer .node.accepted .token").all_text_contents()


def text_of(page: Page) -> str:
    return page.locator("#viewer-text").text_content() or ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_every_chart_has_marks_and_nothing_scrolls_sideways(open_page: Open, width: int, scheme: str) -> None:
    page = open_page(width, scheme)
    assert page.locator(".chart").evaluate_all("charts => charts.map(chart => chart.id)") == CHARTS
    for chart in CHARTS:
        boxes = page.locator(f"#{chart}").locator(MARKS).evaluate_all("marks => marks.map(mark => mark.getBoundingClientRect().width)")
        assert any(box > 0 for box in boxes), chart
        frame = page.locator(f"#{chart} .main-svg").first.bounding_box()
        assert frame is not None
        assert frame["width"] > 250
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in background[4:-1].split(",")) < 200) is (scheme == "dark")


def test_charts_follow_the_colours_of_the_system(open_page: Open) -> None:
    page = open_page()
    tick = "getComputedStyle(document.querySelector('#throughput .xtick text')).fill"
    light = page.evaluate(tick)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"() => {tick} !== {light!r}")


def test_the_viewer_steps_with_buttons_and_slider(open_page: Open, lines: list[dict[str, Any]]) -> None:
    page = open_page()
    reported = next(line for line in lines if line["kind"] == "generation")
    cycles = reported["cycles"]
    assert page.locator("#viewer-back").is_disabled()
    text, paths = reported["prompt"], []
    for number, cycle in enumerate(cycles, start=1):
        text += "".join(cycle["emitted"])
        assert text_of(page) == text
        assert page.locator("#viewer-text .now").all_text_contents() == cycle["emitted"]
        assert page.locator("#viewer .node").count() == len(cycle["nodes"]) + 1
        paths.append(path_of(page))
        assert len(paths[-1]) == len(cycle["emitted"]) - 1
        done = [len(one["emitted"]) for one in cycles[:number]]
        status = page.locator("#viewer-status").text_content() or ""
        assert f"cycle {number} of {len(cycles)}" in status
        assert float(status.rsplit(" ", 1)[1]) == pytest.approx(sum(done) / number, abs=0.006)
        if number < len(cycles):
            page.locator("#viewer-next").click()
    assert len({tuple(path) for path in paths}) > len(cycles) // 2
    assert page.locator("#viewer-next").is_disabled()
    page.locator("#viewer-slider").fill("2")
    assert page.locator("#viewer").get_attribute("data-cycle") == "2"
    assert path_of(page) == paths[1]
    page.locator("#viewer-first").click()
    assert path_of(page) == paths[0]


def test_the_viewer_answers_keys_and_plays(open_page: Open) -> None:
    page = open_page()
    viewer = page.locator("#viewer")
    page.locator("#viewer-box").focus()
    for key, cycle in (("ArrowRight", "2"), ("ArrowRight", "3"), ("ArrowLeft", "2"), ("End", "19"), ("Home", "1")):
        page.keyboard.press(key)
        assert viewer.get_attribute("data-cycle") == cycle, key
    page.locator("#viewer-slider").focus()
    page.keyboard.press("ArrowRight")
    assert viewer.get_attribute("data-cycle") == "2"
    page.clock.install()
    page.locator("#viewer-play").click()
    assert page.locator("#viewer-play").get_attribute("aria-label") == "Pause"
    page.clock.run_for(2500)
    assert viewer.get_attribute("data-cycle") == "4"
    page.keyboard.press(" ")
    assert page.locator("#viewer-play").get_attribute("aria-label") == "Play"
    page.clock.run_for(5000)
    assert viewer.get_attribute("data-cycle") == "4"


def test_the_viewers_keys_need_no_click(open_page: Open) -> None:
    """The arrows work from anywhere; keys that scroll the page keep doing so until the viewer is in sight."""
    page = open_page()
    viewer = page.locator("#viewer")
    assert page.evaluate("document.activeElement === document.body")
    page.keyboard.press("ArrowRight")
    assert viewer.get_attribute("data-cycle") == "2"
    page.keyboard.press("End")
    page.wait_for_function("() => window.scrollY + window.innerHeight > document.documentElement.scrollHeight - 2")
    assert viewer.get_attribute("data-cycle") == "2"
    viewer.scroll_into_view_if_needed()
    for key, cycle in (("End", "19"), ("ArrowLeft", "18"), ("Home", "1")):
        page.keyboard.press(key)
        assert viewer.get_attribute("data-cycle") == cycle, key
    page.keyboard.press(" ")
    assert page.locator("#viewer-play").get_attribute("aria-label") == "Pause"
    page.keyboard.press(" ")
    assert page.locator("#viewer-play").get_attribute("aria-label") == "Play"
    assert "without a click" in (viewer.text_content() or "")


def test_the_viewer_takes_no_keys_from_fields_tables_and_buttons(open_page: Open) -> None:
    page = open_page()
    viewer = page.locator("#viewer")
    viewer.scroll_into_view_if_needed()
    at = viewer.get_attribute("data-cycle")
    table = page.locator("#sides .scroll")
    table.focus()
    for key in ("ArrowRight", "End", " ", "Home"):
        page.keyboard.press(key)
        assert viewer.get_attribute("data-cycle") == at, key
    page.locator("#speed summary").first.focus()
    page.keyboard.press(" ")
    assert page.locator("#speed details").first.get_attribute("open") is not None
    page.evaluate("document.body.append(document.createElement('input'))")
    page.locator("body > input").focus()
    page.keyboard.type("a b")
    page.keyboard.press("ArrowLeft")
    page.keyboard.type("c")
    assert page.locator("body > input").input_value() == "a cb"
    page.locator("#viewer-select").focus()
    page.keyboard.press("End")
    assert page.locator("#viewer-select").evaluate("select => select.selectedIndex") == HOSTILE_GENERATION
    assert page.locator("#viewer-play").get_attribute("aria-label") == "Play"


def test_a_name_that_looks_like_a_colour_stays_a_name(browser: Browser, tmp_path: Path) -> None:
    names = ["--accent", "var(--ink)"]
    sides = [side(name, "subject", 1, 10.0, [2, 1, 3], ratio=None) for name in names]
    out = tmp_path / "report.html"
    out.write_text(report.page(read_results([str(write(tmp_path, sides))]), report.plotly_script()), encoding="utf-8")
    page = browser.new_page(offline=True)
    page.goto(out.as_uri())
    assert sorted(page.locator("#throughput .annotation-text").all_text_contents()) == names
    page.close()


def test_probabilities_are_drawn_and_missing_ones_are_not_made_up(open_page: Open, lines: list[dict[str, Any]]) -> None:
    page = open_page()
    nodes = next(line for line in lines if line["kind"] == "generation")["cycles"][0]["nodes"]
    widths = page.locator("#viewer .edge.accepted").evaluate_all("edges => edges.map(edge => Number(edge.getAttribute('stroke-width')))")
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == len(widths) > 1
    numbers = page.locator("#viewer .node .number").all_text_contents()
    assert sorted(numbers) == sorted(f"{node['probability']:.2f}"[1:] if node["probability"] >= 0.005 else "<.01" for node in nodes[1:])


def test_a_nodes_probability_given_the_path_is_next_to_the_paths(open_page: Open, lines: list[dict[str, Any]]) -> None:
    page = open_page()
    nodes = next(line for line in lines if line["kind"] == "generation")["cycles"][0]["nodes"]
    pairs = [(node["probability"] / nodes[node["parent"]]["probability"], node["probability"]) for node in nodes if node["depth"] > 1]
    rounded = [[float(f"{p:.{report.PROBABILITY_DIGITS}g}") for p in pair] for pair in pairs]
    expected = sorted(tuple(f"{p:.2f}"[1:] if p >= 0.005 else "<.01" for p in pair) for pair in rounded)
    drawn = page.locator("#viewer .node:has(.given)").evaluate_all(
        "nodes => nodes.map(node => ['.token', '.given', '.number'].map(part => node.querySelector(part)).map("
        "text => [text.textContent, text.getBoundingClientRect().left, text.getBoundingClientRect().right]))"
    )
    assert sorted((given, path) for _, (given, _, _), (path, _, _) in drawn) == expected
    assert len(expected) > 3
    for (_, _, end), (_, left, right), (_, start, _) in drawn:
        assert end < left < right < start
    assert "probability given the path before, then of the whole path" in (page.locator("#viewer-probability-key").text_content() or "")


@pytest.mark.parametrize("width", [1400, 400])
def test_the_trees_box_ends_with_the_tree(open_page: Open, width: int, lines: list[dict[str, Any]]) -> None:
    """Of every cycle; what steps through the cycles stays in its place."""
    page = open_page(width)
    heights, places = set(), set()
    for _ in next(line for line in lines if line["kind"] == "generation")["cycles"]:
        box, tree, last = page.locator("#viewer-box").evaluate(
            "box => [box.offsetHeight, box.querySelector('svg').getBoundingClientRect().height,"
            " Math.max(...[...box.querySelectorAll('.node rect')].map(rect => rect.getBoundingClientRect().bottom))"
            " - box.querySelector('svg').getBoundingClientRect().top]"
        )
        assert tree <= box <= tree + 16
        assert 0 < tree - last < 30, "the tree itself ends with its lowest node"
        heights.add(box)
        places.add(page.locator("#viewer-next").evaluate("button => button.getBoundingClientRect().top + window.scrollY"))
        if page.locator("#viewer-next").is_enabled():
            page.locator("#viewer-next").click()
    assert len(heights) > 3
    assert len(places) == 1


@pytest.mark.parametrize("width", [1400, 400])
def test_both_sides_of_one_request_share_a_time_axis(open_page: Open, width: int) -> None:
    """Drawn bars are as long as their times, in one row per side, with the plain side's further to the right."""
    page = open_page(width)
    traces = page.evaluate(
        "[...document.querySelectorAll('#arrivals .barlayer .trace')].map(trace => [...trace.querySelectorAll('.point path')].map("
        "path => path.getBBox()).map(box => [box.x, box.x + box.width, box.y]))"
    )
    data = page.evaluate("document.getElementById('arrivals').data.map(trace => [Array.from(trace.base), Array.from(trace.x)])")
    assert len(traces) == len(data) == 4
    scale = (traces[0][0][1] - traces[0][0][0]) / data[0][1][0]
    for bars, (starts, spans) in zip(traces, data, strict=True):
        assert len(bars) == len(starts)
        assert [left for left, _, _ in bars] == pytest.approx([scale * start for start in starts], abs=1)
        assert [right for _, right, _ in bars] == pytest.approx([scale * (a + b) for a, b in zip(starts, spans, strict=True)], abs=1)
    rows = [{round(top) for _, _, top in bars} for bars in traces]
    assert rows[0] == rows[1] != rows[2] == rows[3]
    assert max(right for _, right, _ in traces[3]) > max(right for _, right, _ in traces[1])


def test_caveats_and_provenance_unfold(browser: Browser, tmp_path: Path) -> None:
    lines = [provenance(trace="trace.json"), *(side(f"draft {n}", "subject", 1, 10.0 * n, [n, 1, n + 1], rounds=1) for n in range(1, 6))]
    results = read_results([str(write(tmp_path, lines))])
    (tmp_path / "trace.json").write_text("{}", encoding="utf-8")
    out = tmp_path / "report.html"
    out.write_text(report.page(results, report.plotly_script(), tmp_path), encoding="utf-8")
    page = browser.new_page(offline=True)
    page.goto(out.as_uri())
    assert page.get_by_text("534ecac9").first.is_hidden()
    names = page.get_by_text("draft 1, draft 2, draft 3, draft 4, draft 5.")
    assert names.is_hidden()
    page.get_by_text("those of 5 sides.").click()
    assert names.is_visible()
    page.locator("#provenance summary").first.click()
    assert page.get_by_text("534ecac9").first.is_visible()
    link = page.get_by_role("link", name="trace.json")
    assert link.is_visible() and link.evaluate("link => link.href") == (tmp_path / "trace.json").as_uri()
    assert page.get_by_role("link", name="Perfetto").get_attribute("href") == "https://ui.perfetto.dev"
    page.close()


@pytest.mark.parametrize("width", [1400, 400])
def test_wide_and_deep_trees_scroll_in_their_box(open_page: Open, width: int) -> None:
    page = open_page(width)
    for generation in (1, 2):
        page.locator("#viewer-select").select_option(index=generation)
        box = page.locator("#viewer-box").evaluate("box => [box.scrollWidth > box.clientWidth, box.scrollHeight > box.clientHeight]")
        assert any(box)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        frames = page.locator("#viewer .node rect").evaluate_all(
            "nodes => nodes.map(node => node.getBoundingClientRect()).map(r => [r.left, r.top, r.right, r.bottom])"
        )
        overlapping = [
            (a, b) for i, a in enumerate(frames) for b in frames[:i] if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
        ]
        assert len(frames) > 16
        assert not overlapping


def test_hostile_text_stays_text(open_page: Open, lines: list[dict[str, Any]]) -> None:
    page = open_page()
    reported = [line for line in lines if line["kind"] == "generation"][HOSTILE_GENERATION]
    page.locator("#viewer-select").select_option(index=HOSTILE_GENERATION)
    page.locator("#viewer-last").click()
    text = text_of(page)
    assert text == reported["prompt"] + "".join(piece for cycle in reported["cycles"] for piece in cycle["emitted"])
    assert HOSTILE[1:] in text
    assert page.locator("img, #viewer script").count() == 0
    option = page.locator("#viewer-select option").nth(HOSTILE_GENERATION).text_content() or ""
    assert "</script><img src=x" in option


def test_headings_regions_and_controls_have_names(open_page: Open) -> None:
    page = open_page()
    assert page.locator("h1").count() == 1
    levels = page.locator("h1, h2, h3").evaluate_all("headings => headings.map(heading => Number(heading.tagName[1]))")
    assert all(after - before <= 1 for before, after in pairwise(levels))
    nameless = page.locator("button, input, select, [role=region], [role=img], nav").evaluate_all(
        "all => all.filter(one => !one.getAttribute('aria-label') && !one.closest('label')).map(one => one.outerHTML.slice(0, 80))"
    )
    assert not nameless
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the figures"

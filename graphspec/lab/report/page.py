"""``graphspec report``: turns result files into one HTML file that needs neither network nor server.

The page contains its charts as data for plotly, whose script comes with the Python package ``plotly``, and a tree viewer
(``web/viewer.js``). Its HTML is made from the templates in ``web/``, which escape all text. A content security policy lists the hashes of
the scripts and forbids every request. Imports no torch, and plotly only after checking that it is installed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ...config.command_options import LaunchConfig
from ...config.hints import install_hint
from ...config.paths import check_writable, make_folder, unwritable
from ...errors import ConfigError
from ..measure.results import LATENCIES, Line, Results, SideRecord, model, read_results, unique
from . import tables
from .tables import TIMES, plural, spell

if TYPE_CHECKING:
    from .charts import Chart

PLOTLY = "plotly.min.js"
PROBABILITY_DIGITS = 4


def run(config: LaunchConfig) -> int:
    """Read ``report.files``, write ``report.out``.

    Raises:
        ConfigError: a file is missing or broken, nothing in it can be shown, plotly is not installed, or ``report.out`` can't be written.
    """
    results = read_results(config.report.files)
    out = check_writable("report.out", config.report.out)
    text = page(results, plotly_script(), out.parent)
    data = text.encode("utf-8", errors="xmlcharrefreplace")
    make_folder("report.out", out.parent)
    try:
        out.write_bytes(data)
    except OSError as error:
        raise unwritable("report.out", out, error) from error
    if config.format == "json":
        held = {name: len(getattr(results, name)) for name in ("files", "sides", "generations", "predictions", "plans")}
        print(json.dumps({"out": str(out), "bytes": len(data), **held}))
    else:
        print(f"{out}: {len(results.sides)} sides, {len(results.generations)} generations, {len(data) / 1e6:.1f} MB")
    return 0


def plotly_script() -> str:
    """The text of plotly's script."""
    try:
        file = resources.files("plotly") / "package_data" / PLOTLY
    except ModuleNotFoundError:
        raise ConfigError("graphspec report", "the package plotly", "no such package", install_hint("report")) from None
    return file.read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the page: charts, then the output of the template ``body``, then those of ``tables`` that have rows.

    Attributes:
        link: text in the list of sections, where the title is too long for it.
    """

    name: str
    title: str
    link: str = ""
    charts: Sequence[Chart] = ()
    body: str = ""
    tables: Sequence[tables.Table] = ()


@dataclass(frozen=True, slots=True)
class Headline:
    """The top of the page: text, the side that it is about, and that side's figures with their names."""

    lead: str
    side: SideRecord
    tiles: Sequence[tuple[str, str]]


def page(results: Results, plotly: str, folder: Path = Path()) -> str:
    """The whole page, which links to files relative to ``folder``."""
    # These modules alone import plotly, which may be missing: plotly_script reports that.
    from . import cycle_charts, request_charts, speed_charts
    from .charts import Palette

    palette = Palette(results.sides)
    speed = [speed_charts.throughput(results, palette), speed_charts.comparison(results, palette)]
    speed += [request_charts.arrivals(results, best(results)), request_charts.pareto(results, palette)]
    accepted = cycle_charts.acceptance(results, palette)
    accepted += [request_charts.along_text(results, palette), request_charts.by_prompt(results, palette)]
    cycle = [cycle_charts.stages(results, palette)]
    latency = [cycle_charts.gaps(results, palette), cycle_charts.bursts(results)]
    shapes = [*speed_charts.shapes(results), speed_charts.prediction(results)]
    charts = [*speed, *accepted, *cycle, *latency, *shapes]
    timed = [side for side in results.sides if any(side.get(key) for key in LATENCIES)]
    marks = {(side.record["case"], side.record["side"]): side.marks for side in results.sides}
    recorded = [_generation(line, marks.get((line.get("case"), line.get("side")), [])) for line in results.generations]
    generations = [generation for generation in recorded if generation["cycles"]]
    memory = [tables.memory(results), tables.build(results)]
    sections = [
        Section("speed", "Speed", charts=speed),
        Section("generation", "A generation, cycle by cycle", "Tree viewer", body="viewer.html" if generations else ""),
        Section("acceptance", "Acceptance", charts=accepted),
        Section("cycle", "One cycle", "Cycle", cycle, "trace.html" if results.traces else "", [tables.host(results)]),
        Section("latency", "Latency", charts=latency, body="latencies.html" if timed else ""),
        Section("shapes", "Choosing a shape", "Shapes", shapes, tables=[tables.plans(results)]),
        Section("resources", "Memory and build", "Memory", tables=memory),
        Section("sides", "Every side", "All sides", tables=[tables.sides(results), tables.loads(results)]),
        Section("provenance", "Where the figures come from", "Provenance", body="provenance.html"),
    ]
    sections = [replace(one, charts=_rows(one.charts), tables=[table for table in one.tables if table.rows]) for one in sections]
    left_out = [f"{chart.title}: {chart.missing}" for chart in charts if chart.figure is None]
    left_out += ["A generation, cycle by cycle: no recorded generation"] * (not generations)
    left_out += ["Latency percentiles: no side with latencies"] * (not timed)
    left_out += ["Memory and build: no side that says"] * (not any(table.rows for table in memory))
    scripts = [Markup(plotly), _web("charts.js"), _web("viewer.js")]
    return _templates().get_template("page.html").render(
        heading=_heading(results),
        policy=_policy(scripts),
        style=_web("style.css"),
        facts=tables.facts(results),
        notices=tables.notices(results),
        headline=_headline(results),
        speculates=tables.speculates(results),
        sections=[section for section in sections if section.charts or section.body or section.tables],
        latencies=dict(zip(LATENCIES, ("TTFT", "TPOT", "ITL", "E2E"), strict=True)),
        timed=timed,
        traces=[(trace.name, _link(trace, folder)) for trace in dict.fromkeys(results.traces)],
        origins=tables.origins(results),
        left_out=left_out,
        files=", ".join(path.name for path in results.files[:12]) + (" …" if len(results.files) > 12 else ""),
        charts=[{"id": chart.id, **chart.figure.to_plotly_json()} for chart in charts if chart.figure is not None],
        generations=generations,
        scripts=scripts,
    )  # fmt: skip


def _templates() -> Environment:
    """The environment of the templates: values are escaped, unknown names are errors, and JSON can't end its script element."""
    templates = Environment(
        loader=PackageLoader(__package__, "web"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters |= {"spell": spell, "plural": plural}
    templates.globals["long_forms"] = tables.LONG_FORMS
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return templates


def _web(name: str) -> Markup:
    """A style or script from ``web/``, which the page contains unescaped."""
    return Markup((resources.files(__package__) / "web" / name).read_text(encoding="utf-8"))


def _link(file: Path, folder: Path) -> str | None:
    """The address of ``file`` for a page in ``folder``; None if there is no such file."""
    return quote(Path(os.path.relpath(file, folder)).as_posix()) if file.is_file() else None


def _policy(scripts: Iterable[str]) -> str:
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    # plotly adds style elements.
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def _heading(results: Results) -> str:
    subjects = unique(side.record["side"] for side in results.sides if side.subject)
    names = unique(model(record) for record in results.provenances)
    what = subjects[0] if len(subjects) == 1 else f"{len(subjects)} configurations" if subjects else "Results"
    return what + (f" on {', '.join(names)}" if names else "")


def _rows(charts: Iterable[Chart]) -> list[Chart]:
    """The charts with a figure; a narrow one without a narrow neighbour takes the whole width."""
    row: list[Chart] = []
    done: list[Chart] = []
    for chart in charts:
        if chart.figure is not None:
            row.append(chart)
            if chart.wide or len(row) == 2:
                done += [replace(one, wide=True) for one in row] if chart.wide else row
                row = []
    return [*done, *(replace(one, wide=True) for one in row)]


def best(results: Results) -> SideRecord | None:
    """The subject of the headline: the one with the largest gain, if possible without synthetic acceptance.

    Subjects are ranked by the 10th percentile of the gain over rounds, then of the speed. One measured in a single round ranks last.
    """
    subjects = [side for side in results.sides if side.subject and side.speed]
    earned = [side for side in subjects if not side.get("synthetic") and not side.get("lossy")]

    def rank(side: SideRecord) -> tuple[bool, float, float]:
        gain, speed = side.lower_end("ratio"), side.lower_end("tokens_per_second")
        return speed is not None, gain or side.number("ratio", "median") or 0.0, speed or side.speed or 0.0

    return max(earned or subjects, key=rank, default=None)


def _headline(results: Results) -> Headline | None:
    side = best(results)
    if side is None:
        return None
    ratio, middle, low = side.get("ratio", {}), side.number("ratio", "median"), side.lower_end("ratio")
    rounds = "" if side.rounds is None else ", one round" if side.rounds == 1 else f", median of {side.rounds} rounds"
    against = f"the tokens/s of {ratio.get('to')}"
    gain = f"{against}, p10 of {len(ratio['rounds'])} rounds; median {spell(middle)}{TIMES}" if low else against + rounds
    tiles = [
        (spell(low or middle) + TIMES, gain) if middle else None,
        (spell(side.speed), f"tokens/s at batch {side.batch}{rounds}"),
        (spell(side.number("acceptance_length")), "tokens per cycle") if side.number("acceptance_length") else None,
        (f"{side.percent_of_floor:.0f} %", "of the floor's speed") if side.percent_of_floor else None,
        (spell(side.number("tpot_ms", "p50")) + " ms", "per output token, p50") if side.number("tpot_ms", "p50") else None,
    ]
    many = sum(other.subject for other in results.sides) > 1
    lead = ("Largest gain measured: " if middle else "Fastest: ") if many else ""
    return Headline(lead, side, [tile for tile in tiles if tile])


def _generation(line: Line, marks: Sequence[str]) -> dict[str, Any]:
    """Data of the tree viewer; a node is [token, text, parent, probability of its path, accepted, probability given its parent's path]."""
    cycles = []
    for cycle in line.record["cycles"]:
        nodes: list[list[Any]] = []
        paths = [_probability(line, node) for node in cycle["nodes"]]
        for node, path in zip(cycle["nodes"], paths, strict=True):
            parent = node["parent"]
            above = paths[parent] if parent >= 0 else None
            # No path is likelier than its beginning, unless the scores are no probabilities.
            given = path / above if path is not None and above and path <= above else None
            accepted = int(bool(node.get("accepted")))
            nodes.append([node.get("token"), str(node.get("text", "")), parent, _rounded(path), accepted, _rounded(given)])
        cycles.append({"nodes": nodes, "emitted": [str(text) for text in cycle["emitted"]]})
    side, case = str(line.get("side", "")), str(line.get("case", ""))
    about = [case] if case.startswith(side) else [side, case]
    name = " · ".join(unique([*marks, *about])) or "generation"
    return {"name": name, "prompt": str(line.get("prompt", "")), "cycles": cycles}


def _probability(line: Line, node: dict[str, Any]) -> float | None:
    value = node.get("probability")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        line.fail("probability", "a number or null", repr(value))
    return float(value)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{PROBABILITY_DIGITS}g}")

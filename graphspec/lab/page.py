"""``graphspec report``: result files in, one HTML file out that needs neither network nor server.

The page holds its charts as data for plotly, whose script the Python package ``plotly`` brings; the tree viewer is the page's own
(``web/viewer.js``). A content security policy names the hashes of the scripts and forbids every request. Imports no torch.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import resources
from string import Template
from typing import Any

from ..errors import ConfigError
from ..launch import LaunchConfig
from ..paths import check_writable, make_folder, unwritable
from . import anatomy, figures, tables
from .canvas import TIMES, Chart, Palette, escape, spell
from .results import Line, Results, Side, model, read_results, unique

PLOTLY = "plotly.min.js"
PROBABILITY_DIGITS = 4


def run(config: LaunchConfig) -> int:
    """Read ``report.files``, write ``report.out``.

    Raises:
        ConfigError: a file is missing or broken, nothing in it can be shown, plotly is not installed, or ``report.out`` can't be written.
    """
    results = read_results(config.report.files)
    out = check_writable("report.out", config.report.out)
    text = page(results, plotly_script())
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
    """The text of plotly's own script.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        file = resources.files("plotly") / "package_data" / PLOTLY
    except ModuleNotFoundError:
        raise ConfigError("graphspec report", "the package plotly", "no such package", "pip install 'graphspec[report]'") from None
    return file.read_text(encoding="utf-8")


def page(results: Results, plotly: str) -> str:
    """The whole page.

    Args:
        results: what :func:`~graphspec.lab.results.read_results` found.
        plotly: text of plotly's script.
    """
    palette = Palette(results.sides)
    sections = {
        "speed": [figures.throughput(results, palette), figures.comparison(results, palette)],
        "acceptance": anatomy.acceptance(results, palette),
        "cycle": [anatomy.stages(results)],
        "latency": [anatomy.gaps(results, palette), anatomy.bursts(results)],
        "shapes": [*figures.shapes(results), figures.prediction(results)],
    }
    charts = [chart for group in sections.values() for chart in group]
    scripts = {"plotly": plotly, "charts_script": _web("charts.js"), "viewer_script": _web("viewer.js")}
    drawn = {name: _grid(chart for chart in group if chart.figure) for name, group in sections.items()}
    extra = {
        "latency": _titled("Percentiles", tables.latencies(results)),
        "cycle": _titled("Host", tables.host(results)),
        "shapes": _titled("Planned", tables.plans(results)),
        "resources": _titled("Memory", tables.memory(results)) + _titled("Build", tables.build(results)),
    }
    titles = {"speed": "Speed", "acceptance": "Acceptance", "cycle": "One cycle", "latency": "Latency", "shapes": "Choosing a shape"}
    titles |= {"resources": "Memory and build"}
    bodies = {name: drawn.get(name, "") + extra.get(name, "") for name in titles}
    marks = {(side.record["case"], side.record["side"]): side.marks for side in results.sides}
    generations = [_generation(line, marks.get((line.get("case"), line.get("side")), [])) for line in results.generations]
    bodies = {"speed": bodies.pop("speed"), "generation": _web("viewer.html") if any(g["cycles"] for g in generations) else "", **bodies}
    titles |= {"generation": "A generation, cycle by cycle", "sides": "Every side", "provenance": "Where the figures come from"}
    bodies |= {
        "sides": f'<div class="card wide">{tables.sides(results)}</div>' if results.sides else "",
        "provenance": tables.provenances(results),
    }
    shown = [name for name, body in bodies.items() if body]
    left_out = [f"{chart.title}: {chart.missing}" for chart in charts if not chart.figure]
    left_out += ["A generation, cycle by cycle: no recorded generation"] * (not bodies["generation"])
    left_out += ["Latency percentiles: no side with latencies"] * (not extra["latency"])
    left_out += ["Memory and build: no side that says"] * (not extra["resources"])
    heading = _heading(results)
    return Template(_web("template.html")).substitute(
        title=escape(f"{heading} · graphspec report"),
        policy=_policy(scripts.values()),
        style=_web("style.css"),
        heading=escape(heading),
        facts="".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in tables.facts(results)),
        notices="".join(f"<li>{notice}</li>" for notice in tables.notices(results)),
        tiles=_tiles(results),
        links="".join(f'<a href="#{name}">{escape(_SHORT.get(name, titles[name]))}</a>' for name in shown),
        sections="".join(_section(name, titles[name], bodies[name]) for name in shown),
        left_out=_left_out(left_out),
        files=escape(", ".join(path.name for path in results.files[:12]) + (" …" if len(results.files) > 12 else "")),
        charts=_embed([{"id": chart.id, **chart.figure} for chart in charts if chart.figure]),
        generations=_embed([generation for generation in generations if generation["cycles"]]),
        **scripts,
    )


_SHORT = {
    "generation": "Tree viewer",
    "cycle": "Cycle",
    "shapes": "Shapes",
    "resources": "Memory",
    "sides": "All sides",
    "provenance": "Provenance",
}


def _web(name: str) -> str:
    return (resources.files(__package__) / "web" / name).read_text(encoding="utf-8")


def _embed(value: object) -> str:
    """JSON that can't end the script element it stands in, whatever its strings hold."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(scripts: Iterable[str]) -> str:
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    # plotly writes style elements of its own.
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def _heading(results: Results) -> str:
    subjects = unique(side.record["side"] for side in results.sides if side.subject)
    names = unique(model(record) for record in results.provenances)
    what = subjects[0] if len(subjects) == 1 else f"{len(subjects)} configurations" if subjects else "Results"
    return what + (f" on {', '.join(names)}" if names else "")


def _section(name: str, title: str, body: str) -> str:
    heading = f'<h2 id="{name}-title">{escape(title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{heading}<div class="grid">{body}</div></section>'


def _titled(title: str, table: str) -> str:
    return f'<div class="card wide"><h3>{escape(title)}</h3>{table}</div>' if table else ""


def _chart(chart: Chart) -> str:
    assert chart.figure is not None
    numbers = f"<details><summary>Numbers</summary>{tables.render(chart.numbers, chart.title)}</details>" if chart.numbers else ""
    label = html.escape(f"{chart.title}. {chart.lede}")
    return (
        f'<figure class="card{" wide" if chart.wide else ""}"><h3>{escape(chart.title)}</h3><p class="lede">{escape(chart.lede)}</p>'
        f'<div class="chart" id="{chart.id}" role="img" aria-label="{label}" style="height:{chart.figure["layout"]["height"]}px"></div>'
        f"{numbers}</figure>"
    )


def _grid(charts: Iterable[Chart]) -> str:
    """The charts; a narrow one without a narrow neighbour takes the whole width."""
    row: list[Chart] = []
    done: list[Chart] = []
    for chart in charts:
        row.append(chart)
        if chart.wide or len(row) == 2:
            done += [replace(one, wide=True) for one in row] if chart.wide else row
            row = []
    return "".join(_chart(chart) for chart in [*done, *(replace(one, wide=True) for one in row)])


def _left_out(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return _section("left-out", "Left out", f'<ul class="plain">{items}</ul>')


def best(results: Results) -> Side | None:
    """The subject the page opens with: the fastest one, of those that earned their acceptance where there are any."""
    subjects = [side for side in results.sides if side.subject and figures.speed_of(side)]
    earned = [side for side in subjects if not side.get("synthetic") and not side.get("lossy")]
    ranked = [(side.number("ratio", "median") or 0, figures.speed_of(side) or 0, side) for side in earned or subjects]
    return max(ranked, key=lambda entry: entry[:2])[2] if ranked else None


def _tiles(results: Results) -> str:
    side = best(results)
    if side is None:
        return ""
    ratio = side.get("ratio", {})
    tiles = [
        (spell(side.number("ratio", "median")) + TIMES, f"the tokens/s of {ratio.get('to')}") if ratio else None,
        (spell(figures.speed_of(side)), f"tokens/s at batch {side.batch}"),
        (spell(side.number("acceptance_length")), "tokens per cycle") if side.number("acceptance_length") else None,
        (f"{side.number('percent_of_floor'):.0f} %", "of the floor's speed") if side.number("percent_of_floor") else None,
        (spell(side.number("tpot_ms", "p50")) + " ms", "per output token, p50") if side.number("tpot_ms", "p50") else None,
    ]
    cells = "".join(f"<div><dd>{escape(figure)}</dd><dt>{escape(text)}</dt></div>" for figure, text in filter(None, tiles))
    many = sum(other.subject for other in results.sides) > 1
    which = ("Largest gain measured: " if ratio else "Fastest: ") if many else ""
    name = f"<strong>{escape(side.label)}</strong>, batch {side.batch}{tables.marks(side)}"
    return f'<div class="tiles"><p>{which}{name}</p><dl>{cells}</dl></div>'


def _generation(line: Line, marks: Sequence[str]) -> dict[str, Any]:
    """What the viewer needs; a node is [token, text, parent, probability of its path, accepted]."""
    cycles = [
        {
            "nodes": [
                [node.get("token"), str(node.get("text", "")), node["parent"], _probability(line, node), int(bool(node.get("accepted")))]
                for node in cycle["nodes"]
            ],
            "emitted": [str(text) for text in cycle["emitted"]],
        }
        for cycle in line.record["cycles"]
    ]
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
    return float(f"{value:.{PROBABILITY_DIGITS}g}")

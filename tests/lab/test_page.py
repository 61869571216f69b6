"""graphspec report: its input, figures it must not show, and a page that is self-contained."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError

from graphspec.cli import main as cli
from graphspec.errors import ConfigError
from graphspec.lab.report import page, tables
from tests.support.report_page import STUB, WEB, Document, charts_of, render
from tests.support.report_records import HOSTILE, PROMPT, generation, provenance, ratio, read, records, side, write

NO_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "numpy", "plotly", "transformers"}:
            raise ModuleNotFoundError("blocked: " + name)
sys.meta_path.insert(0, Block())
from graphspec.errors import ConfigError
from graphspec.lab.report import page
try:
    page.plotly_script()
except ConfigError as error:
    print(error)
"""


def test_the_report_imports_neither_torch_nor_numpy_and_says_when_plotly_is_missing():
    done = subprocess.run([sys.executable, "-c", NO_TORCH], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "pip install 'plotly' 'jinja2'" in done.stdout


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


def test_marks_are_next_to_every_figure_of_a_marked_side(tmp_path):
    marked = side("eagle3 reported", "subject", 1, 900.0, [3, 1, 4], synthetic=True, lossy=True, equal=None, ratio=ratio("none", 2.0))
    _, document = render(tmp_path, [provenance(), marked, side("none", "none", 1, 450.0)])
    text = "".join(document.words)
    assert "Synthetic. Acceptance was set" in text
    assert "Lossy. The accept rule" in text
    for chart in charts_of(document).values():
        named = [a["text"] for a in chart["layout"].get("annotations", []) if "eagle3 reported" in a["text"]]
        named += [trace["name"] for trace in chart["data"] if trace.get("name", "").startswith("eagle3 reported")] if not named else []
        assert named, chart["id"]
        assert all("SYNTHETIC" in name and "LOSSY" in name for name in named), chart["id"]
    tile = next(part for part in text.split("\n") if "tokens/s at batch 1" in part)
    assert "SYNTHETIC" in tile


def test_a_busy_machine_is_reported_above_the_figures(tmp_path):
    busy, free = side("eagle3", "subject", 1, 900.0, [3, 1, 4], core_wait=0.62), side("none", "none", 1, 450.0, core_wait=0.01)
    text = "".join(render(tmp_path, [provenance(), busy, free])[1].words)
    assert (
        "Busy machine. Other programs kept the processor busy, or there are more threads than cores." in text
        and "per second timed: eagle3, batch 1 0.62." in text
    )
    text = "".join(render(tmp_path, [provenance(), free, side("old", "subject", 1, 900.0, [3, 1, 4])])[1].words)
    assert "Busy machine" not in text


@pytest.mark.parametrize(("gpu", "cautious"), [(False, True), (True, False)])
def test_cpu_figures_have_a_note_and_the_name_of_the_machine(tmp_path, gpu, cautious):
    _, document = render(tmp_path, records(gpu=gpu))
    text = "".join(document.words)
    assert ("not what a GPU will do" in text) is cautious
    assert ("NVIDIA H200" in text) is gpu


def test_a_configured_key_stays_out_of_the_page(whole):
    text, document = whole
    assert "api_key" in "".join(document.words)
    assert "secret-key" not in text


def test_the_page_opens_with_a_side_of_unforced_acceptance(tmp_path):
    found = read(tmp_path, records())
    opened = page.best(found)
    assert opened is not None
    assert not opened.get("synthetic")
    earned = [one.lower_end("ratio") for one in found.sides if one.subject and one.equal and one.get("ratio")]
    assert opened.lower_end("ratio") == max(earned)


@pytest.mark.parametrize("shaped", [True, False])
def test_shapes_are_explained_where_there_are_any(tmp_path, shaped):
    lines = [side(f"d{s}", "subject", 1, 10.0 * s, [s, 1, s + 1]) for s in (2, 3, 4)] if shaped else [side("none", "none", 1, 10.0)]
    text, document = render(tmp_path, [provenance(), *lines])
    assert ("draft depth: the most drafted tokens" in "".join(document.words)) is shaped
    assert ("abbr", {"title": tables.LONG_FORMS["S, K, N"]}) in document.elements or not shaped
    assert not shaped or text.index("draft depth") < text.index("<main")


# The page itself


def test_the_page_makes_no_requests(whole):
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


def test_templates_escape_what_they_are_given_and_refuse_what_they_were_not():
    templates = page._templates()
    assert (
        templates.from_string("<p title='{{ text }}'>{{ text }}").render(text="<'\">") == "<p title='&lt;&#39;&#34;&gt;'>&lt;&#39;&#34;&gt;"
    )
    with pytest.raises(UndefinedError):
        templates.from_string("{{ text }}").render()
    with pytest.raises(ValueError, match="not JSON compliant"):
        templates.from_string("{{ value|tojson }}").render(value=float("nan"))
    assert not [file.name for file in WEB.glob("*.html") if re.search(r"\|\s*safe|autoescape", file.read_text(encoding="utf-8"))]


def test_hostile_text_stays_text(tmp_path):
    evil = side(
        f"evil {HOSTILE}", "subject", 1, 100.0, [2, 1, 3], case=HOSTILE, equality=HOSTILE, ratio=ratio(HOSTILE, 2.0), runtime=HOSTILE
    )
    evil["stages"] = [{"name": HOSTILE, "ms": 1.0}]
    evil["memory"] = [{"name": HOSTILE, "bytes": 1}]
    reported = generation(text=HOSTILE * 4, side=HOSTILE, prompt=HOSTILE)
    plain = {**provenance(), "cpu": HOSTILE, "revision": HOSTILE, "config": {HOSTILE: HOSTILE, "model": HOSTILE}}
    text, document = render(tmp_path, [plain, evil, reported, {"kind": "plan", "batch": 1, "shape": HOSTILE, "model": HOSTILE}])
    assert [tag for tag, _ in document.elements].count("script") == 5
    assert not [tag for tag, attributes in document.elements if tag == "img" or any(name.startswith("on") for name in attributes)]
    # Browsers end a script at more than "</script>", and begin one inside at "<!--<script": no such character may be there at all.
    assert not set("<>&") & set(document.scripts["generations-data"] + document.scripts["charts-data"])
    [shown] = json.loads(document.scripts["generations-data"])
    assert shown["prompt"] == HOSTILE
    assert shown["cycles"][0]["nodes"][0][1] == reported["cycles"][0]["nodes"][0]["text"]
    # plotly reads tags in labels: none but those the report writes itself.
    labels = json.dumps(charts_of(document))
    assert set(re.findall(r"<[^>]*>", labels)) <= {"<b>", "</b>", "<br>", "<extra>", "</extra>"}
    assert "&lt;img src=x" in labels
    assert text.isprintable() or "\x00" not in text


def test_the_viewer_gets_every_cycle(tmp_path):
    reported = generation()
    reported["cycles"][0]["nodes"][1]["probability"] = None
    _, document = render(tmp_path, [provenance(), reported])
    [shown] = json.loads(document.scripts["generations-data"])
    assert shown["prompt"].startswith(PROMPT)
    assert [cycle["emitted"] for cycle in shown["cycles"]] == [cycle["emitted"] for cycle in reported["cycles"]]
    for ours, theirs in zip(shown["cycles"], reported["cycles"], strict=True):
        for (token, text, parent, probability, accepted, given), node in zip(ours["nodes"], theirs["nodes"], strict=True):
            assert (token, text, parent, bool(accepted)) == (node["token"], node["text"], node["parent"], node["accepted"])
            assert probability == (None if node["probability"] is None else pytest.approx(node["probability"], rel=1e-3))
            above = theirs["nodes"][parent]["probability"] if parent >= 0 else None
            unknown = above is None or node["probability"] is None
            assert given == (None if unknown else pytest.approx(node["probability"] / above, rel=1e-3))


def test_a_path_that_is_likelier_than_its_beginning_has_no_probability_given_it(tmp_path):
    """Such scores are no probabilities, so their quotient is none."""
    reported = generation()
    reported["cycles"][0]["nodes"][1] |= {"parent": 0, "probability": 0.25}
    reported["cycles"][0]["nodes"][2] |= {"parent": 1, "probability": 0.5}
    [shown] = json.loads(render(tmp_path, [provenance(), reported])[1].scripts["generations-data"])
    assert [node[5] for node in shown["cycles"][0]["nodes"][:3]] == [None, 0.25, None]


def test_a_trace_is_linked_relative_to_the_page(tmp_path, monkeypatch):
    """And Perfetto next to it; a trace that is gone is named."""
    monkeypatch.setattr(page, "plotly_script", lambda: STUB)
    (tmp_path / "results" / "of today").mkdir(parents=True)
    (tmp_path / "results" / "of today" / "a #1.json").write_text("{}", encoding="utf-8")
    lines = [provenance(trace="of today/a #1.json"), side("x", "subject", 1, 10.0), provenance(trace="../gone.json")]
    write(tmp_path / "results", lines)
    out = tmp_path / "pages" / "report.html"
    with pytest.raises(SystemExit) as done:
        cli.main(["report", f"report.files=[{tmp_path / 'results'}]", f"report.out={out}"])
    assert done.value.code == 0
    text = out.read_text(encoding="utf-8")
    document = Document(text)
    links = [attributes["href"] for tag, attributes in document.elements if tag == "a" and not attributes["href"].startswith("#")]
    assert links == ["https://ui.perfetto.dev", "../results/of%20today/a%20%231.json"]
    assert "gone.json, which is not where it was written" in "".join(document.words)
    assert set(re.findall(r"\bhttps?:[^\s\"'`<)]+", text)) == {"http://www.w3.org/2000/svg", "https://ui.perfetto.dev"}


def folded(text: str) -> str:
    """The page without its details, which are closed; their summaries stay."""
    while (
        rest := re.sub(r"<details>((?:(?!<details).)*?)</details>", lambda inner: inner[1].split("</summary>")[0], text, flags=re.S)
    ) != text:
        text = rest
    assert "<details" not in text
    return "".join(Document(text).words)


def test_hashes_and_repeated_notes_are_folded_away(tmp_path):
    lonely = [side(f"draft {n}", "subject", 1, 10.0 * n, [n, 1, n + 1], rounds=1, core_wait=0.5) for n in range(1, 6)]
    text, document = render(tmp_path, [provenance(revision="534ecac9aaae112a109be31cac07bd742c269963"), *lonely])
    seen, whole = folded(text), "".join(document.words)
    assert "534ecac" in whole and "534ecac" not in seen
    names = ", ".join(f"draft {n}" for n in range(1, 6))
    assert "those of 5 sides." in seen and names in whole and names not in seen
    assert "Busy machine. Other programs kept the processor busy" in seen and "per second timed" in whole and "per second timed" not in seen
    assert whole.count("gap_ms: no CUDA device") == 1, "a reason that all sides share is said once"
    lonely[0]["not_measured"] = {"gap_ms": "another reason", "nodes": "another reason"}
    whole = "".join(render(tmp_path, [provenance(), *lonely])[1].words)
    assert "gap_ms, nodes: another reason" in whole and whole.count("gap_ms: no CUDA device") == 4


def test_a_generation_of_a_marked_side_carries_its_marks(tmp_path):
    reported = side("x", "subject", 1, 10.0, [2, 1, 3], synthetic=True, equal=None, case="c")
    _, document = render(tmp_path, [provenance(), reported, generation(side="x", case="c"), generation(side="y", case="y on c")])
    names = [one["name"] for one in json.loads(document.scripts["generations-data"])]
    assert names == ["SYNTHETIC · not compared · x · c", "y on c"]


def test_the_command_writes_one_file(tmp_path, capsys):
    write(tmp_path / "in", records())
    out = tmp_path / "new" / "report.html"
    with pytest.raises(SystemExit) as done:
        cli.main(["report", f"report.files=[{tmp_path / 'in'}]", f"report.out={out}", "format=json"])
    assert done.value.code == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["out"] == str(out)
    assert reported["bytes"] == out.stat().st_size > 1_000_000
    text = out.read_text(encoding="utf-8")
    assert text.count("<!doctype html>") == 1
    assert page.plotly_script() in text


def test_the_wheel_takes_the_parts_of_the_page_along():
    folder = Path(page.__file__).parent
    config = tomllib.loads((folder.parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    taken = {file for pattern in config["tool"]["setuptools"]["package-data"]["graphspec.lab.report"] for file in folder.glob(pattern)}
    parts = set((folder / "web").iterdir())
    assert {file.name for file in parts} == {
        "page.html", "parts.html", "latencies.html", "provenance.html", "trace.html", "viewer.html", "style.css", "charts.js", "viewer.js",
    }  # fmt: skip
    assert parts <= taken


def test_memory_parts_of_one_name_are_added_and_estimates_marked(tmp_path):
    parts = [("KV pools, 67 pages", 1024, False), ("KV pools, 3 pages", 1024, False), ("workspace", 4096, True)]
    memory = [{"name": name, "bytes": size, "estimate": estimate} for name, size, estimate in parts]
    found = tables.memory(read(tmp_path, [provenance(), side("x", "subject", 1, 10.0, memory=memory)]))
    assert found.headings == ["side", "together", "KV pools", "workspace"]
    assert found.rows == [["x, batch 1", "6.0 KiB", "2.0 KiB", "~4.0 KiB"]]
    assert found.note == "~ marks estimates."


def test_lone_surrogates_do_not_keep_the_page_from_being_written(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "plotly_script", lambda: STUB)
    write(tmp_path, [provenance(), generation(prompt="half \ud83d", side="half \ud83d"), side("half \ud83d", "subject", 1, 10.0)])
    out = tmp_path / "report.html"
    with pytest.raises(SystemExit) as done:
        cli.main(["report", f"report.files=[{tmp_path}]", f"report.out={out}"])
    assert done.value.code == 0
    assert json.loads(Document(out.read_text(encoding="utf-8")).scripts["generations-data"])[0]["prompt"] == "half \ud83d"


def test_errors_of_writing_the_page_are_one_message(tmp_path, monkeypatch, capsys):
    write(tmp_path, [provenance(), side("x", "subject", 1, 10.0)])
    with pytest.raises(SystemExit) as done:
        cli.main(["report", f"report.files=[{tmp_path}]", f"report.out={tmp_path}"])
    assert done.value.code == 2
    assert "report.out" in capsys.readouterr().err

    def absent(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(page.resources, "files", absent)
    with pytest.raises(ConfigError, match=r"pip install 'plotly' 'jinja2'"):
        page.plotly_script()

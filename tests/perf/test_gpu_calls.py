"""The three calls of ``make gpu-check``: seconds for every part, one call after another over one folder, kernels compiled ahead."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees
from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter
from triton.backends.compiler import GPUTarget

from graphspec.errors import CaptureError
from graphspec.kernels.fused.ahead import Job
from perf import gpu_check
from perf.gpu import bench, checks, engine, latency, probes, readme, records, results, static_decode, warm
from perf.gpu.bench import EAGLE3_8B, LLAMA_8B
from perf.gpu.budget import CALLS, GAP, MINUTES, Part, all_parts, allowed, needed
from tests.support.codegen import pretended_gpu
from tests.support.gpu_configs import SMALL

ROOT = Path(__file__).resolve().parents[2]
HEAD = {"kind": "provenance", "revision": "abc", "tree": "1", "torch": "2", "triton": "3", "gpus": [{"name": "H"}], "date": "2026-01-01"}
PASSED = {"kind": "check", "name": "t", "outcome": "passed", "seconds": 1.0, "message": ""}
CYCLE = {"kind": "cycle", "case": "none", "lanes": 1, "milliseconds": 5.0, "floor_milliseconds": 4.5, "percent_of_floor": 90.0,
         "tokens_per_second": 800.0, "acceptance_length": 1.0, "synthetic": False, "host_microseconds": 3.0, "task": "none x1"}  # fmt: skip
BANDWIDTH = {"kind": "bandwidth", "bytes_per_second": 4.3e12}


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def check(folder: Path, call: str, clock: Clock, began: float | None = None) -> gpu_check.Check:
    options = argparse.Namespace(out=folder, minutes=MINUTES, pytest=[], again=False, keep_going=True)
    return gpu_check.Check(options, CALLS[call], dict(HEAD), clock, clock.now if began is None else began)


def several(maximum: float) -> st.SearchStrategy[list[float]]:
    """One number for each part; without denormals, which an engine in the same process flushes."""
    return st.lists(st.floats(0, maximum, allow_subnormal=False), min_size=8, max_size=8)


def run_down(parts: Sequence[Part], minutes: float, shares: Sequence[float], between: Sequence[float]) -> None:
    """A part uses some share of its seconds, all of them when it hangs, and something passes between two parts."""
    elapsed = 0.0
    for part, share, gap in zip(parts, shares, between, strict=False):
        elapsed += gap
        seconds = allowed(parts, part.name, elapsed, minutes)
        assert part.minimum - 1e-6 <= seconds <= part.maximum and (seconds == 0 or elapsed + seconds <= 60 * minutes)
        elapsed += share * seconds


@pytest.mark.parametrize("call", CALLS)
@given(shares=several(1), between=several(GAP))
def test_every_part_gets_its_reserved_time_and_the_call_ends_in_time(call: str, shares: list[float], between: list[float]) -> None:
    assert needed(CALLS[call]) <= MINUTES
    run_down(CALLS[call], MINUTES, shares, between)


@given(minima=several(300), more=several(600), shares=several(1), between=several(GAP))
def test_greedy_parts_leave_the_others_their_minimum(
    minima: list[float], more: list[float], shares: list[float], between: list[float]
) -> None:
    """Other parts, in the fewest minutes there can be."""
    parts = [Part(str(number), minimum + extra, minimum, "") for number, (minimum, extra) in enumerate(zip(minima, more, strict=True))]
    run_down(parts, needed(parts), shares, between)
    run_down(parts, needed(parts), [1.0] * 8, between)


def test_the_rows_of_readme_never_have_less_than_200_seconds() -> None:
    [rows] = [part for part in CALLS["first"] if part.name == "rows"]
    assert rows.minimum >= 200 and MINUTES < 10


def test_the_readme_has_the_seconds_of_every_part() -> None:
    text = (ROOT / "perf" / "gpu" / "README.md").read_text()
    for part in all_parts():
        maximum = "the rest" if part.name == "rest" else f"{part.maximum:.0f}"
        assert re.search(rf"\| `{part.name}` \|.*\| {maximum} \| {part.minimum:.0f} \|\n", text), part


SCENARIOS: dict[str, Callable[[str, float], float]] = {
    "everything hangs": lambda part, seconds: seconds,
    "probes hang": lambda part, seconds: seconds if part == "probes" else 5.0,
    "nothing compiles in time": lambda part, seconds: seconds if part in ("cache", "core") else 20.0,
    "all is quick": lambda part, seconds: 1.0,
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_call_on_a_clock_of_its_own(scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real order of parts and commands; a command takes the seconds it is given, or fewer."""
    clock, given_seconds = Clock(), {}

    def takes(part: str, seconds: float) -> None:
        given_seconds[part] = given_seconds.get(part, 0.0) + seconds
        clock.now += SCENARIOS[scenario](part, seconds)

    def try_all(names: list[str], put: Any, seconds: float) -> bool:
        takes("probes" if "device" in names else "other probes", seconds)
        for name in names:
            put({"kind": "probe", "name": name, "outcome": "passed", "seconds": 1.0, "message": ""})
        return True

    def run_command(command: list[str], seconds: float, *_: Any, **__: Any) -> int:
        groups = command[command.index("--groups") + 1 :] if "--groups" in command else []
        takes(groups[0] if groups else {"perf.gpu.warm": "cache"}.get(command[2], command[2]), seconds)
        return 0

    def run_tests(part: str, arguments: Any, passed: Any, file: Path, log: Path, seconds: float) -> int:
        takes(part, seconds)
        results.append(file, PASSED)
        return 0

    monkeypatch.setattr(probes, "try_all", try_all)
    monkeypatch.setattr(gpu_check, "run_command", run_command)
    monkeypatch.setattr(checks, "run_tests", run_tests)
    began = clock.now
    clock.now += 8.0  # imports
    check(tmp_path, "first", clock, began).run()
    assert clock.now - began <= 60 * MINUTES
    assert given_seconds["rows"] >= 200 and given_seconds["core"] >= 180
    assert list(given_seconds)[:4] == ["probes", "cache", "rows", "core"]
    if scenario == "all is quick":
        assert list(given_seconds)[4:] == ["other probes", "nodes"]


def test_all_probes_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here one after another: the first hangs, and what is left is not run and does not hang on."""
    clock, probed = Clock(), []

    def run_command(command: list[str], seconds: float, log: Path, errors: Path, **_: Any) -> int | None:
        probed.append(command[-1])
        for file in (log, errors):
            file.touch()
        clock.now += seconds if command[-1] == "b" else 1.0
        return None if command[-1] == "b" else 0

    monkeypatch.setattr(probes.time, "monotonic", clock)
    monkeypatch.setattr(probes, "run_command", run_command)
    monkeypatch.setattr(probes, "AT_ONCE", 1)
    found: list[dict[str, Any]] = []
    began = clock.now
    assert probes.try_all(["a", "b", "c", "d"], found.append, 90) is False
    assert clock.now - began == 90 and probed == ["a", "b"]
    assert {record["name"]: record["outcome"] for record in found} == {"a": "passed", "b": "failed", "c": "not_run", "d": "not_run"}
    assert "not over after 89 seconds" in found[1]["message"]


def test_essential_probes_and_kernels_come_first() -> None:
    known = probes.all_probes()
    early = probes.early_probes(known)
    assert tuple(early[: len(probes.EARLY)]) == probes.EARLY and probes.EARLY[: len(probes.ESSENTIAL)] == probes.ESSENTIAL
    assert all(name.startswith(probes.KERNEL) for name in early[len(probes.EARLY) :]) and len(early) > 20
    assert {name for name in known if name not in early} >= {"engine-fused-tree", "profiler", "engine-debug"}


def write(folder: Path, name: str, *records: dict[str, Any], **head: Any) -> None:
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in ({**HEAD, **head}, *records)))


def summary(part: str, green: bool, **more: Any) -> dict[str, Any]:
    return {"kind": "summary", "part": part, "green": green, "selected": [], "not_installed": [], **more}


@pytest.mark.parametrize(
    ("summaries", "verified", "all_ran"),
    [
        ([], False, False),
        ([summary("core", True)], True, False),
        ([summary("core", True), summary("tests", False)], False, True),
        ([summary("core", False), summary("core", True)], True, False),
        ([summary("core", True), summary("tests", True)], True, True),
        ([summary("core", True, selected=["-k", "x"])], False, False),
    ],
)
def test_latency_is_shown_where_the_checks_of_another_call_were_green(
    summaries: list[dict[str, Any]], verified: bool, all_ran: bool, tmp_path: Path
) -> None:
    write(tmp_path, "20260101-000001-gpu-latency.jsonl", BANDWIDTH, CYCLE)
    for number, one in enumerate(summaries):
        write(tmp_path, f"20260101-00000{number + 2}-gpu-check.jsonl", PASSED, one)
    evidence = results.gather(tmp_path)
    assert evidence is not None and evidence.verified is verified
    text = readme.section([evidence])
    assert ("1.11x (5.00 ms)" in text) is verified and ("4.30 TB/s" in text) is verified
    assert ("These are the core checks" in text) is (verified and not all_ran)


@pytest.mark.parametrize("other", [{"revision": "def"}, {"tree": "2"}, {"torch": "9"}, {"triton": "9"}, {"gpus": [{"name": "B"}]}])
def test_green_checks_of_other_code_or_another_gpu_verify_nothing(other: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, "20260101-000001-gpu-check.jsonl", PASSED, summary("core", True), **other)
    write(tmp_path, "20260101-000002-gpu-latency.jsonl", BANDWIDTH, CYCLE)
    evidence = results.gather(tmp_path)
    assert evidence is not None and evidence.rows and not evidence.verified
    assert results.gather(tmp_path, {**HEAD, "revision": "none of them"}) is None


def test_a_failure_does_not_take_the_place_of_a_figure(tmp_path: Path) -> None:
    failed, newer = {"kind": "failed", "task": "none x1", "case": "none", "error": "e"}, {**CYCLE, "milliseconds": 4.0}
    write(tmp_path, "20260101-000001-gpu-latency.jsonl", BANDWIDTH, failed, {"kind": "not_run", "task": "b", "error": "e"})
    assert results.gather(tmp_path).measured() == []  # type: ignore[union-attr]
    write(tmp_path, "20260101-000002-gpu-latency.jsonl", BANDWIDTH, newer)
    write(tmp_path, "20260101-000003-gpu-latency.jsonl", failed, {"kind": "begun", "task": "c"})
    evidence = results.gather(tmp_path)
    assert evidence is not None and evidence.measured() == ["none x1"]
    assert [row["kind"] for row in evidence.rows] == ["bandwidth", "cycle", "not_run", "bandwidth"]


def test_every_kind_of_gpu_has_a_column_of_the_newest_run_on_it(tmp_path: Path) -> None:
    """Green checks on one say nothing about another, whose figures stay away."""
    for number, (name, ms) in enumerate((("H200", 9.0), ("H100", 5.4), ("H200", 4.5), ("B200", 3.0))):
        more = {"gpus": [{"name": name}], "revision": f"r{number}"}
        write(tmp_path, f"20260101-00000{number}-gpu-latency.jsonl", BANDWIDTH, {**CYCLE, "milliseconds": ms}, **more)
        if name != "B200":
            write(tmp_path, f"20260101-00000{number}-gpu-check.jsonl", PASSED, summary("core", True), **more)
    found = results.gather_kinds(tmp_path)
    assert [results.gpu_name(evidence.head) for evidence in found] == ["B200", "H100", "H200"]
    text = readme.section(found)
    assert "| aim on an H200 | bound | found on H100 | found on H200 |" in text
    assert "| 1.20x (5.40 ms), not met | 1.00x (4.50 ms) |" in text and "(9.00 ms)" not in text and "(3.00 ms)" not in text
    assert "on one B200, 2026-01-01, revision r3: it has not come to the checks" in text
    assert text.count("Weights are random") == 2 and "On H100. Copy bandwidth" in text


def test_a_tree_is_known_by_its_code(tmp_path: Path) -> None:
    for name in ("graphspec/a.py", "tests/b.py", "perf/c.cpp", "docs/d.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    before = results.tree_digest(tmp_path)
    (tmp_path / "docs/d.md").write_text("y")
    assert results.tree_digest(tmp_path) == before
    (tmp_path / "perf/c.cpp").write_text("y")
    assert results.tree_digest(tmp_path) != before


def test_a_later_call_knows_what_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    known: list[set[str]] = []

    def run_tests(part: str, arguments: Any, passed: set[str], file: Path, log: Path, seconds: float) -> int:
        known.append(passed)
        return 5

    monkeypatch.setattr(checks, "run_tests", run_tests)
    monkeypatch.setattr(gpu_check, "run_command", lambda command, *_, **__: commands.append(command) or 0)
    write(tmp_path, "20260101-000001-gpu-check.jsonl", PASSED, {**PASSED, "name": "u", "outcome": "failed"}, summary("core", False))
    write(tmp_path, "20260101-000002-gpu-latency.jsonl", BANDWIDTH, CYCLE)
    later = check(tmp_path, "second", Clock())
    # Everything that is left of the tests is done.
    assert later.run() == 0 and later.green is True and known == [{"t"}]
    later.rows(100.0)
    assert commands[-1][commands[-1].index("--without") + 1] == "none x1"
    later.options.again = True
    later.tests(100.0)
    later.rows(100.0)
    assert known[-1] == set() and "--without" not in commands[-1]
    # Nothing ran, and nothing had.
    assert later.green is False


def test_the_demo_model_is_timed_only_where_the_checks_were_green(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(gpu_check, "run_command", lambda command, *_, **__: commands.append(command) or 0)
    later = check(tmp_path, "third", Clock())
    assert later.speed(100.0)[0] == 1 and not commands
    write(tmp_path, "20260101-000001-gpu-check.jsonl", PASSED, summary("core", True))
    assert later.speed(100.0)[0] == 0 and commands[0][2] == "perf.speed"


def test_checks_that_passed_are_left_out_by_their_whole_names(tmp_path: Path) -> None:
    passed, left_out = tmp_path / "passed", []

    def deselected(items: list[Any]) -> None:
        left_out.extend(items)

    passed.write_text("t.py::test_a\n")
    items = [SimpleNamespace(nodeid=f"t.py::test_{name}") for name in ("a", "ab")]
    hook = SimpleNamespace(pytest_deselected=deselected)
    records.pytest_collection_modifyitems(SimpleNamespace(getoption=lambda name: passed, hook=hook), items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == ["t.py::test_ab"] and [item.nodeid for item in left_out] == ["t.py::test_a"]


def test_a_run_without_remaining_tests_has_its_own_exit_code(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_a(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    passed = tmp_path / "passed"
    passed.write_text("test_it.py::test_a\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "perf.gpu.records", "--passed-before", str(passed), "-c", "pytest.ini"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == checks.NO_TESTS, done.stdout + done.stderr


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Of two of README's rows, plain and a tree, at the real shapes."""
    configs = bench.write_configs(tmp_path_factory.mktemp("configs"))
    with pretended_gpu():
        return [launch for case in (warm.ROWS[0], warm.ROWS[2]) for launch in warm.launches_of(case, *configs)]


def test_the_kernels_of_the_rows_are_known_ahead(launches: list[Any]) -> None:
    """Those of the layers, the draft and the tree, with the numbers that are compiled into them."""
    names = {launch.kernel.fn.__name__ for launch in launches}
    assert names >= {
        "_linear",
        "_position_attention",
        "_tree_attention",
        "_draft_topk",
        "_draft_level",
        "_tree_build",
        "_tree_walk",
        "_kv_move",
    }
    assert (kernels(launches), len(launches)) == (42, 383)
    # No layer's number is compiled into a kernel: the first layer, whose norm has no squares yet, and all others.
    written = [launch for launch in launches if launch.values.get("DIM") and launch.values.get("pool") is not None]
    assert len(written) > 64 and kernels(written[:32]) == 2


def kernels(launches: list[Any]) -> int:
    """How many there are to compile."""
    return len({Job.of(launch, GPUTarget("cuda", 90, 32)) for launch in launches})


def test_interpreted_kernels_are_not_compiled_ahead(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(warm, "INTERPRETED", True)
    with pytest.raises(SystemExit):
        warm.main([])
    assert "TRITON_INTERPRET" in capsys.readouterr().err


def test_the_whole_engine_gives_every_request_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a model so small that it means nothing, two cycles in flight."""
    real = engine.write_configs
    small = {**LLAMA_8B, **SMALL}, {**EAGLE3_8B, **SMALL, "num_hidden_layers": 1, "draft_vocab_size": 31}
    monkeypatch.setattr(engine, "write_configs", lambda folder: real(folder, *small))
    monkeypatch.setattr(engine.Bench, "milliseconds", lambda bench: {"median": 2.0})
    monkeypatch.setattr(engine, "REPEATS", 1)
    monkeypatch.setattr(
        engine, "CASES", (engine.CASES[0], bench.Case("none", latency.PLAIN, lanes=2), bench.Case("gone", latency.PLAIN, 0))
    )
    monkeypatch.setattr(engine.WholeEngine.throughput, "__defaults__", (1,))
    monkeypatch.setattr(engine.WholeEngine.first_token, "__defaults__", (1,))
    arguments = ["--device", "cpu", "--runtime", "eager", "--out", str(tmp_path), "--prompt", "12", "--tokens", "6"]
    assert engine.main(arguments) == 1, "the last case can't be"
    [file] = tmp_path.glob("*-gpu-engine.jsonl")
    head, *rows = results.read(file)
    assert head["kind"] == "provenance" and [row["kind"] for row in rows] == ["first_token", "engine", "engine", "failed"]
    assert rows[1]["synthetic"] and not rows[2]["synthetic"] and rows[2]["cycles_in_flight"] == 2 and rows[2]["acceptance_length"] == 1.0
    assert rows[2]["replay_tokens_per_second"] == 1000.0
    assert "failed" in capsys.readouterr().out and "first token, tree (5,4,8)" in "\n".join(readme.engine_lines(rows))


def test_a_baseline_without_its_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor leaves a graph out with a warning, and counts that."""
    before = static_decode.skipped_graphs()
    monkeypatch.setitem(counters["inductor"], "cudagraph_skips", before)
    log_cudagraph_skip_and_bump_counter("a buffer may move")
    assert static_decode.skipped_graphs() == before + 1
    with pytest.raises(CaptureError, match="compiled static cache: expected a step that is one CUDA graph, found 1 programs"):
        static_decode.require_graph(static_decode.skipped_graphs() - 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for manager in (None, SimpleNamespace(roots={})):
        monkeypatch.setattr(cudagraph_trees, "get_manager", lambda *_, manager=manager, **__: manager)
        with pytest.raises(CaptureError, match="none recorded"):
            static_decode.require_graph(static_decode.skipped_graphs())
    monkeypatch.setattr(cudagraph_trees, "get_manager", lambda *_, **__: SimpleNamespace(roots={0: ["graph"]}))
    static_decode.require_graph(static_decode.skipped_graphs())


ENDED = """
import sys
from pathlib import Path
from perf import gpu_check
from perf.gpu import install
gpu_check.has_cuda = lambda: True
def probes(check, seconds):
    gpu_check.append(check.file, {"kind": "probe", "name": "device", "outcome": "passed", "seconds": 1.0, "message": ""})
    print("begun", flush=True)
    gpu_check.run_command([sys.executable, "-c", "import time; time.sleep(60)"], 60, check.log)
    return 0, ""
gpu_check.Check.probes = probes
sys.exit(gpu_check.main(["--only", "probes", "--out", sys.argv[1]]))
"""


def test_what_was_found_is_packed_when_a_call_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDED, str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "begun" not in process.stdout.readline():
            assert process.poll() is None
        process.terminate()
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + 15 and results.ARCHIVE in output
    with tarfile.open(tmp_path / "out" / results.ARCHIVE) as archive:
        archive.extractall(tmp_path / "back", filter="data")
    [file] = (tmp_path / "back").glob("*.jsonl")
    assert [record["kind"] for record in results.read(file)] == ["provenance", "probe"]


def test_figures_carry_the_name_of_their_gpu() -> None:
    assert "| found on NVIDIA H100 80GB HBM3 |" in readme.target_lines([("NVIDIA H100 80GB HBM3", [CYCLE])])[0]
    assert readme.target_lines([])[0] == "| aim on an H200 | bound | found |"
    assert [latency.GROUPS.index(name) for name in ("rows", "parallel", "baselines")] == [0, 1, 2]

"""``make gpu-check`` without a GPU: a case that fails, crashes, hangs or takes too long is reported and affects no other case."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from graphspec.api import llm as llm_module
from graphspec.api.llm import LLM
from graphspec.errors import ResourceError
from graphspec.graphs.cycle import Cycle
from graphspec.graphs.stages.mailbox import Message
from graphspec.kernels import OPS, select_kernels
from graphspec.lab.measure.stages import Probe, kernel_timeline
from graphspec.shapes import GREEDY, CycleShape
from perf import gpu_check
from perf.gpu import bench, checks, latency, probes, processes, results, static_decode
from perf.gpu.bench import EAGLE3_8B, LLAMA_8B
from perf.gpu.latency import Session, interrupted_rows, run
from tests.support.gpu_configs import SMALL, small_jetspec
from tests.support.tiny import structure_plan, tiny_networks

ROOT = Path(__file__).resolve().parents[2]
SMALL_DRAFT = {**SMALL, "num_hidden_layers": 1, "draft_vocab_size": 31}

CHECKS = """
import os, time, pytest
def test_passes(): pass
def test_fails(): assert 1 + 1 == 3
def test_skips(): pytest.skip("why")
@pytest.fixture
def broken(): raise ValueError("no fixture")
def test_around(broken): pass
def test_ends_its_process(): os._exit(11)
@pytest.mark.seconds(0.5)
def test_hangs(): time.sleep(60)
def test_says_that_a_capture_failed():
    time.sleep(0.3)
    raise RuntimeError("operation not permitted when stream is capturing")
@pytest.mark.parametrize("n", range(4))
def test_others(n): pass
"""

LATE = """
import time, pytest
@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    send = node.sendcommand
    def late(name, **arguments):
        if name == "steal":
            time.sleep(2)
        send(name, **arguments)
    node.sendcommand = late
"""
"""What xdist asks a process for comes after that process has ended."""

TORCH = """
class cuda:
    synchronize = staticmethod(lambda: None)
class ones:
    def __init__(self, *_, **__): pass
    def item(self): pass
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A folder of checks under the conftest of the real ones."""
    folder = tmp_path / "suite"
    folder.mkdir()
    shutil.copy(ROOT / "tests" / "gpu" / "conftest.py", folder)
    (folder / "test_checks.py").write_text(CHECKS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = seconds(limit)\n")
    # A device that is well, and an import that takes no time.
    (folder / "torch.py").write_text(TORCH)
    return folder


@pytest.mark.parametrize("controller", ["", LATE], ids=["in-time", "late"])
def test_other_checks_are_recorded_whatever_one_does(suite: Path, controller: str) -> None:
    file = suite / "records.jsonl"
    (suite / "controller.py").write_text(controller)
    command = [
        sys.executable, "-m", "pytest", str(suite), "-q", "-p", "no:cacheprovider", "-p", "perf.gpu.records", f"--records={file}",
        "-p", "controller", "--numprocesses", "2", "--dist", "worksteal", "--max-worker-restart", "9",
        "--rootdir", str(suite), "-c", str(suite / "pytest.ini"),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": str(suite)})
    records = results.read(file)
    outcomes = {record["name"].rpartition("::")[2]: record["outcome"] for record in records}
    assert outcomes == {
        "test_passes": "passed", "test_fails": "failed", "test_skips": "skipped", "test_around": "error", "test_ends_its_process": "failed",
        "test_hangs": "failed", "test_says_that_a_capture_failed": "failed", **{f"test_others[{n}]": "passed" for n in range(4)},
    }, done.stdout + done.stderr  # fmt: skip
    assert len(records) == len(outcomes) and done.returncode == 1
    messages = {record["name"].rpartition("::")[2]: record["message"] for record in records}
    assert "(1 + 1) == 3" in messages["test_fails"] and "why" in messages["test_skips"] and "no fixture" in messages["test_around"]
    assert "crashed" in messages["test_hangs"] and "stream is capturing" in messages["test_says_that_a_capture_failed"]


def test_a_hanging_check_reports_its_position(suite: Path) -> None:
    """In one process it takes the run with it, but not what was written."""
    file = suite / "records.jsonl"
    command = [sys.executable, "-m", "pytest", str(suite), "-q", "-p", "perf.gpu.records", f"--records={file}", "-k", "passes or hangs"]
    command += ["-c", str(suite / "pytest.ini")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": str(suite)})
    assert "in test_hangs" in done.stderr and done.returncode == 1
    # The longest come first.
    assert [(record["name"].rpartition("::")[2], record["outcome"]) for record in results.read(file)] == [("test_passes", "passed")]


def test_other_tests_of_the_same_run_have_no_limit(tmp_path: Path, suite: Path) -> None:
    """pytest calls that hook for every test once a folder's conftest is loaded: slow tests elsewhere took their worker with them."""
    other = tmp_path / "test_beside.py"
    other.write_text("import time\ndef test_slow(): time.sleep(2)\n")
    conftest = suite / "conftest.py"
    conftest.write_text(conftest.read_text().replace("SECONDS = 120.0", "SECONDS = 1.0"))
    command = [sys.executable, "-m", "pytest", str(other), str(suite), "-q", "-k", "slow or passes", "-c", str(suite / "pytest.ini")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": str(suite)})
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


def test_gpu_tests_are_collected_and_left_out_by_default(tmp_path: Path) -> None:
    file, log = tmp_path / "records.jsonl", tmp_path / "log"
    assert checks.run_tests("tests", ["--collect-only"], [], file, log, 100) == 0, log.read_text()[-2000:]
    assert "test_captured_equals_direct_bitwise" in log.read_text() and not file.exists()
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "not gpu" in options["addopts"][-1]


PASSED = {"kind": "check", "name": "t", "outcome": "passed", "seconds": 1.0, "message": ""}
PROBES = [{"kind": "probe", "name": name, "outcome": "passed", "seconds": 1.0, "message": "fine"} for name in probes.ESSENTIAL]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the parts find: probes, checks and the exit code of pytest; commands that were run, and tests known before, are kept."""
    found: dict[str, Any] = {"probes": PROBES, "checks": [PASSED], "code": 0, "commands": [], "known": []}

    def run_tests(part: str, arguments: Any, passed: Any, file: Path, log: Path, seconds: float) -> int | None:
        found["known"].append(sorted(passed))
        for check in found["checks"]:
            results.append(file, check)
        return found["code"]

    def try_all(names: Any, put: Any, seconds: float) -> bool:
        for probe in found["probes"]:
            if probe["name"] in names:
                put(probe)
        return all(probe["outcome"] == "passed" for probe in found["probes"])

    def run_command(command: list[str], *_: Any, **__: Any) -> int:
        found["commands"].append(command)
        return 0

    monkeypatch.setattr(gpu_check, "has_cuda", lambda: True)
    monkeypatch.setattr(checks, "run_tests", run_tests)
    monkeypatch.setattr(probes, "try_all", try_all)
    monkeypatch.setattr(gpu_check, "run_command", run_command)
    return found


@pytest.mark.parametrize(
    ("code", "found", "green"),
    [
        (0, [PASSED, PASSED], True),
        (1, [PASSED, {**PASSED, "outcome": "failed"}], False),
        (0, [PASSED, {**PASSED, "outcome": "skipped"}], False),
        (5, [], False),
        (3, [PASSED], False),
        (None, [PASSED], False),
    ],
)
@pytest.mark.parametrize("part", ["core", "tests"])
def test_a_result_file_has_provenance_and_summary(
    part: str, code: int | None, found: list[dict[str, object]], green: bool, tmp_path: Path, parts: dict[str, Any]
) -> None:
    parts |= {"code": code, "checks": found}
    assert gpu_check.main(["--out", str(tmp_path), "--only", part]) == (0 if green else 1)
    [file] = tmp_path.glob("*.jsonl")
    head, *middle, summary, last = results.read(file)
    assert file.name.endswith("-gpu-check.jsonl")
    assert head["kind"] == "provenance" and middle == found
    assert summary["kind"] == "summary" and summary["green"] is green
    assert last["kind"] == "part" and last["name"] == part


def test_a_choice_of_tests_proves_nothing(tmp_path: Path, parts: dict[str, Any]) -> None:
    assert gpu_check.main(["--out", str(tmp_path), "--only", "tests", "--", "-k", "bitwise"]) == 0
    [file] = tmp_path.glob("*.jsonl")
    [summary] = [record for record in results.read(file) if record["kind"] == "summary"]
    assert summary["green"] is False and summary["selected"] == ["-k", "bitwise"]


def test_what_can_not_work_is_not_begun(tmp_path: Path, parts: dict[str, Any]) -> None:
    kernel = {**PROBES[0], "name": "kernel-linear", "outcome": "failed", "message": "Traceback\nno"}
    parts["probes"] = [*PROBES[:1], {**PROBES[1], "outcome": "failed"}, *PROBES[2:], kernel]
    assert gpu_check.main(["--out", str(tmp_path / "a")]) == 1 and not parts["commands"]
    assert gpu_check.main(["--out", str(tmp_path / "b"), "--keep-going"]) == 1 and parts["commands"]
    # A kernel that fails is for the tests to look into, and one that was not tried is tried again.
    parts["probes"] = [*PROBES, kernel, {**kernel, "name": "kernel-moe_mlp", "outcome": "not_run"}]
    parts["commands"].clear()
    assert gpu_check.main(["--out", str(tmp_path / "c")]) == 1 and parts["commands"]
    [file] = (tmp_path / "c").glob("*.jsonl")
    tried = [record["name"] for record in results.read(file) if record["kind"] == "probe"]
    assert tried == [*probes.ESSENTIAL, "kernel-linear", "kernel-moe_mlp", "kernel-moe_mlp"]


def test_too_few_minutes_are_refused(tmp_path: Path, parts: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--out", str(tmp_path), "--minutes", "5"])
    assert "--minutes: expected at least 8.7 for these parts, found 5" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The process and its children are killed, even if they ignore SIGINT; output up to then is kept."""
    started = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('begun', flush=True); time.sleep(600)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {started!r}])"
    log = tmp_path / "log"
    assert processes.run_command([sys.executable, "-c", program], 4, log, show=True) is None
    assert "begun" in log.read_text() and "begun" in capsys.readouterr().out
    assert processes.run_command([sys.executable, "-c", "import sys; print('x', file=sys.stderr); sys.exit(7)"], 30, log) == 7
    assert log.read_text().endswith("x\n")


def test_every_process_has_the_same_folder_of_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor would set another folder after the first kernels are compiled, and precompiled kernels would not be found."""
    show, log = "import os; print(os.environ['TRITON_CACHE_DIR'])", tmp_path / "log"
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert processes.run_command([sys.executable, "-c", show], 30, log) == 0
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert processes.run_command([sys.executable, "-c", show], 30, log) == 0
    assert log.read_text().split() == [str(Path.home() / ".triton" / "cache"), "/elsewhere"]


def test_latency_goes_on_after_the_case_that_ended_its_process(
    tmp_path: Path, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = [gpu_check.AGAIN, -11, 0]

    def run_command(command: Any, *_: Any, **__: Any) -> int:
        with Path(command[command.index("--file") + 1]).open("a") as sink:
            sink.write("{}\n")
        return codes.pop(0)

    monkeypatch.setattr(gpu_check, "run_command", run_command)
    gpu_check.main(["--out", str(tmp_path), "--only", "rows"])
    assert codes == [] and gpu_check.AGAIN == latency.AGAIN


def session(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], tasks: dict[str, Any]) -> Session:
    monkeypatch.setattr(latency, "tasks", lambda session: tasks.items())
    options = latency.argparse.Namespace(seconds=100.0, device="cuda", match=None, groups=latency.GROUPS)
    return Session(options, {"eagle3": (Path(), Path())}, 1.0, rows.append)


def test_a_case_that_fails_costs_no_other_and_a_lost_device_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    rows: list[dict[str, Any]] = []
    found = {"a": lambda: {"kind": "cycle"}, "b": fails, "c": lambda: {"kind": "cycle"}}
    monkeypatch.setattr(latency, "unusable", lambda: False)
    assert run(session(monkeypatch, rows, found), {}) is False
    assert [row["kind"] for row in rows if row["kind"] != "begun"] == ["cycle", "failed", "cycle"]
    monkeypatch.setattr(latency, "unusable", lambda: True)
    rows.clear()
    with pytest.raises(SystemExit, match=str(latency.AGAIN)):
        run(session(monkeypatch, rows, found), {"a": "cycle"})
    assert [(row["kind"], row["task"]) for row in rows] == [("begun", "b"), ("failed", "b")]


def test_what_was_begun_and_never_ended_counts_as_failed(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    rows = [{"kind": "provenance"}, {"kind": "cycle", "task": "a"}, {"kind": "begun", "task": "b"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "cy')
    found = interrupted_rows(file)
    assert found[:2] == rows[:2] and found[2]["kind"] == "failed" and found[2]["task"] == "b"
    assert interrupted_rows(tmp_path / "none") == []


def test_every_task_of_latency_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a model so small that it means nothing, without a compiler and without CUDA."""
    real = latency.write_configs
    small = {"llama": ({**LLAMA_8B, **SMALL}, {**EAGLE3_8B, **SMALL_DRAFT}), "qwen3": small_jetspec(SMALL)}
    monkeypatch.setattr(latency, "write_configs", lambda folder, target=LLAMA_8B, _=None: real(folder, *small[target["model_type"]]))
    monkeypatch.setattr(latency, "VARIANTS_AT_ONE", ())
    monkeypatch.setattr(latency, "measure", lambda run, rewind, *_: (rewind(), run(), {"median": 1.0, "p10": 1.0, "p90": 1.0})[-1])
    monkeypatch.setattr(bench, "measure", latency.measure)
    monkeypatch.setattr(bench.Bench, "host_microseconds", lambda self: 1.0)
    monkeypatch.setattr(latency, "copy_bandwidth", lambda *_: 1e9)
    monkeypatch.setattr(latency, "transformers_generate", partial(latency.transformers_generate, tokens=2))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    file = tmp_path / "latency.jsonl"
    assert latency.main(["--device", "cpu", "--runtime", "eager", "--buckets", "1", "2", "--file", str(file)]) == 0, capsys.readouterr().out
    rows = results.read(file)
    cycles = [*["cycle"] * 4, "draft_step", *["cycle"] * 4, "baseline", "baseline", *["cycle"] * 3]
    assert [row["kind"] for row in rows] == ["provenance", "bandwidth", *cycles, "stages"]
    assert len({row["task"] for row in rows[2:]}) == len(rows) - 2
    # Nothing is left to do.
    assert latency.main(["--device", "cpu", "--runtime", "eager", "--buckets", "1", "2", "--file", str(file)]) == 0
    assert results.read(file) == rows
    # Cases of other files are left out, and so are groups that were not selected.
    other, known = tmp_path / "other.jsonl", [row["task"] for row in rows if row["kind"] == "cycle"]
    assert latency.main(["--device", "cpu", "--runtime", "eager", "--groups", "rows", "--file", str(other), "--without", *known]) == 0
    assert [row["kind"] for row in results.read(other)] == ["provenance", "bandwidth", "draft_step"]


def test_every_probe_has_a_name_and_reports_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    known = probes.all_probes()
    assert set(probes.ESSENTIAL) <= set(known) and len(known) > 30
    if not torch.cuda.is_available():
        record = probes.attempt("device", time.monotonic() + probes.SECONDS)
        assert record["outcome"] == "failed" and ("CUDA" in probes.line(record) or "NVIDIA" in probes.line(record)), record


def test_the_probes_pass_where_they_can_run_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine probe against itself: what it calls exists, and tokens that differ are noticed."""
    monkeypatch.setattr(probes, "OPTIONS", {**probes.OPTIONS, "device": "cpu", "buckets": [2]})
    real = probes.tokens

    def eager(shape: str, runtime: str, **keys: Any) -> Any:
        return real(shape, "eager", mode="reference")

    monkeypatch.setattr(probes, "tokens", eager)
    assert "tokens equal" in probes.engine("none", "fused")
    monkeypatch.setattr(probes, "tokens", lambda *a, **k: (eager(*a, **k)[0], [[id(k)], [time.perf_counter()]]))
    with pytest.raises(AssertionError, match="tokens differ"):
        probes.engine("none", "fused")


def test_the_probe_of_a_default_engine_gives_it_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every class that is prepared by default is among what it compiled, and requests of both are served."""
    made: list[dict[str, Any]] = []

    def build(**keys: Any) -> LLM:
        made.append(keys)
        llm = LLM(runtime="eager", max_rows=1, buckets=[1], max_context=256, num_steps=2, topk=1, num_draft_tokens=3)
        llm._engine.prepare(1, *llm.plan.sampling_classes)
        return llm

    monkeypatch.setattr(llm_module, "LLM", build)
    assert "programs built" in probes.all_probes()["engine-defaults"]()
    assert made == [{}]
    assert "0 of 0 kernels compiled before their launch" in probes.all_probes()["engine-classes"]() and "sampling_classes" not in made[1]
    monkeypatch.setattr(llm_module, "LLM", lambda **_: LLM(runtime="eager", max_rows=1, buckets=[1], max_context=256))
    with pytest.raises(AssertionError):
        probes.defaults()


def test_an_empty_profile_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a process may not use CUPTI: no figure, and the run goes on."""

    class Blind:
        def __init__(self, **_: Any) -> None:
            pass

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def events(self) -> list[Any]:
            return []

    monkeypatch.setattr(torch.profiler, "profile", Blind)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(ResourceError, match="none in 5 of 5"):
        kernel_timeline(lambda: None, lambda: None)
    plan = structure_plan("chain", device="cpu", runtime="eager", buckets=[1], max_rows=1)
    networks = tiny_networks(plan)
    cycle = Cycle(plan, networks.target, networks.draft, select_kernels("reference", "auto", "cpu"))
    key = plan.key(1, GREEDY)
    cycle.prepare([key])
    probe = Probe(cycle, key, after=1)
    before = cycle.arena["seq_len_R"].clone()
    for _ in range(3):
        probe.read(probe.launch(key, Message(lanes=())))
    assert probe.found == {} and "none in 5 of 5" in probe.missing and torch.equal(cycle.arena["seq_len_R"], before)


def test_the_shortest_loop_marks_its_static_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the compiler makes no CUDA graph of a step that writes in place, and the loop would look slower than it is."""
    marked: list[tuple[int, ...]] = []
    monkeypatch.setattr(static_decode, "mark_static_address", lambda tensor: marked.append(tuple(tensor.shape)))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    folders = bench.write_configs(tmp_path, {**LLAMA_8B, **SMALL}, {**EAGLE3_8B, **SMALL_DRAFT})
    engine = bench.Bench(bench.Case("none", CycleShape(0, 1, 1), context=1), *folders, device="cpu", runtime="eager")
    static_decode.compiled_step(engine.networks[0], 16)
    assert marked == [(8, 2, 1, 2, 16, 8), (1, 1), (1, 1)]


def test_no_operator_has_a_default_for_what_it_writes() -> None:
    """Torch 2.11 does not pass arguments that equal their default, and then misses written ones."""
    for op in OPS:
        for name in op.fused_names:
            op.implementation(name)
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("graphspec::")]
    assert len(schemas) >= len(OPS)
    for schema in schemas:
        assert [a.name for a in schema.arguments if a.has_default_value() and a.alias_info and a.alias_info.is_write] == [], schema.name

"""``graphspec profile``: workloads, workers, every kind of side, the gate, times inside the cycle, and one whole run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Self

import pytest

from graphspec.cli import main as cli
from graphspec.config.command_options import LaunchConfig, ProfileConfig, WorkloadConfig
from graphspec.config.schema import RuntimeConfig
from graphspec.errors import ConfigError, GraphspecError, ResourceError
from graphspec.lab.measure import compare, profile
from graphspec.lab.measure.compare import Measured
from graphspec.lab.measure.equality import Reference, judge
from graphspec.lab.measure.metrics import Timeline
from graphspec.lab.measure.process import WorkerProcess
from graphspec.lab.measure.sides import SideConfig, for_workload, plain_config, reference_of, sides_of
from graphspec.lab.measure.worker import Worker
from graphspec.lab.measure.workload import held_out_texts, make_workload
from recipes import held_out
from recipes.corpus import HELD_OUT
from tests.support.engines import Pair
from tests.support.profile import launch


def spell(text: str) -> list[int]:
    return [ord(letter) % 44 for letter in text]


def test_prompts_that_are_shipped_come_from_modules_no_demo_model_was_trained_on() -> None:
    rows = [json.loads(line) for line in held_out.TARGET.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 32 and all(len(row["prompt"]) >= 600 and row["source"] in HELD_OUT for row in rows)
    assert [row["prompt"] for row in rows] == held_out_texts() and len(set(held_out_texts())) == 32
    text = "".join(f"line {i}\n" for i in range(300))
    assert held_out.cut(text, 0.5).startswith("line") and text.count(held_out.cut(text, 0.5)) == 1


def test_workloads_are_equal_for_all_sides_and_of_the_requested_length(tmp_path: Path) -> None:
    config = LaunchConfig(workload=WorkloadConfig(requests=40, input_tokens=30))
    one, two = (make_workload(config, spell, 44) for _ in range(2))
    assert one == two and one.digest == two.digest and len(one.requests) == 40 and {len(request.prompt) for request in one.requests} == {30}
    assert one.requests[0].prompt == one.requests[32].prompt and one.requests[0].seed + 32 == one.requests[32].seed
    spread = WorkloadConfig(source="random", requests=50, input_tokens=20, input_spread=0.5, seed=3)
    drawn = make_workload(LaunchConfig(workload=spread), spell, 44)
    lengths = {len(request.prompt) for request in drawn.requests}
    assert min(lengths) >= 10 and max(lengths) <= 30 and len(lengths) > 5
    assert {token for request in drawn.requests for token in request.prompt} <= set(range(44))
    assert make_workload(LaunchConfig(workload=replace(spread, seed=4)), spell, 44).digest != drawn.digest
    file = tmp_path / "prompts.jsonl"
    file.write_text('"abc"\n{"prompt": "defg"}\n', encoding="utf-8")
    read = make_workload(LaunchConfig(workload=WorkloadConfig(source="file", file=str(file), input_tokens=None, requests=2)), spell, 44)
    assert [request.prompt for request in read.requests] == [spell("abc"), spell("defg")]


@pytest.mark.parametrize(
    ("text", "message"), [('{"text": 1}\n', "prompt"), ("{\n", "JSON"), ("\n", "at least one prompt"), ('""\n', "empty")]
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        make_workload(LaunchConfig(workload=WorkloadConfig(source="file", file=str(file))), spell, 44)
    with pytest.raises(ConfigError, match="readable"):
        make_workload(LaunchConfig(workload=WorkloadConfig(source="file", file=str(tmp_path / "none"))), spell, 44)
    with pytest.raises(ConfigError, match="path of a file"):
        make_workload(LaunchConfig(workload=WorkloadConfig(source="file")), spell, 44)


def test_sides_follow_from_the_baselines() -> None:
    config = LaunchConfig(baseline=["none", "self", "hf"])
    assert [side.role for side in sides_of(config)] == ["subject", "none", "self", "hf"] and reference_of(sides_of(config)) is None
    plain = sides_of(config)[1].config
    assert plain.variant.name == "none" and plain.model == config.model and plain.workload == config.workload
    # Without plain decoding among them it is run for the check alone; plain decoding itself needs no other.
    alone = LaunchConfig(baseline=["hf"])
    needed = reference_of(sides_of(alone))
    assert needed is not None and needed.config.variant.name == "none"
    assert [side.role for side in sides_of(plain_config(config))] == ["subject", "self", "hf"]
    assert reference_of(sides_of(plain_config(alone))) is None
    with pytest.raises(ConfigError, match=r"workload\.batch"):
        sides_of(LaunchConfig(baseline=["hf_lookup"], workload=WorkloadConfig(batch=2)))
    with pytest.raises(ConfigError, match="baseline"):
        LaunchConfig(baseline=["vllm"])


def test_an_engine_has_the_rows_of_the_workload() -> None:
    runtime = RuntimeConfig(buckets=[1, 2, 4, 8], depth_per_bucket={8: 2, 2: 3})
    three = for_workload(LaunchConfig(workload=WorkloadConfig(batch=3), runtime=runtime)).runtime
    assert (three.max_rows, three.buckets, three.depth_per_bucket) == (3, [1, 2, 4], {2: 3})
    assert three.prefix_cache is False, "prompts repeat from round to round"
    twelve = for_workload(LaunchConfig(workload=WorkloadConfig(batch=12), runtime=runtime)).runtime
    assert (twelve.max_rows, twelve.buckets) == (12, [1, 2, 4, 8, 12])


def about(**changes: Any) -> dict[str, Any]:
    return {"synthetic": False, "lossy": False, "rule": "match", "temperature": 0.0, "shape": [3, 3, 10], "label": "x", **changes}


def test_one_wrong_token_is_a_wrong_side() -> None:
    config = LaunchConfig()
    right = Reference([[1, 2, 3], [4, 5]], ["a", "b"])
    subject, hf, api = SideConfig("subject", config), SideConfig("hf", config), SideConfig("openai", config)
    good = [([[1, 2, 3], [4, 5]], ["a", "b"])] * 2
    bad = [good[0], ([[1, 2, 3], [4, 6]], ["a", "b"])]
    assert judge(subject, about(), good, right, ()).equal is True
    verdict = judge(subject, about(), bad, right, ())
    assert verdict.equal is False and "3 of 4" in verdict.sentence and "request 1 differs first at token 1" in verdict.sentence
    assert judge(subject, about(), [([[1, 2], [4, 5]], ["a", "b"])], right, ()).equal is False
    assert judge(hf, about(), bad, right, ()).equal is False
    # Where equality can't be checked, the verdict is None.
    assert judge(hf, about(temperature=1.0), bad, right, ()).equal is None
    reported = judge(api, about(), [([None, None], ["a", "c"])], right, ())
    assert reported.equal is None and "1 of 2 outputs (50 %)" in reported.sentence
    # A server's numerics are its own: tokens that agree are equal, others decide nothing.
    assert judge(api, about(), good, right, ()).equal is True
    near = judge(api, about(), bad, right, ())
    assert near.equal is None and "3 of 4" in near.sentence
    assert judge(subject, about(lossy=True, rule="target_only"), bad, right, ()).equal is None
    assert judge(subject, about(rule="rejection", temperature=1.0), bad, right, ()).equal is None
    assert judge(subject, about(rule="rejection"), bad, right, ()).equal is False
    checks = [{"equal": True, "sentence": "one"}, {"equal": False, "sentence": "two"}]
    forced = judge(subject, about(synthetic=True), bad, right, checks)
    assert forced.equal is False and forced.sentence == "one; two"
    assert judge(subject, about(synthetic=True), bad, right, checks[:1]).equal is True


class FakeWorker:
    """A stand-in for a worker: one token per burst, each side with its own speed; ``log`` records ``(side, request)`` in order."""

    log: list[tuple[str, str]]
    wrong: str

    def __init__(self, name: str, timeout: float, say: object = None) -> None:
        self.name, self.rounds = name, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.log.append((self.name, "close"))

    def ask(self, do: str, **values: Any) -> Any:
        self.log.append((self.name, do))
        if do == "prepare":
            extra = {"digest": "d", "dtype": "float32", "device": "cpu", "input_tokens": 3.0, "variant": "v", "provenance": {"command": []}}
            return about(label=self.name) | extra
        if do != "round":
            return {"warm_up": 1, "profile": {"cycle_ms": None, "bandwidth": 1.0}, "generations": [{"prompt": "p", "cycles": []}]}[do]
        self.rounds += 1
        step = {"subject": 1.0, "self": 1.25, "none": 2.0, "hf": 4.0}[self.name] * self.rounds
        tokens = [1, 2, 9 if self.name == self.wrong and self.rounds == 2 else 3]
        line = Timeline(0.0, [(step * (i + 1), 1) for i in range(3)], 3 * step, "length")
        core_wait = {"none": 0.01 * self.rounds, "hf": None}.get(self.name, 0.5 * self.rounds)
        return {"timelines": [line.to_json()], "tokens": [tokens], "texts": ["t"], "core_wait": core_wait}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    monkeypatch.setattr(compare, "WorkerProcess", FakeWorker)
    FakeWorker.log, FakeWorker.wrong = [], ""
    return FakeWorker


def test_sides_take_turns_and_ratios_are_against_plain_decoding(fake: type[FakeWorker]) -> None:
    config = LaunchConfig(baseline=["none", "hf"], profile=ProfileConfig(rounds=3, generations=1))
    measured, rows = profile.profile(config, sides_of(config))
    turns = [name for name, do in fake.log if do == "round"]
    assert turns == ["subject", "none", "hf", "hf", "none", "subject", "subject", "none", "hf"]
    assert [row["side"] for row in rows] == ["subject", "subject", "none", "hf"] and rows[1]["kind"] == "generation"
    sides = {row["side"]: row for row in rows if row["kind"] == "side"}
    assert sides["subject"]["ratio"] == {"to": "none", "median": pytest.approx(2), "rounds": pytest.approx([2, 2, 2])}
    assert sides["none"]["ratio"] is None and sides["hf"]["ratio"]["median"] == pytest.approx(0.5)
    assert [sides[name]["core_wait"] for name in ("subject", "none", "hf")] == [1.0, 0.02, None], "medians over rounds"
    assert "side" in str(profile.table(list(sides.values()), "t").columns[0].header) and len(measured) == 3


def test_the_same_again_is_held_against_the_first(fake: type[FakeWorker]) -> None:
    """A against A; plain decoding runs once, for the check alone."""
    config = LaunchConfig(baseline=["self"], profile=ProfileConfig(rounds=1, generations=0))
    _, [subject, again] = profile.profile(config, sides_of(config))
    assert subject["ratio"] is None and again["side"] == "self, again" and again["ratio"]["to"] == "subject"
    assert again["ratio"]["median"] == pytest.approx(0.8) and again["equal"] is True
    assert fake.log[:3] == [("none", "prepare"), ("none", "round"), ("none", "close")] and ("none", "warm_up") not in fake.log


@pytest.mark.parametrize("interleave", [True, False])
def test_a_side_that_is_wrong_once_gets_no_figure_at_all(
    fake: type[FakeWorker], interleave: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.wrong = "subject"
    config = LaunchConfig(
        baseline=["none"], results=str(tmp_path), format="json", profile=ProfileConfig(rounds=3, generations=1, interleave=interleave)
    )
    assert profile.run(config) == 1
    reported = json.loads(capsys.readouterr().out.splitlines()[-1])
    wrong, right = reported["records"]
    assert wrong["equal"] is False and "2 of 3" in wrong["equality"] and wrong["side"] == "subject"
    assert not {
        key for key in wrong if "tokens_per_second" in key or key.endswith("_ms") or key in ("ratio", "stages", "acceptance_length")
    }
    assert right["equal"] is True and right["tokens_per_second"]["median"] > 0
    kinds = [json.loads(line).get("kind") for line in Path(reported["file"]).read_text(encoding="utf-8").splitlines()]
    assert kinds[1:] == ["side", "side"]
    profile.Console().print(profile.table([wrong, right], "case"))
    assert "NO" in capsys.readouterr().out
    order = [name for name, do in fake.log if do in ("prepare", "close")]
    assert order == (["subject", "none", "none", "subject"] if interleave else ["subject", "subject", "none", "none"])


def test_a_busy_machine_is_reported_below_the_table(fake: type[FakeWorker], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = LaunchConfig(baseline=["none", "hf"], results=str(tmp_path), profile=ProfileConfig(rounds=1, generations=0))
    assert profile.run(config) == 0
    assert "per second timed: subject 0.50." in capsys.readouterr().out


def test_secrets_stay_out_of_result_files(tmp_path: Path) -> None:
    config = LaunchConfig(results=str(tmp_path), profile=ProfileConfig(api_key="hush"))
    head = {"kind": "provenance", "config": {"profile": {"api_key": "hush"}}, "command": ["profile", "profile.api_key=hush", "x=1"]}
    subject = Measured(SideConfig("subject", config), about(provenance=head))
    files = [profile._write(config, subject, [{"kind": "side"}]) for _ in range(3)]
    assert len(set(files)) == 3, "two cases within one second share no file"
    assert "hush" not in files[0].read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=r"profile\.trace"):
        profile.run(LaunchConfig(profile=ProfileConfig(trace=str(tmp_path / "no" / "t.json"))))


def test_a_worker_answers_in_its_own_process_and_refuses_by_name() -> None:
    worker = Worker()
    with pytest.raises(GraphspecError, match="a command of this worker"):
        worker.answer("dance")
    with WorkerProcess("subject", 60.0) as process:
        with pytest.raises(GraphspecError, match=r"a command of this worker, found 'dance' \(side 'subject'\)"):
            process.ask("dance")
        with pytest.raises(ResourceError, match=r"side 'subject', round.*ended with code 1.*AttributeError"):
            process.ask("round")


def test_a_worker_reports_progress(pair: Pair) -> None:
    """Phase, count and total of loading and of every program, in order, before the answer."""
    lines: list[str] = []
    with WorkerProcess("subject", 120.0, lines.append) as process:
        about = process.ask("prepare", role="subject", config=launch(pair), command=[], like=None)
    assert about["dtype"] == "float32"
    found = [re.fullmatch(r"subject: ([a-z ]+), (\d+) of (\d+)", line) for line in lines]
    assert found and all(found)
    phases: dict[str, list[tuple[int, int]]] = {}
    for match in found:
        assert match is not None
        phases.setdefault(match[1], []).append((int(match[2]), int(match[3])))
    assert {"load target", "load draft"} < set(phases)
    for steps in phases.values():
        assert steps == sorted(steps) and len({total for _, total in steps}) == 1
        assert steps[-1][0] == steps[-1][1]


def test_progress_does_not_stretch_the_time_limit() -> None:
    lines: list[str] = []
    chatty = WorkerProcess.__new__(WorkerProcess)
    chatty.name, chatty.timeout, chatty.say = "chatty", 0.05, lines.append
    chatty._connection, theirs = Pipe()
    for done in range(3):
        theirs.send({"progress": ["phase", done, 2]})
    with pytest.raises(TimeoutError):
        chatty._answer()
    assert lines == [f"chatty: phase, {done} of 2" for done in range(3)]


def test_a_silent_worker_is_killed() -> None:
    with WorkerProcess("slow", 0.05) as process, pytest.raises(ResourceError, match=r"side 'slow', warm_up.*within 0.05 seconds"):
        process.ask("warm_up", seconds=1.0)
    assert process._process.returncode is not None


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", ["graphspec", "profile"])
    return None


@pytest.mark.usefixtures("quiet")
def test_a_whole_run(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Subject and plain decoding, each in its own process."""
    trace = tmp_path / "trace.json"
    profile_config = ProfileConfig(rounds=2, warm_up_seconds=0.0, trace=str(trace), timeout_seconds=120.0)
    config = launch(pair, baseline=["none"], results=str(tmp_path / "results"), profile=profile_config, batch=2)
    assert profile.run(config) == 0
    shown = capsys.readouterr().out
    [file] = (tmp_path / "results").iterdir()
    assert str(file) in shown.replace("\n", "") and "tokens of 6 of 6 outputs equal those of plain decoding" in shown
    head, *rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert head["kind"] == "provenance" and head["command"] == ["graphspec", "profile"] and head["plan"]["num_draft_tokens"] == 10
    sides = [row for row in rows if row["kind"] == "side"]
    assert [row["role"] for row in sides] == ["subject", "none"] and [row["equal"] for row in sides] == [True, True]
    assert sides[0]["side"] == "eagle3 tree (3,3,10)" and sides[0]["ratio"]["to"] == "none" and sides[1]["ratio"] is None
    assert sides[0]["acceptance_length"] > 1 and len(sides[0]["tokens_per_second"]["rounds"]) == 2
    assert sides[0]["stages"] and sides[0]["bandwidth"] > 0 and sides[0]["batch"] == 2 and sides[0]["aborted"] == 0
    assert [row["kind"] for row in rows].count("generation") == 1
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert head["trace"] == "../trace.json", "relative to the result file"
    lengths = sides[0]["acceptance_by_request"]
    assert list(lengths) == ["0", "1", "2"] and min(lengths.values()) <= sides[0]["acceptance_length"] <= max(lengths.values())
    assert sides[1]["acceptance_by_request"] == {} and sides[1]["acceptance_along_text"] == [] and sides[0]["acceptance_along_text"]
    for row in sides:
        times = [moment for moment, _ in row["first_request"]]
        assert times == sorted(times) and sum(tokens for _, tokens in row["first_request"]) == row["output_tokens"]


def test_the_controlling_process_imports_no_torch() -> None:
    modules = ("torch", "transformers", "numpy")
    imports = "import sys; import graphspec.lab.measure.profile, graphspec.lab.measure.worker"
    code = f"{imports}; print([m for m in {modules} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_a_sweep_runs_one_case_after_the_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hydra's own launcher composes every case and calls the command for each; the worst exit code is the command's."""
    seen: list[tuple[int | None, int]] = []

    def run(config: LaunchConfig) -> int:
        seen.append((config.variant.num_steps, config.workload.batch))
        return int(config.variant.num_steps == 2)

    monkeypatch.setattr(profile, "run", run)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        cli.main(["profile", "--multirun", "variant=eagle3", "variant.topk=1", "variant.num_steps=2,4", "workload.batch=1,3"])
    assert seen == [(2, 1), (2, 3), (4, 1), (4, 3)] and left.value.code == 1
    capsys.readouterr()

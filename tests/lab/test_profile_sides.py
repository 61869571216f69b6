"""Sides of ``graphspec profile``, ours and those of transformers: rounds, times inside the cycle, traces, recorded trees."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import pytest
import torch

from graphspec.api.llm import LLM
from graphspec.config.command_options import LaunchConfig, ProfileConfig
from graphspec.config.schema import AcceptConfig, SamplingConfig
from graphspec.errors import ConfigError, ResourceError
from graphspec.lab.measure import compare, profile
from graphspec.lab.measure.compare import Bench, Measured
from graphspec.lab.measure.engine_side import EngineSide
from graphspec.lab.measure.generations import record_generation
from graphspec.lab.measure.hf_side import HfSide
from graphspec.lab.measure.metrics import Timeline, figures
from graphspec.lab.measure.recorder import TRACKS, MarkedProgram, Recorder, chrome_trace, stage_timer
from graphspec.lab.measure.selfcheck import ComparingReplay, check_runtime
from graphspec.lab.measure.sides import SideConfig, plain_config, sides_of
from graphspec.lab.measure.stages import Probe, kernel_timeline, summarise_kernels
from graphspec.plan.runtime import Runtime
from tests.support.engines import Pair
from tests.support.profile import launch


@pytest.fixture(scope="module")
def side(pair: Pair) -> EngineSide:
    return EngineSide(launch(pair, batch=2))


def test_a_round_records_every_token_and_its_time(side: EngineSide, pair: Pair) -> None:
    reported = side.round()
    outputs = side.llm.generate([request.prompt for request in side.workload.requests], side.params)
    assert (
        reported["tokens"]
        == [output.token_ids for output in outputs]
        == [pair.greedy(a.prompt, 12, ignore_eos=True) for a in side.workload.requests]
    )
    lines = [Timeline.from_json(json.loads(json.dumps(row))) for row in reported["timelines"]]
    assert [line.tokens for line in lines] == [12, 12, 12] and all(line.bursts[0][1] == 1 and line.served for line in lines)
    for line in lines:
        assert [cycle.tokens for cycle in line.cycles] == [tokens for _, tokens in line.bursts[1:]] and min(line.itl) > 0
        assert all(cycle.depth == 3 and cycle.drafted == 9 for cycle in line.cycles)
    # Two users: the third request is sent when the first has its answer.
    assert lines[0].arrived == lines[1].arrived and lines[2].arrived == min(lines[0].finished, lines[1].finished)
    described = side.describe()
    assert described["label"] == "eagle3 tree (3,3,10)" and described["shape"] == [3, 3, 10] and described["attention"] == "reference"
    assert described["memory"] and described["build"] and json.dumps(described["memory"])


def test_a_request_that_is_refused_ends_the_run_before_it_starts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "warm_up", lambda *_, **__: pytest.fail("programs were built"))
    with pytest.raises(ResourceError, match=r"request 0: expected one that can be served, found .*prompt"):
        EngineSide(launch(pair, input_tokens=96, requests=1))


def test_acceptance_is_that_of_the_engine(side: EngineSide) -> None:
    reported = side.round()
    found = figures([compare.Round([Timeline.from_json(row) for row in reported["timelines"]])])
    assert side.llm.metrics is not None
    assert found["acceptance_length"] == pytest.approx(side.llm.metrics.acceptance_length)
    assert found["acceptance_unconditional"] == pytest.approx(side.llm.metrics.accepted_per_position)
    assert 1 < found["acceptance_length"] < 4, "drafts of this pair are right now and then"


def test_stages_and_cycles_are_timed_without_changing_a_token(side: EngineSide, monkeypatch: pytest.MonkeyPatch) -> None:
    before = side.round()["tokens"]
    monkeypatch.setattr("graphspec.lab.measure.stages.copy_bandwidth", lambda *args, **kwargs: 1e9)
    found = side.profile()
    assert found["bandwidth"] == 1e9
    names = [stage["name"] for stage in found["stages"]]
    assert names == ["mailbox", "draft_extend", "draft_steps", "tree_build", "verify", "accept", "commit_state", "commit"]
    timed = {stage["name"]: stage for stage in found["stages"]}
    assert timed["verify"]["bytes"] > 0 and timed["verify"]["percent_of_floor"] > 0 and timed["accept"]["bytes"] is None
    total = sum(stage["ms"] for stage in found["stages"])
    assert 0 < found["host_us"] / 1e3 < found["cycle_ms"]["p90"] and 0.3 < total / found["cycle_ms"]["median"] < 3
    assert found["floor_ms"] == pytest.approx(sum(s["floor_ms"] for s in found["stages"] if s["floor_ms"] is not None))
    assert found["nodes"] is None and set(found["not_measured"]) == {"nodes", "gap_ms"}
    assert side.round()["tokens"] == before
    assert all(program.replay is None and "clocked" not in program.direct.__name__ for program in side.llm.cycle.programs.values())


def test_a_floor_that_is_beaten_gives_no_percentage(side: EngineSide, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a CPU is measured for each side: what another one touched says nothing about this one."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("graphspec.lab.measure.stages.copy_bandwidth", lambda *_, **words: asked.append(words) or 1e3)
    found = side.profile(1e15)
    floors = {stage["name"]: stage["floor_ms"] for stage in found["stages"]}
    assert found["bandwidth"] == 1e3 and asked[0]["working_set"] > 0.3 * floors["verify"]
    assert found["floor_ms"] > found["cycle_ms"]["median"] and found["percent_of_floor"] is None
    assert "faster than the floor" in found["not_measured"]["percent_of_floor"]
    assert floors["verify"] > 0 and all(stage["percent_of_floor"] is None for stage in found["stages"])


def test_a_trace_is_one_perfetto_loads(side: EngineSide) -> None:
    events = json.loads(json.dumps(side.trace()))
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in events if event["ph"] == "M"} == {"process_name", "thread_name"}
    assert {event["tid"] for event in spans} == set(TRACKS.values())
    for event in spans:
        assert event["ts"] >= 0 and event["dur"] >= 0 and event["pid"] == 1 and isinstance(event["args"], dict) and event["name"]
    programs = [event for event in spans if event["cat"] == "device" and event["name"].startswith("cycle")]
    stages = [event for event in spans if event["cat"] == "stages"]
    assert programs and len(stages) >= 8
    for stage in stages:
        inside = [p for p in programs if p["ts"] - 1 <= stage["ts"] and stage["ts"] + stage["dur"] <= p["ts"] + p["dur"] + 1]
        assert len(inside) == 1, stage
    assert chrome_trace([], "nothing")[0]["args"]["name"] == "nothing"


def test_a_generation_holds_every_tree_and_all_of_the_text(side: EngineSide) -> None:
    request, params = side.workload.requests[1], side.params[1]
    record = record_generation(side.llm, request.prompt, params)
    output = side.llm.generate(request.prompt, params)
    text = output[0].text
    emitted = "".join(piece for cycle in record["cycles"] for piece in cycle["emitted"])
    assert record["prompt"] + emitted == side.llm.tokenizer.decode(request.prompt) + text
    assert len(record["cycles"]) == output[0].metrics.cycles
    run, branching = [output[0].token_ids[0]], 0
    for cycle in record["cycles"]:
        nodes = cycle["nodes"]
        root = nodes[0]
        assert (root["token"], root["parent"], root["depth"], root["probability"], root["accepted"]) == (run[-1], -1, 0, 1.0, True)
        for place, node in enumerate(nodes[1:], 1):
            above = nodes[node["parent"]]
            assert node["parent"] < place and node["depth"] == above["depth"] + 1 and 0 < node["probability"] <= above["probability"] + 1e-6
            assert above["accepted"] or not node["accepted"]
        path = [node["token"] for node in nodes if node["accepted"]][1:]
        count = len(cycle["emitted"])
        run += output[0].token_ids[len(run) : len(run) + count]
        # The tokens that came are the accepted nodes and the bonus; the last cycle may be cut by the budget.
        assert run[-count:][: len(path)] == path[:count] and (count == len(path) + 1 or cycle is record["cycles"][-1])
        branching += len({node["parent"] for node in nodes}) < len(nodes) - 1
    assert run == output[0].token_ids and branching
    # With the sampler's noise in its scores a drafter reports no probabilities.
    hot = record_generation(side.llm, request.prompt, replace(params, temperature=1.0, seed=0))
    assert hot["cycles"][0]["nodes"][1]["probability"] is None


def test_plain_decoding_is_recorded_too(pair: Pair) -> None:
    plain = EngineSide(plain_config(launch(pair, requests=1)))
    [record] = plain.generations(3)
    assert plain.describe()["label"] == "none" and plain.describe()["shape"] is None
    assert all(len(cycle["nodes"]) == 1 and len(cycle["emitted"]) == 1 for cycle in record["cycles"]) and len(record["cycles"]) == 11


def test_stages_are_timed_only_on_request(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphspec.lab.measure.stages.copy_bandwidth", lambda *args, **kwargs: 1e9)
    one = EngineSide(launch(pair, requests=1, profile=ProfileConfig(stages=False)))
    found = one.profile()
    assert found["stages"] == [] and found["not_measured"]["stages"] == "profile.stages=false" and found["cycle_ms"]["median"] > 0
    # Nothing but a prefill: no cycle follows another.
    short = EngineSide(launch(pair, requests=1, output_tokens=1)).profile()
    assert short["cycle_ms"] is None and "cycle_ms" in short["not_measured"]


def test_a_stage_timer_leaves_the_state_alone(side: EngineSide) -> None:
    cycle = side.llm.cycle
    key = side.llm.plan.key(2, side.params[0].sampling_class)
    before = cycle.arena.snapshot(("mail", "state", "ring"))
    timer = stage_timer(cycle, key)
    assert len(timer.milliseconds()) == len(cycle.programs[key].stages)
    for name, tensor in before.items():
        assert torch.equal(cycle.arena[name], tensor), name


class FakeEvent:
    """A CUDA event whose clock ticks once for every record."""

    clock = 0

    def __init__(self) -> None:
        self.time = -1

    def record(self) -> None:
        FakeEvent.clock += 1
        self.time = FakeEvent.clock

    def elapsed_time(self, end: FakeEvent) -> float:
        return float(end.time - self.time)


class FakeCapturer:
    """Keeps what it captured; replaying runs it."""

    def capture(self, program: Any) -> Any:
        program()
        return program


def test_marks_between_captured_stages_time_each_of_them(side: EngineSide) -> None:
    """One event before the first stage and one after every stage, recorded again by each replay, in order."""
    program = side.llm.cycle.programs[side.llm.plan.key(1, side.params[0].sampling_class)]
    order: list[str] = []

    class Stand:
        stages = program.stages
        steps: ClassVar[list[Any]] = [lambda name=stage.name: (order.append(name), FakeEvent().record())[0] for stage in program.stages]

    for capturer in (FakeCapturer(), None):
        order.clear()
        marked = MarkedProgram(Stand, FakeEvent, capturer)  # type: ignore[arg-type]
        first = 0
        for _ in range(2):
            order.clear()
            marked()
            assert order == [stage.name for stage in program.stages]
            # One tick by the stage itself, one by the mark after it.
            assert marked.milliseconds() == [2.0] * len(order)
            assert marked._events[0].time > first  # type: ignore[attr-defined]
            first = marked._events[0].time  # type: ignore[attr-defined]


class AsCuda:
    """A cycle whose plan says that it is captured on a GPU."""

    def __init__(self, cycle: Any) -> None:
        self.real, self.plan = cycle, replace(cycle.plan, device="cuda", runtime=Runtime("captured"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def test_a_captured_run_is_timed_by_its_marks(side: EngineSide, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way a GPU is measured, on a stand-in: capture with marks, replay in place of the program, wait, read the events."""
    waits: list[int] = []
    monkeypatch.setattr("graphspec.lab.measure.recorder.Capturer", lambda arena: FakeCapturer())
    monkeypatch.setattr("graphspec.lab.measure.recorder.external_event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits.append(1))
    before = side.round()["tokens"]
    cycle: Any = AsCuda(side.llm.cycle)
    free = Recorder(side.llm.cycle)
    side.run_with(free)
    key = free.most_common()
    assert key is not None
    timer = stage_timer(cycle, key)
    assert isinstance(timer, MarkedProgram)
    recorder = Recorder(cycle, wait=True, timers={key: timer})
    assert [output.token_ids for output in side.run_with(recorder)] == before
    assert len(waits) == len(recorder.launches)
    stages = recorder.stage_milliseconds(key)
    assert [name for name, _ in stages] == [stage.name for stage in side.llm.cycle.programs[key].stages]
    # Marks tick once each: every stage took one tick, in every cycle of this program.
    assert all(times == [1.0] * len(times) and times for _, times in stages)
    assert len(stages[0][1]) == sum(one.key == key for one in recorder.launches)
    for whole, outside in recorder.cycle_times(key):
        assert 0 < outside < whole
    assert all(one.busy == one.ready - one.launched >= 0 for one in recorder.launches)


def test_the_profiler_sees_one_replay_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class FakeProfile:
        def __init__(self, activities: Any) -> None:
            self.start = 10.0 * len(order)

        def __enter__(self) -> Self:
            order.append("open")
            return self

        def __exit__(self, *error: object) -> None:
            order.append("close")

        def events(self) -> list[Any]:
            def event(device: str, start: float, end: float) -> Any:
                when = SimpleNamespace(start=self.start + start, end=self.start + end)
                return SimpleNamespace(device_type=SimpleNamespace(name=device), time_range=when, name="k")

            return [event("CUDA", 5.0, 7.0), event("CPU", 0.0, 90.0), event("CUDA", 0.0, 4.0)]

    monkeypatch.setattr(torch.profiler, "profile", FakeProfile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = kernel_timeline(lambda: order.append("run"), lambda: order.append("rewind"), replays=2)
    assert order == ["rewind", "open", "run", "close"] * 3
    assert found["nodes"] == 2 and found["busy_ms"] == pytest.approx(0.006) and found["gap_ms"] == pytest.approx(0.001)


def test_nodes_and_gaps_come_from_what_the_profiler_saw() -> None:
    calls = [[(0.0, 10.0, "a"), (15.0, 20.0, "b"), (18.0, 40.0, "a")], [(100.0, 110.0, "a"), (112.0, 117.0, "b"), (115.0, 140.0, "a")]]
    found = summarise_kernels(calls)
    assert found["nodes"] == 3 and found["span_ms"] == pytest.approx(0.04)
    # Idle: 5 in the first call, 2 in the second; kernels that overlap leave no gap.
    assert found["gap_ms"] == pytest.approx(0.0035) and found["busy_ms"] == pytest.approx((37 + 40) / 2 / 1e3)
    assert found["kernels"][0] == {"name": "a", "calls": 2, "microseconds": 35.0}


def test_the_probe_looks_at_one_cycle_and_changes_nothing(side: EngineSide, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def timeline(program: Any, rewind: Any) -> dict[str, Any]:
        with torch.no_grad():
            for _ in range(3):
                rewind()
                program()
        looked.append(1)
        return {"nodes": 7, "gap_ms": 0.5}

    monkeypatch.setattr("graphspec.lab.measure.stages.kernel_timeline", timeline)
    before = side.round()["tokens"]
    cycle = side.llm.cycle
    free = Recorder(cycle)
    side.run_with(free)
    key = free.most_common()
    assert key is not None
    probe = Probe(cycle, key, after=2)
    outputs = side.run_with(probe)
    assert looked == [1] and probe.found["nodes"] == 7 and [output.token_ids for output in outputs] == before


def test_a_replay_that_differs_from_its_direct_launch_is_found(side: EngineSide) -> None:
    cycle, before = side.llm.cycle, side.round()["tokens"]
    sound, broken = ComparingReplay(cycle), ComparingReplay(cycle)
    try:
        for program in cycle.programs.values():
            program.replay = program.direct
        assert [output.token_ids for output in side.run_with(sound)] == before
        assert sound.launches > 5 and sound.difference == ""
        for key, program in cycle.programs.items():
            if key in cycle.plan.graph_keys(side.params[0].sampling_class):

                def off_by_one(direct: Any = program.direct) -> None:
                    direct()
                    cycle.arena["accept_len_B"][0] += 1

                program.replay = off_by_one
        side.run_with(broken)
        assert "accept_len_B" in broken.difference
    finally:
        for program in cycle.programs.values():
            program.replay = None


def test_the_runtime_is_checked_where_acceptance_is_forced(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    config = launch(pair, accept=AcceptConfig(rule="synthetic", synthetic_length=2.0))
    assert check_runtime(config)["equal"] is True
    compared: list[tuple[str, str]] = []

    def diff(config: LaunchConfig, left: str, right: str, prompt: list[int], tokens: int) -> Any:
        compared.append((left, right))
        from graphspec.api.diff import DiffReport

        return DiffReport(False, 3, 2, "verify", "logits_BNV", "[0]: 1 against 2")

    monkeypatch.setattr("graphspec.lab.measure.selfcheck.diff", diff)
    reported = check_runtime(replace(config, runtime=replace(config.runtime, name="compiled")))
    assert (
        compared == [("eager", "compiled")]
        and reported["equal"] is False
        and "logits_BNV differs after stage verify of launch 2" in reported["sentence"]
    )


@pytest.mark.parametrize("role", ["hf", "hf_assisted", "hf_lookup"])
def test_transformers_gives_the_same_tokens_and_says_when(pair: Pair, role: str) -> None:
    config = launch(pair, profile=ProfileConfig(assistant=str(pair.target)), requests=2)
    side = HfSide(role, config, "float32", "cpu")
    reported = side.round()
    assert reported["tokens"] == [pair.greedy(request.prompt, 12, ignore_eos=True) for request in side.workload.requests]
    lines = [Timeline.from_json(row) for row in reported["timelines"]]
    assert [line.tokens for line in lines] == [12, 12] and all(line.ttft > 0 and line.reason == "length" for line in lines)
    assert side.describe()["digest"] == EngineSide(config).describe()["digest"]
    sizes = {tokens for line in lines for _, tokens in line.bursts}
    if role != "hf_lookup":
        assert (max(sizes) > 1) is (role == "hf_assisted"), "an assistant that is the target itself is right many times in a row"


def test_transformers_pads_a_batch_and_stops_each_row_for_itself(pair: Pair) -> None:
    config = launch(pair, batch=2, ignore_eos=False, sampling=SamplingConfig(stop_token_ids=[7, 21]))
    config.workload.input_spread = 0.5
    side = HfSide("hf", config, "float32", "cpu")
    reported = side.round()
    assert reported["tokens"] == [pair.greedy(request.prompt, 12, stop=[7, 21]) for request in side.workload.requests]
    assert len({len(request.prompt) for request in side.workload.requests}) > 1
    with pytest.raises(ConfigError, match=r"sampling\.presence_penalty"):
        HfSide("hf", replace(config, sampling=SamplingConfig(presence_penalty=1.0)), "float32", "cpu")
    with pytest.raises(ConfigError, match=r"profile\.assistant"):
        HfSide("hf_assisted", config, "float32", "cpu")


def test_forced_acceptance_is_held_to_a_twin_and_to_its_stages(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stand-ins must hold; the record says SYNTHETIC either way."""
    config = launch(pair, baseline=["none"], accept=AcceptConfig(rule="synthetic", synthetic_length=2.0))
    sides = {side.role: EngineSide(side.config) for side in sides_of(config)}
    twin = EngineSide(replace(config, accept=AcceptConfig()))

    class Here(Bench):
        """Runs sides in this process."""

        def run(self, one: SideConfig, engine: EngineSide) -> Measured:
            reported = engine.round()
            found = Measured(one, engine.describe())
            found.rounds.append(compare.Round([Timeline.from_json(row) for row in reported["timelines"]]))
            found.outputs.append((reported["tokens"], reported["texts"]))
            return found

        def measure(self, wanted: Any) -> list[Measured]:
            return [self.run(side, sides[side.role]) for side in wanted]

        def reference(self, side: SideConfig) -> Measured:
            assert side.config.accept == AcceptConfig() and side.config.variant == config.variant
            return self.run(side, twin)

        def check(self, side: SideConfig) -> dict[str, Any]:
            assert side.config.accept.rule == "synthetic"
            return {"equal": sound, "sentence": "stages"}

    monkeypatch.setattr(profile, "Bench", Here)
    for sound in (True, False):
        _, rows = profile.profile(config, sides_of(config))
        assert rows[0]["synthetic"] is True and rows[0]["equal"] is sound and "rule match" in rows[0]["equality"]
        assert ("tokens_per_second" in rows[0]) is sound
        assert rows[1]["equal"] is True

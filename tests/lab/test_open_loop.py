"""Open-loop workloads: when requests arrive, which were served in time, and rounds whose tokens are those of plain decoding."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from graphspec.config.command_options import LaunchConfig, WorkloadConfig
from graphspec.errors import ConfigError
from graphspec.lab.measure import compare
from graphspec.lab.measure.compare import Measured
from graphspec.lab.measure.engine_side import EngineSide
from graphspec.lab.measure.metrics import Round, Timeline
from graphspec.lab.measure.open_loop import arrivals, describe, figures, gaps_while_prompts_arrive, play, read_trace, table, within_limits
from graphspec.lab.measure.results import read_results
from graphspec.lab.measure.sides import SideConfig, plain_config, sides_of
from graphspec.lab.measure.workload import make_workload
from graphspec.lab.report.tables import loads, spell
from graphspec.lab.tune.command import check as check_tune
from tests.support.engines import Pair
from tests.support.profile import launch

POISSON: dict[str, Any] = {"arrivals": "poisson", "rate": 50.0}


def test_poisson_arrivals_have_the_rate_and_repeat() -> None:
    workload = WorkloadConfig(requests=4000, **POISSON)
    times = arrivals(workload)
    assert times == arrivals(workload) == sorted(times) and times[0] == 0 and len(times) == 4000
    assert times != arrivals(replace(workload, seed=1))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    # Of an exponential distribution the deviation is the mean, and 1 - 1/e of the gaps are below it.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)
    assert sum(gap < mean for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.03)


def test_bursts_arrive_together_at_the_same_mean_rate() -> None:
    times = arrivals(WorkloadConfig(requests=4002, arrivals="bursts", rate=50.0, burst=4))
    groups = [times[at : at + 4] for at in range(0, 4002, 4)]
    assert all(len(set(group)) == 1 for group in groups) and len(set(times)) == len(groups) and len(groups[-1]) == 2
    assert times[-1] / 4000 == pytest.approx(1 / 50, rel=0.1)


def test_a_trace_sets_arrival_times_and_lengths(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {"arrival": 7.5, "input_tokens": 30, "output_tokens": 5}, {"arrival": 5.0, "prompt": "abc"}, {"arrival": 5.25, "input_tokens": 3},
        {"arrival": 90, "input_tokens": 1},
    ]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    workload = WorkloadConfig(arrivals="trace", trace=str(file), requests=3, long_input_tokens=20, output_tokens=9)
    found = make_workload(LaunchConfig(workload=workload), lambda text: [ord(letter) - 97 for letter in text], 44)
    assert found.arrivals == [0.0, 0.25, 2.5] and found.long == (False, False, True)
    assert [len(request.prompt) for request in found.requests] == [3, 3, 30] and found.requests[0].prompt == [0, 1, 2]
    assert [request.output_tokens for request in found.requests] == [None, None, 5]
    other = make_workload(LaunchConfig(workload=replace(workload, seed=1)), lambda text: [ord(letter) - 97 for letter in text], 44)
    assert other.digest != found.digest


@pytest.mark.parametrize(
    "line",
    [
        "[]", '{"arrival": -1, "prompt": "a"}', '{"arrival": true, "prompt": "a"}', '{"arrival": 1}', '{"arrival": 1, "input_tokens": 0}',
        '{"arrival": 1, "prompt": "a", "input_tokens": 3}', '{"arrival": 1, "input_tokens": 2, "output_tokens": 1.5}',
        '{"arrival": 1, "input_tokens": 2000000000000}',
    ],
)  # fmt: skip
def test_a_line_that_is_no_request_is_refused_by_its_place(line: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"arrival": 0, "prompt": "a"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2.*arrival"):
        read_trace(WorkloadConfig(arrivals="trace", trace=str(file)))
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="at least one request"):
        read_trace(WorkloadConfig(arrivals="trace", trace=str(file)))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"arrivals": "often"}, "arrivals"), ({"arrivals": "poisson"}, "rate"), ({"rate": 2.0}, "rate"), ({**POISSON, "rate": 0.0}, "rate"),
        ({"arrivals": "trace"}, "trace"), ({**POISSON, "trace": "x.jsonl"}, "trace"), ({"long_every": 2}, "long_every"),
        ({**POISSON, "itl_limit_ms": 0.0}, "itl_limit_ms"), ({**POISSON, "burst": 0}, "burst"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_together_are_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"workload\.{named}"):
        WorkloadConfig(**keys)


def test_closed_loop_sides_refuse_an_open_loop() -> None:
    open_loop = LaunchConfig(workload=WorkloadConfig(**POISSON), baseline=["none", "hf"])
    with pytest.raises(ConfigError, match=r"workload\.arrivals.*baseline=hf"):
        sides_of(open_loop)
    with pytest.raises(ConfigError, match=r"workload\.arrivals"):
        check_tune(open_loop)


class ScriptedClock:
    """A clock that advances only in ``sleep``, which is too short the first time, and in work."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, list[float]()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds / 2 if len(self.slept) == 1 and seconds > 0.5 else seconds


def test_requests_are_submitted_when_they_are_due_and_count_from_then() -> None:
    clock, submitted = ScriptedClock(), list[tuple[int, float]]()

    def submit(number: int) -> None:
        submitted.append((number, clock.now))
        # The second one holds its caller up.
        clock.now += 3.0 if number == 1 else 0.0

    due = play([0.0, 1.0, 2.0, 8.0], submit, clock, clock.sleep)
    assert due == [100.0, 101.0, 102.0, 108.0], "also of one that was submitted late"
    assert submitted == [(0, 100.0), (1, 101.0), (2, 104.0), (3, 108.0)]


def line(arrived: float, *bursts: float, reason: str = "length") -> Timeline:
    return Timeline(arrived, [(moment, 2) for moment in bursts], bursts[-1] if bursts else arrived, reason)


def test_goodput_counts_requests_inside_both_limits() -> None:
    workload = WorkloadConfig(requests=4, **POISSON, ttft_limit_ms=500, itl_limit_ms=200)
    lines = [line(0, 0.5, 0.7), line(1, 1.6, 1.7), line(2, 2.1, 2.2, 2.5), line(3, reason="abort")]
    assert [within_limits(one, 500, 200 + 1e-6) for one in lines] == [True, False, False, False]
    found = figures([Round(lines[:3]), Round(lines[1:])], replace(workload, itl_limit_ms=300.1), [False] * 3)
    assert found["goodput"] | {"per_second": None} == {
        "share": 3 / 6, "requests": 6, "within": 3, "per_second": None, "ttft_limit_ms": 500, "itl_limit_ms": 300.1,
    }  # fmt: skip
    assert found["goodput"]["per_second"] == pytest.approx(3 / (2.5 + 2.0)) and found["offered_per_second"] == 4 / 4
    assert found["gap_while_long_prompts_ms"] is None


def test_gaps_are_those_that_touch_the_reading_of_another_long_prompt() -> None:
    running = line(0, 1, 2, 3, 4, 5, 6, 8)
    long = line(2.5, 4.5, 5.5)
    assert gaps_while_prompts_arrive([running, long], [False, True]) == [1, 1, 1]
    assert gaps_while_prompts_arrive([running, long], [False, False]) == []
    assert gaps_while_prompts_arrive([running, line(6.5, 7.5), line(7, 7.75)], [False, True, True]) == [2], "one gap counts once"
    assert gaps_while_prompts_arrive([running, line(9, 10), line(-2, -1)], [False, True, True]) == []
    assert gaps_while_prompts_arrive([long], [True]) == [], "not its own"


def test_a_round_over_the_resident_engine(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides give the tokens that a closed loop gives, and the record has the figures of the load next to those of every record."""
    workload: dict[str, Any] = {
        "source": "random", "input_tokens": 6, "requests": 8, "batch": 3, "output_tokens": 10, "long_every": 4, "long_input_tokens": 40,
        "ttft_limit_ms": 1e6, "itl_limit_ms": 1e6, "arrivals": "poisson", "rate": 500.0,
    }  # fmt: skip
    config: LaunchConfig = launch(pair, workload=WorkloadConfig(**workload))
    sides = [SideConfig("subject", config), SideConfig("none", plain_config(config))]
    measured = []
    for side in sides:
        engine = EngineSide(side.config)
        one = Measured(side, engine.describe())
        for _ in range(2):
            answer = engine.round()
            one.rounds.append(Round([Timeline.from_json(row) for row in json.loads(json.dumps(answer["timelines"]))]))
            one.outputs.append((answer["tokens"], answer["texts"]))
        assert answer["tokens"] == [output.token_ids for output in engine.run_with(None)]
        assert [len(request.prompt) for request in engine.workload.requests] == [6, 6, 6, 40] * 2
        due = [timeline.arrived - one.rounds[-1].timelines[0].arrived for timeline in one.rounds[-1].timelines]
        assert due == pytest.approx(arrivals(side.config.workload))
        measured.append(one)
        engine.llm.close()
    assert measured[0].about["digest"] == measured[1].about["digest"]
    compare.set_verdicts(measured, None)
    rows = compare.records("case", measured)
    for row in rows:
        assert row["equal"] is True and row["ratio"] is None and row["arrivals"] == describe(config.workload)
        assert row["open_loop"]["goodput"]["within"] == row["open_loop"]["goodput"]["requests"] == 16
        assert row["ttft_ms"]["count"] == 16 and row["itl_ms"]["count"] > 16 and row["open_loop"]["long_prompts"] == 2
    shown = table(rows, "case")
    assert shown.row_count == 2 and "1e+06" in str(shown.caption)
    wrong = replace_tokens(measured[0])
    compare.set_verdicts([wrong, measured[1]], None)
    [row, _] = compare.records("case", [wrong, measured[1]])
    assert row["equal"] is False and "open_loop" not in row and table([row], "case").row_count == 1


def side_record(rate: float, role: str, open_loop: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "side", "case": f"case, {rate:g}/s", "side": role, "role": role, "variant": "none", "batch": 2, "equal": True, "rounds": 2,
        "arrivals": f"poisson, {rate:g}/s", "tokens_per_second": {"median": 10 * rate, "rounds": [10 * rate] * 2},
        "ttft_ms": {"p50": 20.0, "p99": 30.0}, "itl_ms": {"p50": 2.0, "p99": 3.0}, "open_loop": open_loop,
    }  # fmt: skip


def test_the_report_keeps_every_load_and_shows_none_as_speed(tmp_path: Path) -> None:
    goodput = {"within": 7, "requests": 8, "share": 0.875, "ttft_limit_ms": 500.0, "itl_limit_ms": 100.0}
    rows = [
        side_record(rate, "none", {"offered_per_second": rate, "goodput": goodput, "gap_while_long_prompts_ms": None})
        for rate in (8.0, 2.0)
    ]
    file = tmp_path / "r.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    results = read_results([str(file)])
    assert len(results.sides) == 2 and all(side.speed is None for side in results.sides), "one baseline for each load"
    shown = loads(results)
    assert [row[1:5] for row in shown.rows] == [[f"poisson, {rate}/s", spell(rate), "7 of 8", "500 / 100"] for rate in (2, 8)]
    closed = [{**row, "open_loop": None, "arrivals": "closed"} for row in rows[:1]]
    old = [{key: value for key, value in closed[0].items() if key not in ("arrivals", "open_loop")}]
    file.write_text("\n".join(map(json.dumps, old + closed)) + "\n", encoding="utf-8")
    results = read_results([str(file)])
    assert len(results.sides) == 1 and results.sides[0].speed == 80.0 and loads(results).rows == []
    file.write_text(json.dumps(side_record(1.0, "none", {"goodput": {"within": "all"}})) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"open_loop: expected .*'goodput'"):
        read_results([str(file)])


def replace_tokens(one: Measured) -> Measured:
    """The same with one token changed."""
    tokens, texts = one.outputs[0]
    changed = [list(each or ()) for each in tokens]
    changed[3][2] += 1
    return replace(one, outputs=[(changed, texts), *one.outputs[1:]])

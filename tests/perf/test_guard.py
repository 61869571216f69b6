"""What a cycle costs in counts that no load on the machine changes, against ``perf/guard.json``; and that the counters count.

The section ``launches`` is compared where the launches are counted, in ``tests/graphs/test_node_budget.py``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest

from graphspec.errors import ResourceError
from perf import counts, host_path, instructions
from perf.bytecodes import count_bytecodes
from perf.counts import PYTHON, RENEW, SECTIONS, differences, recorded, renewed

GUARD = json.loads(counts.GUARD.read_text(encoding="utf-8"))


def test_bytecodes_are_as_recorded() -> None:
    """In a separate process, as recorded: state left by other tests in this one changes the counts of some scenarios."""
    if recorded("bytecodes", GUARD) is None:
        pytest.skip(f"bytecodes of Python {PYTHON} were never counted; record them with: {RENEW} --section bytecodes")
    command = [sys.executable, "-m", "perf.counts", "--section", "bytecodes"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=counts.GUARD.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("section", [section for section in SECTIONS if section not in ("bytecodes", "launches")])
def test_counts_are_as_recorded(section: str) -> None:
    found = differences(section, GUARD[section], SECTIONS[section]())
    assert not found, "\n".join(found)


def test_the_file_holds_every_section() -> None:
    assert set(GUARD) == {"renew", *SECTIONS} and GUARD["renew"] == RENEW
    for name, figures in GUARD["bytecodes"].items():
        assert set(figures) == {scenario.name for scenario in host_path.SCENARIOS}, name


@pytest.mark.parametrize(
    ("section", "before", "now", "expected"),
    [
        ("bytes", 100, 100, None),
        ("bytes", 100, 101, r"bytes: x: rose from 100 to 101; .*python -m perf\.counts --write"),
        ("bytes", 100, 99, None),
        ("bytes", 100, 97, r"bytes: x: fell from 100 to 97, .*python -m perf\.counts --write"),
        ("graphs", 0, 1, "rose from 0 to 1"),
        ("bytecodes", 1000.1, 1000.2, r"rose from 1,000\.1 to 1,000\.2"),
        ("cycles", 100, 102, None),
        ("cycles", 100, 103, "rose from 100 to 103"),
        ("bytes", None, 5, r"x: not in guard\.json, counted 5; record it with"),
        ("bytes", 5, None, r"x: 5 in guard\.json, no longer counted; drop it with"),
    ],
)
def test_a_difference_is_named(section: str, before: float | None, now: float | None, expected: str | None) -> None:
    old, new = ({} if value is None else {"x": value} for value in (before, now))
    found = differences(section, {**old, "same": 1}, {**new, "same": 1})
    assert len(found) == (expected is not None)
    if expected is not None:
        assert re.search(expected, found[0])


def test_renewing_keeps_other_pythons_while_this_one_stays() -> None:
    old = {"bytecodes": {PYTHON: {"a": 1}, "3.99": {"a": 2}}, "bytes": {"b": 3}, "left over": {}}
    same = renewed(old, {"bytecodes": {"a": 1}})
    assert same == {"renew": RENEW, "bytecodes": {PYTHON: {"a": 1}, "3.99": {"a": 2}}, "bytes": {"b": 3}}
    other = renewed(old, {"bytecodes": {"a": 5}, "bytes": {"b": 4}})
    assert other == {"renew": RENEW, "bytecodes": {PYTHON: {"a": 5}}, "bytes": {"b": 4}}
    fresh = renewed({"bytecodes": {"3.99": {"a": 2}}}, {"bytecodes": {"a": 1}})
    assert fresh["bytecodes"] == {PYTHON: {"a": 1}, "3.99": {"a": 2}}
    assert recorded("bytecodes", {"bytecodes": {"3.99": {}}}) is None and recorded("bytes", old) == {"b": 3}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    def make(name: str, source: str) -> Any:
        made = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made)
        exec(compile(source, f"<{name}>", "exec"), made.__dict__)
        return made

    return make


Make = Callable[[str, str], Any]

SOURCE = """
from dataclasses import dataclass
@dataclass
class Pair:
    a: int
    b: int
def loop(n):
    total = 0
    for i in range(n):
        total += i
    return total
def nested(n):
    return loop(n) + sum([loop(i) for i in range(2)])
def fail():
    raise KeyError("x")
def make():
    return Pair(1, 2)
"""


def test_bytecodes_are_counted_exactly(module: Make) -> None:
    """Every iteration of a loop costs the same in each version of Python; calls are added."""
    ours = module("counted.inner", SOURCE)
    cost = [count_bytecodes(lambda n=n: ours.loop(n), "counted") for n in range(6)]
    steps = {after - before for before, after in pairwise(cost[1:])}
    assert len(steps) == 1 and cost[0] > 0 and steps.pop() >= 3
    assert cost == [count_bytecodes(lambda n=n: ours.loop(n), "counted") for n in range(6)]
    assert count_bytecodes(lambda: ours.nested(3), "counted") > cost[3] + cost[0] + cost[1]
    # What dataclass generates has no file of its own and counts all the same.
    assert count_bytecodes(ours.make, "counted") > count_bytecodes(lambda: ours.Pair, "counted") == 0


def test_only_the_package_is_counted(module: Make) -> None:
    ours, theirs = module("counted", SOURCE), module("countedlike", SOURCE)
    assert count_bytecodes(lambda: theirs.loop(50), "counted") == 0
    assert count_bytecodes(lambda: ours.loop(50), "counted") == count_bytecodes(lambda: (ours.loop(50), theirs.loop(9)), "counted") > 0


def test_counting_leaves_no_trace(module: Make) -> None:
    ours, before = module("counted", SOURCE), sys.gettrace()
    with pytest.raises(KeyError):
        count_bytecodes(ours.fail, "counted")
    assert sys.gettrace() is before
    assert count_bytecodes(ours.make, "counted") == count_bytecodes(ours.make, "counted")


@pytest.mark.parametrize("scenario", host_path.SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_simulated_device_is_served_like_a_real_one(scenario: host_path.Scenario) -> None:
    """Every cycle brings tokens, in runs of 1 to A in turn; requests end at their budget and are replaced."""
    path = host_path.HostPath(scenario)
    path.run(30)
    width = path.plan.accept_width
    live = path.requests[: scenario.rows]
    runs = {run for request in live for run in request.metrics.cycle_tokens}
    assert runs == set(range(1, width + 1))
    assert all(set(request.output) == {7} for request in live)
    assert all(len(request.output) == 1 + sum(request.metrics.cycle_tokens) for request in live)
    if scenario.budget == host_path.STEADY_BUDGET:
        assert len(path.requests) == scenario.rows
        assert all(r.metrics.cycles == 30 - scenario.cycles_in_flight + 1 for r in live)
    else:
        ended = [request for request in path.requests if request.finish_reason is not None]
        assert len(ended) > 2 * scenario.rows and len(path.requests) == len(ended) + scenario.rows
        assert {(len(r.output), r.finish_reason) for r in ended} == {(scenario.budget, "length")}


def test_more_work_on_the_host_is_counted(module: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the guard is for: a loop over lanes too many in the scheduler, and the figure names it."""
    scenario = host_path.SCENARIOS[0]
    before = host_path.bytecodes_per_cycle(scenario)
    assert before == host_path.bytecodes_per_cycle(scenario)
    step = host_path.Scheduler.step
    slower = module("graphspec.slower", "def step(self):\n    for _ in range(10): pass\n    return original(self)")
    slower.original = step
    monkeypatch.setattr(host_path.Scheduler, "step", slower.step)
    after = host_path.bytecodes_per_cycle(scenario)
    assert before + 20 <= after <= before + 60
    [message] = differences("bytecodes", {scenario.name: before}, {scenario.name: after})
    assert scenario.name in message and "rose" in message


def test_an_unknown_scenario_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"--scenario: expected one of 'plain, batch 1, 1 in flight'.*found 'x'"):
        host_path.scenario_named("x")


def test_machine_instructions_are_read() -> None:
    assert instructions.read_callgrind("version: 1\nsummary: 1234\n\ntotals: 1234\n") == 1234
    assert instructions.read_perf_stat("987654,,instructions:u,5000,100.00,,\n") == 987654
    with pytest.raises(ResourceError, match="callgrind: expected a line"):
        instructions.read_callgrind("nothing here")
    with pytest.raises(ResourceError, match=r"perf stat: expected a count of instructions, found <not supported>.*use --callgrind"):
        instructions.read_perf_stat("<not supported>,,instructions:u,0,100.00,,\n")
    cycles: list[int] = []
    assert instructions.per_cycle(lambda n: cycles.append(n) or 1000 + 7 * n) == 7  # type: ignore[func-returns-value]
    assert cycles == [instructions.MANY, instructions.FEW]


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for count, name in ((instructions.by_callgrind, "valgrind"), (instructions.by_perf_stat, "perf")):
        with pytest.raises(ResourceError, match=f"{name}: expected the program on PATH, found none"):
            count("plain, batch 1, 1 in flight")
    with pytest.raises(SystemExit, match="valgrind: expected"):
        counts.main(["--callgrind"])


def test_the_command_compares_and_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(counts, "GUARD", tmp_path / "guard.json")
    monkeypatch.setitem(counts.SECTIONS, "bytes", lambda: {"x": 3})
    assert counts.main(["--section", "bytes"]) == 1
    assert not counts.GUARD.exists()
    assert counts.main(["--section", "bytes", "--write"]) == 0
    assert counts.main(["--section", "bytes"]) == 0
    assert "1 counts as recorded" in capsys.readouterr().out
    monkeypatch.setitem(counts.SECTIONS, "bytes", lambda: {"x": 4})
    assert counts.main(["--section", "bytes"]) == 1
    assert "rose from 3 to 4" in capsys.readouterr().out

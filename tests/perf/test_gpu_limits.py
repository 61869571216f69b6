"""Time limits of the checks that need a GPU, against the programs their engines compile; and the checks of the core part."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

from graphspec.engine.engine import Engine
from graphspec.lab.measure import programmatic
from graphspec.shapes import GREEDY
from perf.gpu.budget import CALLS, MINUTES
from perf.gpu.checks import PROCESSES
from tests.gpu import conftest, limits, test_gpu, test_gpu_capture, test_gpu_programmatic

Case = tuple[dict[str, Any], list[Any]]
MODULES = (test_gpu, test_gpu_capture, test_gpu_programmatic)


def cases(function: FunctionType) -> Iterator[Case]:
    """``(parameters, marks)`` of every case of a test."""
    found = [mark for mark in function.pytestmark if mark.name == "parametrize"] if hasattr(function, "pytestmark") else []
    choices = []
    for mark in found:
        names = [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else list(mark.args[0])
        rows = [(row.values, list(row.marks)) if hasattr(row, "marks") else (row if len(names) > 1 else (row,), []) for row in mark.args[1]]
        choices.append([(dict(zip(names, values, strict=True)), marks) for values, marks in rows])
    for chosen in itertools.product(*choices):
        marks = [mark for _, some in chosen for mark in some] + list(getattr(function, "pytestmark", []))
        yield {name: value for values, _ in chosen for name, value in values.items()}, marks


def item(parameters: dict[str, Any], marks: list[Any]) -> Any:
    """What the limit of a case is read from; as in pytest, a test without parameters has no ``callspec``."""
    marker = next((mark for mark in marks if mark.name == "seconds"), None)
    called = {"callspec": SimpleNamespace(params=parameters)} if parameters else {}
    return SimpleNamespace(get_closest_marker=lambda name: marker, **called)


FUNCTIONS = [
    function
    for module in MODULES
    for name, function in vars(module).items()
    if name.startswith("test_") and isinstance(function, FunctionType) and {"LLM", "demo"} & {*function.__code__.co_names}
]
TESTS = [pytest.param(function, id=function.__name__) for function in FUNCTIONS]


@pytest.mark.parametrize("function", TESTS)
def test_a_check_has_time_for_what_it_compiles(function: FunctionType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engines are counted when built, and generate nothing."""
    programs: list[int] = []

    class Counted:
        def __init__(self, **keys: Any) -> None:
            self.plan, self.depth_policy = limits.plan_of(keys), None
            programs.append(limits.programs_of(self.plan))

        def generate(self, prompts: list[str], params: Any) -> list[Any]:
            if self.depth_policy is not None:
                for depth in self.plan.depths_of(self.plan.buckets[-1]):
                    self.depth_policy.observe(self.plan.buckets[-1], depth, [])
            return [SimpleNamespace(token_ids=[]) for _ in prompts]

    for module in MODULES:
        monkeypatch.setattr(module, "LLM", Counted)
    for parameters, marks in cases(function):
        programs.clear()
        given = parameters | ({"expected": [[]] * len(test_gpu.PROMPTS)} if "expected" in function.__code__.co_varnames else {})
        # What it looks at after its last engine is not there.
        with pytest.MonkeyPatch.context() as patch, suppress(AssertionError, AttributeError, pytest.fail.Exception):
            function(**given, **({"monkeypatch": patch} if "monkeypatch" in function.__code__.co_varnames else {}))
        assert programs, parameters
        assert conftest.seconds_of(item(parameters, marks)) >= limits.OVERHEAD + limits.PROGRAM * sum(programs), (parameters, programs)


def test_the_comparison_of_programmatic_launch_builds_few_programs() -> None:
    """On its own it builds every engine in one process, within the ten minutes of a call."""
    engines = [engine for shape in programmatic.SHAPES for engine in test_gpu_programmatic.engines(shape)]
    assert len(engines) == 2 * len(programmatic.SHAPES) * len(programmatic.DTYPES)
    assert {limits.programs_of(limits.plan_of(engine)) for engine in engines} == {3}
    assert limits.seconds(engines) <= 60 * MINUTES


def test_the_second_call_has_time_for_every_program() -> None:
    """Its longest test, and all of them spread over the processes; each check that builds no engine is counted as one program."""
    [part] = CALLS["second"]
    items = [(function, item(*case)) for function in FUNCTIONS for case in cases(function)]
    seconds = [max(limits.PROGRAM, conftest.seconds_of(one) - limits.OVERHEAD) for _, one in items]
    assert max(seconds) + limits.OVERHEAD <= part.maximum
    assert limits.OVERHEAD + sum(seconds) / PROCESSES <= part.maximum


def test_the_programs_of_a_plan_are_those_an_engine_builds() -> None:
    for engine in test_gpu_capture.changing_depths("fused"):
        plan = limits.plan_of(engine)
        assert limits.programs_of(plan) == len(Engine.keys(SimpleNamespace(plan=plan), 4, GREEDY))  # type: ignore[arg-type]
    assert limits.programs_of(limits.plan_of(test_gpu_capture.changing_depths("reference")[0])) == 0


def test_a_limit_is_a_number_or_follows_from_the_parameters() -> None:
    for marker, expected in ((None, conftest.SECONDS), (200, 200.0), (lambda n: 7 * n, 21.0)):
        marks = [SimpleNamespace(name="seconds", args=(marker,))] if marker is not None else []
        assert conftest.seconds_of(item({"n": 3}, marks)) == expected


def test_the_core_looks_at_everything_that_decides() -> None:
    """Captured against direct, prompts too; the tokens of transformers; no call that waits; poison. All of it with fused kernels."""
    found = {
        (function.__name__, *(value for value in parameters.values() if isinstance(value, str)))
        for module in (test_gpu, test_gpu_capture)
        for function in vars(module).values()
        if isinstance(function, FunctionType) and function.__name__.startswith("test_")
        for parameters, marks in cases(function)
        if any(mark.name == "core" for mark in marks)
    }
    names = {
        "test_captured_equals_direct_bitwise", "test_a_captured_prefill_equals_a_direct_one_bitwise",
        "test_greedy_tokens_equal_transformers", "test_a_launch_never_waits_and_a_replay_never_allocates",
        "test_poison_between_launches_changes_no_token",
    }  # fmt: skip
    assert {name for name, *_ in found} == names and 10 <= len(found) <= 20
    for name in names - {"test_poison_between_launches_changes_no_token"}:
        assert any(case[0] == name and "fused" in case for case in found), name

"""Cycles in flight against a device with a clock of its own: what is launched when, what the host may know by then, and who may take what.

The device runs launches one after another for random times; a result reaches the host some random time after its launch ended, so results
may arrive in another order than they were computed in. The host's own work takes time on the same clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.api.async_llm import AsyncLLM
from graphspec.api.llm import SamplingParams, generate_through
from graphspec.errors import ConfigError
from graphspec.graphs.cycle import RingEntry
from graphspec.graphs.programs import Key, PrefillKey
from graphspec.graphs.stages.mailbox import Message
from graphspec.plan.plan import Plan
from graphspec.shapes import GraphKey
from tests.support.engines import CHAIN, TREE, Pair, ids, prompts, watch_schedulers
from tests.support.plans import plan as make

from .test_scheduler import MAX_STEPS, Case, Device


@dataclass
class Times:
    """Seconds; each is drawn between its two ends."""

    host: tuple[float, float]
    """Host work before each launch."""
    device: tuple[float, float]
    """One launch."""
    arrival: tuple[float, float] = (0.0, 0.0)
    """From the end of a launch to its result on the host."""


class TimedDevice(Device):
    """A device with a timeline. Holds no result back on purpose, and shows none before its time."""

    def __init__(self, device: Device, times: Times) -> None:
        self.__dict__.update(device.__dict__)
        self.times, self.now, self.free_at = times, 0.0, 0.0
        self.lanes: dict[int, dict[int, int]] = {}
        self.visible: dict[int, float] = {}
        self.done: dict[int, float] = {}
        self.idle: list[float] = []
        """Time the device stood still before each cycle, in the order of launch."""
        self.gaps: list[tuple[Key, float]] = []
        """The same before every launch, with its program."""
        self.unread_at_launch: list[int] = []
        self.waits = 0

    def _draw(self, ends: tuple[float, float]) -> float:
        return self.rng.uniform(*ends)

    def launch(self, key: Key, message: Message) -> int:
        self.now += self._draw(self.times.host)
        for unread in self.lanes.values():
            for join in message.joins:
                owner = unread.get(join.row, join.seed)
                assert owner == join.seed, "a row changes hands while an unread launch uses it"
        self.gaps.append((key, max(0.0, self.now - self.free_at)))
        if isinstance(key, GraphKey):
            self.idle.append(max(0.0, self.now - self.free_at))
            self.unread_at_launch.append(self.in_flight)
        number = super().launch(key, message)
        self.lanes[number] = {row: self.rows[row].owner for row in message.lanes}
        self.free_at = max(self.now, self.free_at) + self._draw(self.times.device)
        self.done[number] = self.free_at
        self.visible[number] = self.free_at + self._draw(self.times.arrival)
        return number

    def read(self, ticket: int) -> RingEntry:
        entry = super().read(ticket)  # checks the order
        self.waits += self.visible[ticket] > self.now
        self.now = max(self.now, self.visible[ticket])
        del self.lanes[ticket]
        return entry


def timed(case: Case, times: Times) -> TimedDevice:
    device = TimedDevice(case.device, times)
    case.device = case.scheduler.launcher = device
    return device


SHAPES = [(4, 1, 5), (3, 3, 10), None]


@st.composite
def cases(draw: st.DrawFn, cycles_in_flight: int) -> tuple[Case, TimedDevice]:
    shape = draw(st.sampled_from(SHAPES))
    rows, page_size = draw(st.integers(1, 4)), draw(st.sampled_from([1, 3, 16]))
    runtime: dict[str, Any] = {
        "name": "eager", "max_rows": rows, "page_size": page_size, "cycles_in_flight": cycles_in_flight, "prefill_chunks": [4, 8],
    }  # fmt: skip
    variant = "eagle3" if shape else "none"
    if draw(st.booleans()):
        roomy = make(variant, shape=shape, runtime=runtime)
        runtime["num_pages"] = roomy.pages_for(4 + roomy.tokens_in_flight) + draw(st.integers(0, roomy.pages_for(40)))
    plan = make(variant, shape=shape, runtime=runtime)
    case = Case(plan, draw(st.integers(0, 2**16)), draw(st.integers(1, 7)), draw(st.integers(1, 24)), draw(st.integers(1, 30)), True)
    host, device, arrival = (draw(st.sampled_from([0.0, 0.1, 1.0, 5.0])) for _ in range(3))
    return case, timed(case, Times((0.0, host), (0.1, 0.1 + device), (0.0, arrival)))


@pytest.mark.parametrize("cycles_in_flight", [1, 2, 3])
def test_results_may_arrive_at_any_time_and_in_any_order(cycles_in_flight: int) -> None:
    """Pages and rows are never reused early and tickets are read in order (the device asserts both); outputs follow the scripts."""
    arrived_early = 0

    @settings(max_examples=60, deadline=None)
    @given(cases(cycles_in_flight), st.sampled_from([0.0, 0.0, 0.1]))
    def run(made: tuple[Case, TimedDevice], aborts: float) -> None:
        nonlocal arrived_early
        case, device = made
        case.run(aborts)
        times = [device.visible[number] for number in sorted(device.visible)]
        arrived_early += times != sorted(times)
        assert max(device.unread_at_launch, default=0) < cycles_in_flight

    run()
    assert (arrived_early > 5) == (cycles_in_flight > 1), "results overtook each other, wherever there were two at a time"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**16), st.sampled_from(SHAPES), st.integers(1, 6))
def test_outputs_are_those_of_the_synchronous_order(seed: int, shape: tuple[int, int, int] | None, count: int) -> None:
    found = []
    for cycles_in_flight in (1, 2, 3):
        runtime = {"name": "eager", "max_rows": 3, "page_size": 4, "cycles_in_flight": cycles_in_flight, "prefill_chunks": [4, 8]}
        plan = make("eagle3" if shape else "none", shape=shape, runtime=runtime, max_context=60)
        case = Case(plan, seed, count, 20, 25, True)
        timed(case, Times((0.0, 1.0), (0.1, 2.0), (0.0, 2.0)))
        case.run()
        found.append([(r.output, r.finish_reason) for r in case.requests])
    assert found[0] == found[1] == found[2]


def steady(cycles_in_flight: int, times: Times, budget: int = 40) -> TimedDevice:
    """Two rows that decode plainly side by side until their budgets end; nothing else happens."""
    runtime = {"name": "eager", "max_rows": 2, "page_size": 16, "cycles_in_flight": cycles_in_flight, "prefill_chunks": [8]}
    case = Case(make("none", runtime=runtime), seed=3, count=2, longest=6, budget=budget, ends=False)
    for request in case.requests:
        request.budget = budget
        case.scheduler.add(request)
    device = timed(case, times)
    while case.scheduler.busy:
        case.scheduler.step()
    assert [len(r.output) for r in case.requests] == [budget] * 2
    return device


@pytest.mark.parametrize("cycles_in_flight", [1, 2, 3])
def test_a_launch_never_waits_for_the_result_before_it(cycles_in_flight: int) -> None:
    device = steady(cycles_in_flight, Times((0.2, 0.2), (1.0, 1.0)))
    settled = device.unread_at_launch[cycles_in_flight:]
    assert set(settled) == {cycles_in_flight - 1}, "this many cycles are still unread when the next one is launched"
    assert device.inert_lanes == 2 * (cycles_in_flight - 1), "rows that ended ride along in what was queued, and emit nothing"


@pytest.mark.parametrize(("cycles_in_flight", "idle"), [(1, True), (2, False), (3, False)])
def test_the_device_is_never_idle_while_the_host_is_faster(cycles_in_flight: int, idle: bool) -> None:
    device = steady(cycles_in_flight, Times((0.4, 0.4), (1.0, 1.0)))
    gaps = device.idle[cycles_in_flight:]
    assert len(gaps) > 30
    if idle:
        assert min(gaps) == pytest.approx(0.4), "the host's whole work, every cycle"
    else:
        assert max(gaps) == 0.0


def traffic(cycles_in_flight: int, times: Times) -> tuple[Case, TimedDevice]:
    """Requests of several prompt chunks join while others decode, and end or are aborted at different times; there are rows for all."""
    runtime = {"name": "eager", "max_rows": 4, "page_size": 4, "cycles_in_flight": cycles_in_flight, "prefill_chunks": [4, 8]}
    case = Case(make("none", runtime=runtime, max_context=60), 5, count=16, longest=30, budget=25, ends=True)
    device, scheduler, coming = timed(case, times), case.scheduler, list(case.requests)
    for step in range(MAX_STEPS):
        # A row that has ended is free once the last launch that names it was read.
        if coming and (step % 5 == 0 or len(scheduler.live) < 3) and len(scheduler._free_rows) > len(scheduler.waiting.requests):
            scheduler.add(coming.pop())
        if step == 20:
            scheduler.abort(scheduler.running[0])
        if not scheduler.busy and not coming:
            break
        scheduler.step()
    assert all(request.finish_reason is not None for request in case.requests)
    return case, device


def test_joins_leaves_and_prefill_leave_no_gap() -> None:
    """Every launch after the first is queued before the device has done the one before it."""
    case, device = traffic(2, Times((0.4, 0.4), (1.0, 1.0)))
    assert {request.finish_reason for request in case.requests} >= {"stop", "length", "abort"}
    chunks = [number for number, (key, _) in enumerate(device.gaps) if isinstance(key, PrefillKey)]
    assert len(chunks) > 20, "prompts are cut into chunks"
    assert {type(device.gaps[number + 1][0]) for number in chunks} == {PrefillKey, GraphKey}, "and rows decode between prompts"
    assert [gap for _, gap in device.gaps[1:] if gap] == []
    _, waiting = traffic(1, Times((0.4, 0.4), (1.0, 1.0)))
    assert min(gap for _, gap in waiting.gaps[1:]) == pytest.approx(0.4), "with one cycle in flight there is a gap before every launch"


def test_a_third_cycle_in_flight_hides_a_result_that_comes_late() -> None:
    """Two hide host work up to one cycle; copying back that takes longer needs three."""
    late = Times((0.4, 0.4), (1.0, 1.0), (0.9, 0.9))
    assert max(steady(2, late).idle[3:]) == pytest.approx(0.3)
    assert max(steady(3, late).idle[3:]) == 0.0


def test_a_host_slower_than_the_device_leaves_it_idle() -> None:
    device = steady(2, Times((2.0, 2.0), (1.0, 1.0)))
    assert min(device.idle[2:]) == pytest.approx(1.0)
    assert device.waits <= 2, "results arrive before the host waits for them"


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_engine_gives_the_same_tokens(pair: Pair, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end, leave and join while later cycles are queued; pages are short, so that rows are sent back as well."""
    made = watch_schedulers(monkeypatch)
    prompt_ids = prompts(7)
    params = [SamplingParams(max_tokens=3 + 4 * i, temperature=(0.0, 0.9)[i % 2], seed=i) for i in range(7)]
    found = []
    for cycles_in_flight in (1, 2, 3):
        llm = pair.llm(**shape, max_rows=3, page_size=4, num_pages=30, cycles_in_flight=cycles_in_flight)
        assert llm.plan.run_ahead == cycles_in_flight - 1 and llm.plan.ring_depth == cycles_in_flight + 1
        outputs = llm.generate(prompt_ids, params)
        found.append([(o.token_ids, o.finish_reason) for o in outputs])
        assert made[-1].allocator.num_used == 0 and llm.cycle.in_flight == 0
    assert found[0] == found[1] == found[2]
    assert ids(outputs)[0] == pair.greedy(prompt_ids[0], 3)


@pytest.mark.parametrize("face", ["generate", "stream", "a launcher in front", "async"])
def test_every_face_keeps_two_cycles_in_flight(pair: Pair, face: str) -> None:
    llm = pair.llm(**CHAIN, max_rows=2, buckets=[1, 2], cycles_in_flight=2)
    unread: list[int] = []
    launch, prompt_ids = llm.cycle.launch, prompts(2)
    params = SamplingParams(max_tokens=30, ignore_eos=True)

    def noted(key: Key, message: Message) -> int:
        if isinstance(key, GraphKey):
            unread.append(llm.cycle.in_flight)
        return launch(key, message)

    llm.cycle.launch = noted  # type: ignore[method-assign]

    async def stream() -> list[int]:
        return [token async for event in AsyncLLM(llm).generate(prompt_ids, params) for token in event.token_ids]

    run: dict[str, Callable[[], Any]] = {
        "generate": lambda: llm.generate(prompt_ids, params),
        "stream": lambda: list(llm.stream(prompt_ids, params)),
        "a launcher in front": lambda: generate_through(llm, llm.cycle, prompt_ids, params),
        "async": lambda: asyncio.run(stream()),
    }
    run[face]()
    # The second prompt is prefilled next to the first, and when one row has ended the other goes on.
    assert len(unread) > 5 and set(unread[1:]) == {1}


def test_no_cycle_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"runtime\.cycles_in_flight: expected an integer >= 1, at most 64, found 0"):
        make("none", runtime={"cycles_in_flight": 0})


def test_the_window_is_reserved_for_every_cycle_in_flight() -> None:
    plans: list[Plan] = [make("eagle3", shape=(4, 1, 5), runtime={"cycles_in_flight": n}) for n in (1, 2, 3)]
    assert [p.tokens_in_flight - p.window_width for p in plans] == [0, 5, 10]

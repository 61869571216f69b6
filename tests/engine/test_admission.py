"""Order of admission: priority and arrival, small requests before a large one that waits for pages, deadlines, and a full queue."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.api.prompts import set_call_options
from graphspec.engine.admission import LOOK_AHEAD, MAX_OUTRANKED, MAX_OVERTAKEN, Queue
from graphspec.engine.request import NO_ROW, Request, SamplingParams
from graphspec.engine.scheduler import Scheduler
from graphspec.errors import RequestError, ResourceError
from graphspec.shapes import GREEDY
from tests.support.engines import Pair, mirror_pair, prompts
from tests.support.plans import plan as make

from .test_scheduler import Case, two_rows


def request(arrival: int, tokens: int = 1, priority: int = 0) -> Request:
    made = Request(arrival, [5] * tokens, SamplingParams(), (), 1, priority=priority)
    made.arrival = arrival
    return made


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans()), max_size=30))
def test_the_queue_is_in_order_of_priority_and_arrival(entries: list[tuple[int, bool]]) -> None:
    queue, waiting = Queue(), []
    for arrival, (priority, leaves) in enumerate(entries):
        fresh = request(arrival, priority=priority)
        queue.add(fresh)
        waiting.append(fresh)
        if leaves:
            queue.remove(waiting.pop(0))
    assert queue.requests == sorted(waiting, key=lambda one: (one.priority, one.arrival))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**16), st.integers(1, 6))
def test_a_request_is_overtaken_a_limited_number_of_times(seed: int, places: int) -> None:
    """A pool of pages that small requests would keep full: a large one is overtaken a limited number of times, then runs."""
    rng, queue = random.Random(seed), Queue()
    free, held, arrivals = places, [], 0
    overtaken: Counter[Request] = Counter()
    served: list[Request] = []

    def place(one: Request) -> bool:
        nonlocal free
        if len(one.prompt) > free:
            return False
        for other in queue.requests:
            if other.arrival < one.arrival:
                overtaken[other] += 1
        queue.remove(one)
        free -= len(one.prompt)
        held.append(one)
        served.append(one)
        return True

    for _ in range(600):
        while len(queue.requests) < 2 * LOOK_AHEAD and arrivals < 200:
            queue.add(request(arrivals, rng.choice([1, 1, 1, places])))
            arrivals += 1
        queue.admit(place)
        if held:
            free += len(held.pop(rng.randrange(len(held))).prompt)
    assert not queue.requests and len(served) == arrivals
    assert max(overtaken.values(), default=0) <= MAX_OVERTAKEN


def give_a_row(queue: Queue) -> Request:
    """The request that gets the only row that is free."""
    chosen: list[Request] = []

    def place(one: Request) -> bool:
        if chosen:
            return False
        queue.remove(one)
        chosen.append(one)
        return True

    queue.admit(place)
    return chosen[0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**16), st.integers(1, 40))
def test_priorities_starve_nobody(seed: int, waiting: int) -> None:
    """Urgent requests without end: each of the others is admitted after a number of later ones that follows from its place alone."""
    rng, queue, arrivals = random.Random(seed), Queue(), 0
    older: dict[Request, int] = {}
    later: Counter[Request] = Counter()

    def noted(one: Request) -> None:
        later.update(other for other in queue.requests if other.arrival < one.arrival)

    def add(priority: int) -> None:
        nonlocal arrivals
        one = request(arrivals, priority=priority)
        older[one] = len(queue.requests)
        queue.add(one)
        arrivals += 1

    for _ in range(waiting):
        add(rng.randrange(3))
    first = list(older)
    while any(one in queue for one in first):
        while len(queue.requests) < waiting + 5:
            add(-rng.randrange(1, 4))
        noted(give_a_row(queue))
    assert all(later[one] <= (older[one] + 1) * MAX_OUTRANKED for one in older if one not in queue)


def test_three_callers_in_a_hurry_let_the_others_through() -> None:
    """One row, and always three urgent requests that wait: one without priority gets it after a known number of them, for good."""
    count = 3 * MAX_OUTRANKED
    case = Case(two_rows(max_rows=1, buckets=[1]), seed=0, count=count + 1, longest=4, budget=3, ends=False)
    patient, *urgent = case.requests
    case.scheduler.add(urgent.pop(0))
    case.scheduler.add(patient)
    for one in case.requests[1:]:
        one.priority = -1
    ended: list[Request] = []
    while patient.finish_reason is None:
        while urgent and len(case.scheduler.waiting.requests) < 4:
            case.scheduler.add(urgent.pop(0))
        ended += [one for one in case.scheduler.step() if one.finish_reason is not None]
    assert ended.index(patient) <= MAX_OUTRANKED + 1
    assert patient.priority == -1, "a row that is admitted so is not the first to be sent back"
    while case.scheduler.busy:
        case.scheduler.step()


def test_priorities_hold_however_many_wait() -> None:
    """A long queue of patient requests does not turn the order into that of arrival."""
    queue, urgent = Queue(), 170
    for arrival in range(500):
        queue.add(request(arrival))
    served = []
    for arrival in range(500, 500 + urgent):
        queue.add(request(arrival, priority=-1))
        served.append(give_a_row(queue))
    assert [one.arrival for one in served if one.arrival < 500] == list(range(urgent // (MAX_OUTRANKED + 1)))


def test_a_small_request_does_not_wait_for_pages_that_a_large_one_lacks() -> None:
    case = Case(two_rows(num_pages=4, max_rows=3, buckets=[4]), seed=0, count=3, longest=4, budget=20, ends=False)
    first, large, small = case.requests
    case.device.prompts[0], case.device.prompts[1] = first.prompt, large.prompt = [5] * 20, [5] * 40
    for one in case.requests:
        one.budget = 6
        case.scheduler.add(one)
    for _ in range(3):
        case.scheduler.step()
    assert (first.row is NO_ROW, large.row is NO_ROW, small.row is NO_ROW) == (False, True, False)
    while case.scheduler.busy:
        case.scheduler.step()
    assert [len(one.output) for one in case.requests] == [6] * 3


@pytest.mark.parametrize(("priorities", "order"), [((0, 0, 0), [0, 1, 2]), ((2, 1, 0), [2, 1, 0]), ((1, 0, 1), [1, 0, 2])])
def test_rows_go_by_priority(priorities: tuple[int, ...], order: list[int]) -> None:
    case = Case(two_rows(max_rows=1, buckets=[1]), seed=0, count=3, longest=4, budget=3, ends=False)
    for one, priority in zip(case.requests, priorities, strict=True):
        one.priority = priority
        case.scheduler.add(one)
    ended: list[int] = []
    while case.scheduler.busy:
        ended += [one.index for one in case.scheduler.step() if one.finish_reason is not None]
    assert ended == order


def test_the_row_that_counts_least_is_sent_back() -> None:
    """Two rows that do not fit together, the more urgent one admitted last."""
    case = Case(two_rows(num_pages=3), seed=0, count=2, longest=15, budget=30, ends=False)
    for one, priority in zip(case.requests, (1, 0), strict=True):
        one.budget, one.priority = 30, priority
        case.scheduler.add(one)
        case.scheduler.step()
    while case.scheduler.busy:
        case.scheduler.step()
    assert case.requests[0].preempted > 0 == case.requests[1].preempted
    assert [len(one.output) for one in case.requests] == [30, 30]


@pytest.mark.parametrize("cycles_in_flight", [1, 2])
def test_a_deadline_ends_a_request_where_it_is(cycles_in_flight: int) -> None:
    """One row: the first request keeps what it has by then, the second never got a row, the third has time and gets the row."""
    now = 0.0
    case = Case(two_rows(max_rows=1, buckets=[1], cycles_in_flight=cycles_in_flight), seed=0, count=3, longest=4, budget=40, ends=False)
    case.scheduler = Scheduler(case.plan, case.device, GREEDY, clock=lambda: now)
    for one, deadline in zip(case.requests, (5.0, 3.0, None), strict=True):
        one.budget, one.deadline, one.metrics.arrived = 30, deadline, 0.0
        case.scheduler.add(one)
    while case.scheduler.busy:
        case.scheduler.step()
        now += 0.5
    first, second, third = case.requests
    assert (first.finish_reason, second.finish_reason, third.finish_reason) == ("deadline", "deadline", "length")
    script = case.device.scripts[0]
    assert 5 <= len(first.output) <= 11 and first.output == script[: len(first.output)]
    assert second.output == [] and len(third.output) == 30
    assert case.scheduler.allocator.num_used == 0 and case.device.in_flight == 0


def test_a_full_queue_refuses() -> None:
    case = Case(two_rows(max_queued=1), seed=0, count=4, longest=4, budget=3, ends=False)
    for one in case.requests[:3]:
        assert case.scheduler.why_full(1) is None
        case.scheduler.add(one)
    expected = r"runtime\.max_queued: expected room for 1 more: at most 1 requests wait, in addition to the 2 that have rows, found 3"
    assert re.match(expected, str(case.scheduler.why_full(1)))
    while case.scheduler.busy:
        case.scheduler.step()
    assert case.scheduler.why_full(3) is None
    make("none", runtime={"max_queued": 0})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return mirror_pair(tmp_path_factory.mktemp("pair"))


def test_the_callers_arguments(pair: Pair) -> None:
    llm = pair.llm(variant="none", max_rows=1, buckets=[1], max_queued=2)
    prompt_ids, params = prompts(3), SamplingParams(max_tokens=4, ignore_eos=True)
    outputs = llm.generate(prompt_ids, params, priority=[2, 1, 0], deadline=[None, 0, 1e6])
    assert [(out.finish_reason, len(out.token_ids)) for out in outputs] == [("length", 4), ("deadline", 0), ("length", 4)]
    ended = [event.index for event in llm.stream(prompt_ids, params, priority=[2, 1, 0]) if event.finished]
    assert ended == [2, 1, 0]
    running = llm.stream(prompt_ids[0], SamplingParams(max_tokens=40, ignore_eos=True))
    first = next(running).token_ids
    with pytest.raises(ResourceError, match=r"runtime\.max_queued"):
        llm.generate(prompt_ids, params)
    rest = [token for event in running for token in event.token_ids]
    assert [*first, *rest] == pair.greedy(prompt_ids[0], 40, ignore_eos=True), "a refusal affects no other request"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"priority": 0.5}, "priority: expected an integer, found 0.5"),
        ({"priority": [1, 2, 3]}, "priority: expected one value, or one for each of the 2 prompts"),
        ({"deadline": "soon"}, "deadline: expected a number, found 'soon'"),
        ({"deadline": [1.0, -1.0]}, "deadline: expected a number >= 0, found -1.0"),
        ({"deadline": float("inf")}, "deadline: expected a finite number"),
        ({"cache_salt": ""}, "cache_salt: expected a text of at least one character, found ''"),
        ({"cache_salt": 3}, "cache_salt: expected text, found 3"),
        ({"cache_salt": ["a"]}, "cache_salt: expected one value, or one for each of the 2 prompts"),
    ],
)
def test_other_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message.replace("(", r"\(")):
        set_call_options([request(0), request(1)], **{"priority": 0, "deadline": None, **arguments})

"""Several callers in any order, in the event loop too: submit, step, leave, generate, cancel, interrupt, fail a step, close the engine, let
deadlines pass; every request's tokens are those it gets alone, whatever it shares, in any order and with any sampling of others.

A stateful property test. The engine is small and stays the same over all examples, so that state left by one is detected by the next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from graphspec.api.async_llm import AsyncLLM
from graphspec.api.llm import LLM, SamplingParams
from graphspec.api.outputs import StreamEvent
from graphspec.errors import ResourceError
from tests.support.engines import CHAIN, TREE, Pair, prompts
from tests.support.interrupts import Fault, failing, interrupted
from tests.support.lockstep import Lockstep

from .test_interrupts import FILES, STEP
from .test_shared_engine import assert_idle

PROMPTS = prompts(6, lengths=(5, 3, 17, 8, 1, 9))
PROMPTS += [[*PROMPTS[2], 4, 9], [*PROMPTS[2][:13], 30]]
"""The last two begin as another one does."""
KINDS = (
    {},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 1.1, "seed": 12, "top_k": 5, "logprobs": 1},
    {"repetition_penalty": 1.6, "frequency_penalty": 0.3},
    {"logit_bias": {4: 3.0, 7: -90.0, 20: 2.0}},
    {"speculate": False, "temperature": 0.7, "seed": 13},
    {"allowed_token_ids": list(range(0, 40, 2))},
)
RequestSpec = tuple[int, int, int]
"""Numbers of a prompt and of a kind, and how many tokens."""
requests = st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, len(KINDS) - 1), st.integers(1, 12))
batch = st.lists(requests, min_size=1, max_size=3)
priority = st.sampled_from((0, 0, -1, 3))
LATER = 10_000.0
"""Seconds to any deadline, far more than a test takes; the clock jumps by as many."""


def params(one: RequestSpec) -> SamplingParams:
    return SamplingParams(max_tokens=one[2], min_tokens=min(one[1], one[2]), ignore_eos=True, **KINDS[one[1]])  # type: ignore[arg-type]


class Alone:
    """What each request gives on an engine that serves nothing else."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._known = llm, dict[tuple[int, int], list[int]]()

    def __call__(self, one: RequestSpec) -> list[int]:
        if one[:2] not in self._known:
            longest = (*one[:2], 12)
            self._known[one[:2]] = self._llm.generate([PROMPTS[one[0]]], params(longest))[0].token_ids
        return self._known[one[:2]][: one[2]]


@dataclass
class Open:
    """A stream, its requests, and its events so far."""

    some: list[RequestSpec]
    events: Iterator[StreamEvent] | AsyncIterator[StreamEvent]
    tokens: list[list[int]] = field(init=False)
    ended: list[str | None] = field(init=False)
    due: float | None = None
    """When its requests end at the latest, by the clock that jumps."""
    may_fail: bool = False
    """A step failed while it was open."""

    def __post_init__(self) -> None:
        self.tokens, self.ended = [[] for _ in self.some], [None] * len(self.some)


PLACES, ASYNC = 5, 2
place, async_place = st.integers(0, PLACES - 1), st.integers(PLACES - ASYNC, PLACES - 1)
"""The last places are in the event loop."""


class Callers(RuleBasedStateMachine):
    """Some places for streams. What may be done never depends on what was found: a place that is empty is passed over."""

    make: Callable[[], LLM]
    alone: Alone
    lockstep: Lockstep

    def __init__(self) -> None:
        super().__init__()
        self.llm = self.make()
        self.loop = asyncio.new_event_loop()
        self.places: list[Open | None] = [None] * PLACES
        self.passed = 0.0
        self.take_clock()

    def now(self) -> float:
        return time.perf_counter() + self.passed

    def take_clock(self) -> None:
        self.llm._engine.scheduler._deadlines._clock = self.now

    @rule(at=place, some=batch, priority=priority, due=st.booleans())
    def submit(self, at: int, some: list[RequestSpec], priority: int, due: bool) -> None:
        self.leave(at)
        for one in some:
            self.alone(one)
        face = self.llm.stream if at < PLACES - ASYNC else AsyncLLM(self.llm).generate
        # It counts from the arrival, by a clock that does not jump.
        deadline = self.passed + LATER if due else None
        events = face([PROMPTS[one[0]] for one in some], [params(one) for one in some], priority=priority, deadline=deadline)
        self.places[at] = Open(some, events, self.now() + LATER if due else None)

    @rule()
    def time_passes(self) -> None:
        """Everything that has a deadline is due."""
        self.passed += 2 * LATER

    def next_event(self, stream: Open) -> StreamEvent | None:
        if isinstance(stream.events, Iterator):
            return next(stream.events, None)
        self.lockstep.free = True
        try:
            return self.loop.run_until_complete(anext(stream.events, None))  # type: ignore[arg-type]
        finally:
            self.lockstep.free = False

    @rule(at=place, count=st.integers(1, 6))
    def step(self, at: int, count: int) -> None:
        stream = self.places[at]
        for _ in range(count if stream is not None else 0):
            assert stream is not None
            wanted = [self.alone(one) for one in stream.some]
            try:
                event = self.next_event(stream)
            except Fault:
                assert stream.may_fail
                self.places[at] = None
                return
            if event is None:
                overdue = stream.due is not None and stream.due < self.now()
                for tokens, reason, right in zip(stream.tokens, stream.ended, wanted, strict=True):
                    assert reason == "length" or (overdue and reason == "deadline")
                    assert tokens == (right if reason == "length" else right[: len(tokens)])
                self.places[at] = None
                return
            assert stream.ended[event.index] is None, "nothing comes after the end"
            tokens = stream.tokens[event.index]
            tokens += event.token_ids
            stream.ended[event.index] = event.finish_reason
            assert tokens == wanted[event.index][: len(tokens)]

    @rule(at=place)
    def leave(self, at: int) -> None:
        stream, self.places[at] = self.places[at], None
        if stream is None:
            return
        if isinstance(stream.events, Iterator):
            stream.events.close()  # type: ignore[attr-defined]
        else:
            self.loop.run_until_complete(stream.events.aclose())  # type: ignore[attr-defined]

    @rule(at=async_place, turns=st.integers(0, 5))
    def cancel(self, at: int, turns: int) -> None:
        """A task that waits for its next event."""
        stream, self.places[at] = self.places[at], None

        async def run() -> None:
            assert stream is not None
            task = asyncio.ensure_future(anext(stream.events, None))  # type: ignore[arg-type]
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        if stream is not None:
            self.loop.run_until_complete(run())

    @rule(some=batch, priority=priority)
    def generate(self, some: list[RequestSpec], priority: int = 0) -> None:
        wanted = [self.alone(one) for one in some]
        outputs = self.llm.generate([PROMPTS[one[0]] for one in some], [params(one) for one in some], priority=priority)
        assert [output.token_ids for output in outputs] == wanted

    @rule(some=batch, line=st.integers(0, 250))
    def interrupt(self, some: list[RequestSpec], line: int) -> None:
        with suppress(KeyboardInterrupt), interrupted(FILES, line):
            self.generate(some)

    @rule(at=st.integers(0, PLACES - ASYNC - 1), line=st.integers(0, 60))
    def interrupt_a_stream(self, at: int, line: int) -> None:
        try:
            with interrupted(FILES, line):
                self.step(at, 2)
        except KeyboardInterrupt:
            self.places[at] = None

    @rule(some=batch, line=st.integers(0, 3000))
    def fail_a_step(self, some: list[RequestSpec], line: int) -> None:
        for stream in self.places:
            if stream is not None:
                stream.may_fail = True
        with suppress(Fault), failing(self.llm._engine, STEP, line):
            self.generate(some)

    @rule(chance=st.integers(0, 3))
    def close(self, chance: int) -> None:
        """Only now and then: an engine has to be loaded again."""
        if chance:
            return
        self.llm.close()
        for at, stream in enumerate(self.places):
            begun = stream is not None and any(stream.tokens)
            with pytest.raises((ResourceError, Fault)) if begun and None in stream.ended else suppress(ResourceError, Fault):  # type: ignore[union-attr]
                while stream is not None and self.next_event(stream) is not None:
                    pass
            self.places[at] = None
        self.llm = self.make()
        self.take_clock()

    def teardown(self) -> None:
        for at in range(PLACES):
            self.step(at, 1000)
        self.loop.close()
        assert_idle(self.llm)
        longest, begins_as_it = (2, 0, 4), (6, 1, 4)
        self.generate([longest])
        [output] = self.llm.generate([PROMPTS[begins_as_it[0]]], params(begins_as_it))
        assert (output.token_ids, output.cached_tokens) == (self.alone(begins_as_it), 16), "pages of another kind of request are found"
        events = self.llm.stream([PROMPTS[longest[0]]], params((*longest[:2], 12)), deadline=self.passed + LATER)
        found = [next(events)]
        self.time_passes()
        found += events
        tokens = [token for event in found for token in event.token_ids]
        assert found[-1].finish_reason == "deadline" and tokens == self.alone((*longest[:2], 12))[: len(tokens)]
        assert_idle(self.llm)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"variant": "none", "cycles_in_flight": 2}, id="plain", marks=pytest.mark.full),
        pytest.param({**CHAIN, "num_pages": 26}, id="chain, short of pages"),
        pytest.param({**TREE, "cycles_in_flight": 2}, id="tree"),
    ],
)
def test_every_request_gets_the_tokens_of_a_run_of_its_own(pair: Pair, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    held = Lockstep(monkeypatch)
    engines: list[LLM] = []

    def engine() -> LLM:
        if not engines or engines[-1]._engine._driver.stopping:
            engines.append(pair.llm(**keys, page_size=4, max_rows=3, buckets=[1, 4]))
        return engines[-1]

    class Machine(Callers):
        make = staticmethod(engine)
        alone = Alone(pair.llm(variant="none", max_rows=1, buckets=[1]))
        lockstep = held

    run_state_machine_as_test(Machine, settings=settings(max_examples=10, stateful_step_count=12, phases=[Phase.generate]))

"""Several callers in any order: submit, step, close, generate, interrupt; every request's tokens are those of a run of its own.

A stateful property test. The engine is small and stays the same over all examples, so that what one leaves would show in the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from graphspec.engine.llm import LLM, SamplingParams
from graphspec.engine.outputs import StreamEvent
from tests.support.engines import CHAIN, TREE, Pair, mirror_pair, prompts
from tests.support.interrupts import interrupted

from .test_interrupts import FILES
from .test_shared_engine import assert_idle

PROMPTS = prompts(6, lengths=(5, 3, 17, 8, 1, 9))
KINDS = (
    {},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 1.1, "seed": 12, "top_k": 5, "logprobs": 1},
    {"repetition_penalty": 1.6, "frequency_penalty": 0.3},
    {"logit_bias": {4: 3.0, 7: -90.0, 20: 2.0}},
)
Asked = tuple[int, int, int]
"""Numbers of a prompt and of a kind, and how many tokens."""
asked = st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, len(KINDS) - 1), st.integers(1, 12))
batch = st.lists(asked, min_size=1, max_size=3)


def params(one: Asked) -> SamplingParams:
    return SamplingParams(max_tokens=one[2], min_tokens=min(one[1], one[2]), ignore_eos=True, **KINDS[one[1]])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return mirror_pair(tmp_path_factory.mktemp("pair"), noise=0.8)


class Alone:
    """What each request gives on an engine that serves nothing else."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._known = llm, dict[tuple[int, int], list[int]]()

    def __call__(self, one: Asked) -> list[int]:
        if one[:2] not in self._known:
            longest = (*one[:2], 12)
            self._known[one[:2]] = self._llm.generate([PROMPTS[one[0]]], params(longest))[0].token_ids
        return self._known[one[:2]][: one[2]]


@dataclass
class Open:
    """A stream, what it was asked for, and what it gave so far."""

    some: list[Asked]
    events: Iterator[StreamEvent]
    tokens: list[list[int]]
    ended: list[str | None]


PLACES = 4
place = st.integers(0, PLACES - 1)


class Callers(RuleBasedStateMachine):
    """Some places for streams. What may be done never depends on what was found: a place that is empty is passed over."""

    llm: LLM
    alone: Alone

    def __init__(self) -> None:
        super().__init__()
        self.places: list[Open | None] = [None] * PLACES

    @rule(at=place, some=batch)
    def submit(self, at: int, some: list[Asked]) -> None:
        self.close(at)
        for one in some:
            self.alone(one)
        events = self.llm.stream([PROMPTS[one[0]] for one in some], [params(one) for one in some])
        self.places[at] = Open(some, events, [[] for _ in some], [None] * len(some))

    @rule(at=place, count=st.integers(1, 6))
    def step(self, at: int, count: int) -> None:
        stream = self.places[at]
        for _ in range(count if stream is not None else 0):
            assert stream is not None
            wanted = [self.alone(one) for one in stream.some]
            event = next(stream.events, None)
            if event is None:
                assert stream.ended == ["length"] * len(stream.some)
                assert stream.tokens == wanted
                self.places[at] = None
                return
            assert stream.ended[event.index] is None, "nothing comes after the end"
            tokens = stream.tokens[event.index]
            tokens += event.token_ids
            stream.ended[event.index] = event.finish_reason
            assert tokens == wanted[event.index][: len(tokens)]

    @rule(at=place)
    def close(self, at: int) -> None:
        stream, self.places[at] = self.places[at], None
        if stream is not None:
            stream.events.close()  # type: ignore[attr-defined]

    @rule(some=batch)
    def generate(self, some: list[Asked]) -> None:
        wanted = [self.alone(one) for one in some]
        outputs = self.llm.generate([PROMPTS[one[0]] for one in some], [params(one) for one in some])
        assert [output.token_ids for output in outputs] == wanted

    @rule(some=batch, line=st.integers(0, 3000))
    def interrupt(self, some: list[Asked], line: int) -> None:
        with suppress(KeyboardInterrupt), interrupted(FILES, line):
            self.generate(some)

    @rule(at=place, line=st.integers(0, 600))
    def interrupt_a_stream(self, at: int, line: int) -> None:
        try:
            with interrupted(FILES, line):
                self.step(at, 2)
        except KeyboardInterrupt:
            self.places[at] = None

    def teardown(self) -> None:
        for at in range(PLACES):
            self.step(at, 1000)
        assert_idle(self.llm)


@pytest.mark.parametrize(
    "keys",
    [{"variant": "none", "cycles_in_flight": 2}, {**CHAIN, "page_size": 4, "num_pages": 26}, {**TREE, "cycles_in_flight": 2}],
    ids=["plain", "chain, short of pages", "tree"],
)
def test_every_request_gets_the_tokens_of_a_run_of_its_own(pair: Pair, keys: dict[str, Any]) -> None:
    class Machine(Callers):
        llm = pair.llm(**keys, max_rows=3, buckets=[1, 4])
        alone = Alone(pair.llm(variant="none", max_rows=1, buckets=[1]))

    run_state_machine_as_test(Machine, settings=settings(max_examples=10, stateful_step_count=12, phases=[Phase.generate]))

"""Several callers in any order: submit, step, close, generate, interrupt; every request's tokens are those of a run of its own.

A stateful property test. The engine is small and stays the same over all examples, so that what one leaves behind would show in the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from graphspec.engine.llm import LLM, SamplingParams
from graphspec.engine.outputs import StreamEvent

from ._engines import CHAIN, TREE, Pair, mirror_pair, prompts
from ._interrupts import interrupted
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


class Callers(RuleBasedStateMachine):
    """Streams that are open, each with what it asked for and what it got."""

    llm: LLM
    alone: Alone

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[tuple[list[Asked], Iterator[StreamEvent], dict[int, list[int]], dict[int, str | None]]] = []

    @rule(some=batch)
    @precondition(lambda self: len(self.streams) < 4)
    def submit(self, some: list[Asked]) -> None:
        stream = self.llm.stream([PROMPTS[one[0]] for one in some], [params(one) for one in some])
        self.streams.append((some, stream, {i: [] for i in range(len(some))}, {}))

    def take(self, number: int, events: int) -> None:
        some, stream, found, ended = self.streams[number]
        for _ in range(events):
            event = next(stream, None)
            if event is None:
                assert ended == dict.fromkeys(range(len(some)), "length")
                assert [found[i] for i in range(len(some))] == [self.alone(one) for one in some]
                del self.streams[number]
                return
            assert event.index not in ended, "nothing comes after the end"
            found[event.index] += event.token_ids
            if event.finished:
                ended[event.index] = event.finish_reason
            wanted = self.alone(some[event.index])
            assert found[event.index] == wanted[: len(found[event.index])]

    @rule(which=st.integers(0, 3), events=st.integers(1, 6))
    @precondition(lambda self: self.streams)
    def step(self, which: int, events: int) -> None:
        self.take(which % len(self.streams), events)

    @rule(which=st.integers(0, 3))
    @precondition(lambda self: self.streams)
    def close(self, which: int) -> None:
        _, stream, _, _ = self.streams.pop(which % len(self.streams))
        stream.close()  # type: ignore[attr-defined]

    @rule(some=batch)
    def generate(self, some: list[Asked]) -> None:
        outputs = self.llm.generate([PROMPTS[one[0]] for one in some], [params(one) for one in some])
        assert [output.token_ids for output in outputs] == [self.alone(one) for one in some]

    @rule(some=batch, at=st.integers(0, 3000))
    def interrupt(self, some: list[Asked], at: int) -> None:
        wanted = [self.alone(one) for one in some]
        with interrupted(FILES, at):
            try:
                outputs = self.llm.generate([PROMPTS[one[0]] for one in some], [params(one) for one in some])
            except KeyboardInterrupt:
                return
        assert [output.token_ids for output in outputs] == wanted

    @rule(which=st.integers(0, 3), at=st.integers(0, 600))
    @precondition(lambda self: self.streams)
    def interrupt_a_stream(self, which: int, at: int) -> None:
        number = which % len(self.streams)
        some = self.streams[number][0]
        for one in some:
            self.alone(one)
        with interrupted(FILES, at):
            try:
                self.take(number, 2)
            except KeyboardInterrupt:
                del self.streams[number]

    def teardown(self) -> None:
        while self.streams:
            self.take(0, 1000)
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

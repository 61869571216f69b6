"""Several open calls on one engine: none affects another, whichever drives and whatever sampling each requests."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import pytest

from graphspec.api.llm import LLM, SamplingParams, generate_through
from graphspec.api.outputs import StreamEvent
from graphspec.engine.engine import Engine
from graphspec.errors import ResourceError
from graphspec.shapes import SamplingClass
from tests.support.engines import CHAIN, TREE, Pair, ids, prompts
from tests.support.lockstep import Lockstep

SHAPES = pytest.mark.parametrize("shape", [{"variant": "none"}, CHAIN, TREE], ids=["plain", "chain", "tree"])
LENGTH = 20
PARAMS = SamplingParams(max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(autouse=True)
def lockstep(monkeypatch: pytest.MonkeyPatch) -> Lockstep:
    """What one call leaves half done is half done while the others run."""
    return Lockstep(monkeypatch)


def expected(pair: Pair, prompt_ids: list[list[int]], length: int = LENGTH) -> list[list[int]]:
    return [pair.greedy(prompt, length, ignore_eos=True) for prompt in prompt_ids]


def assert_idle(llm: LLM) -> None:
    llm.warm_up()  # ends when nothing is in flight any more
    engine = llm._engine
    scheduler = engine.scheduler
    assert (scheduler.allocator.num_used, llm.cycle.in_flight, scheduler.busy) == (0, 0, False)
    assert sorted(scheduler._free_rows) == list(range(llm.plan.max_rows))
    assert not scheduler.live and not engine._calls and not engine._open and not engine._broken


def collect(stream: Iterator[StreamEvent], into: dict[int, list[int]]) -> None:
    for event in stream:
        into.setdefault(event.index, []).extend(event.token_ids)


@SHAPES
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("cycles_in_flight", [1, 2])
def test_two_streams_in_turn(pair: Pair, shape: dict[str, Any], rows: int, cycles_in_flight: int) -> None:
    llm = pair.llm(**shape, max_rows=rows, buckets=[1, 4], cycles_in_flight=cycles_in_flight)
    prompt_ids = prompts(2)
    streams = [llm.stream(prompt, PARAMS) for prompt in prompt_ids]
    found: list[list[int]] = [[], []]
    for events in zip_longest(*streams):
        for tokens, event in zip(found, events, strict=True):
            tokens += event.token_ids if event is not None else []
    assert found == expected(pair, prompt_ids)
    assert_idle(llm)


@SHAPES
def test_generating_inside_the_loop_over_a_stream(pair: Pair, shape: dict[str, Any]) -> None:
    llm = pair.llm(**shape, max_rows=2, buckets=[1, 2])
    prompt_ids, inner = prompts(4), prompts(3, seed=5)
    found: dict[int, list[int]] = {}
    for number, event in enumerate(llm.stream(prompt_ids, PARAMS)):
        found.setdefault(event.index, []).extend(event.token_ids)
        if number % 4 == 0:
            assert ids(llm.generate(inner, SamplingParams(max_tokens=5, ignore_eos=True))) == expected(pair, inner, 5)
    assert [found[i] for i in range(4)] == expected(pair, prompt_ids)
    assert_idle(llm)


@SHAPES
def test_a_stream_goes_on_after_another_call_used_its_rows(pair: Pair, shape: dict[str, Any]) -> None:
    llm = pair.llm(**shape, max_rows=1, buckets=[1])
    prompt_ids = prompts(3)
    stream, found = llm.stream(prompt_ids, PARAMS), {}
    for _ in range(2):
        event = next(stream)
        found.setdefault(event.index, []).extend(event.token_ids)
    assert ids(llm.generate(prompt_ids, PARAMS)) == expected(pair, prompt_ids)
    collect(stream, found)
    assert [found[i] for i in range(3)] == expected(pair, prompt_ids)
    assert_idle(llm)


@SHAPES
@pytest.mark.parametrize("pages", [None, 24])
def test_threads(pair: Pair, shape: dict[str, Any], pages: int | None, lockstep: Lockstep) -> None:
    """Also with pages so short that rows of one caller make way for those of another."""
    lockstep.free = True
    llm = pair.llm(**shape, max_rows=3, buckets=[1, 4], page_size=4, num_pages=pages)
    prompt_ids = [prompts(3, seed=seed) for seed in range(4)]
    wanted = [expected(pair, some) for some in prompt_ids]
    found: dict[int, Any] = {}

    def generate(number: int) -> None:
        try:
            found[number] = [ids(llm.generate(prompt_ids[number], PARAMS)) for _ in range(2)]
        except BaseException as error:  # noqa: BLE001  the assertion shows it
            found[number] = error

    def stream(number: int) -> None:
        tokens: dict[int, list[int]] = {}
        try:
            collect(llm.stream(prompt_ids[number], PARAMS), tokens)
        except BaseException as error:  # noqa: BLE001
            found[number] = error
        else:
            found[number] = [[tokens[i] for i in range(3)]] * 2

    threads = [threading.Thread(target=(generate, stream)[i % 2], args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert [found[i] for i in range(4)] == [[some, some] for some in wanted]
    assert_idle(llm)


def test_sampling_of_one_call_does_not_affect_others(pair: Pair) -> None:
    """Rows that joined under one class run under a larger one, on rows where another request's filters, penalties and bias were."""
    kinds = [
        SamplingParams(max_tokens=LENGTH, ignore_eos=True),
        SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0.9, seed=3),
        SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=1.2, seed=4, top_k=2),
        SamplingParams(max_tokens=LENGTH, ignore_eos=True, repetition_penalty=1.7, presence_penalty=1.0),
        SamplingParams(max_tokens=LENGTH, ignore_eos=True, logit_bias=dict.fromkeys(range(0, 40, 3), -80.0), logprobs=2),
        SamplingParams(max_tokens=LENGTH, temperature=0.7, seed=9, min_tokens=LENGTH, min_p=0.2),
    ]
    prompt = prompts(1, lengths=(9,))[0]
    alone = [pair.llm(**CHAIN, max_rows=2).generate([prompt], kind)[0].token_ids for kind in kinds]
    assert len({tuple(tokens) for tokens in alone}) == len(kinds), "each of them changes what comes out"
    llm = pair.llm(**CHAIN, max_rows=2, buckets=[1, 2])
    for first in range(len(kinds)):
        for second in range(len(kinds)):
            # The first joins alone, in a class that is its own; then the second brings its own.
            stream, found = llm.stream([prompt], kinds[first]), []
            found += next(stream).token_ids
            assert llm.generate([prompt], kinds[second])[0].token_ids == alone[second], (first, second)
            for event in stream:
                found += event.token_ids
            assert found == alone[first], (first, second)
    assert_idle(llm)


def test_the_smallest_class_that_covers_its_rows_runs(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = pair.llm(**CHAIN, max_rows=2)
    prompt_ids = prompts(2)
    used: list[SamplingClass] = []
    launch = type(llm.cycle).launch
    monkeypatch.setattr(type(llm.cycle), "launch", lambda self, key, message: used.append(key.sampling) or launch(self, key, message))
    stream = llm.stream(prompt_ids[0], PARAMS)
    next(stream)
    hot = SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.0, seed=1)
    llm.generate([prompt_ids[1]], hot)
    together = len(used)
    collect(stream, {})
    assert set(used[:2]) == {SamplingClass()}
    assert SamplingClass(noise=True) in used[2:together]
    assert set(used[together:]) == {SamplingClass()}, "the remaining request is greedy and plain"


def test_exclusive_calls_are_refused_while_others_are_open(pair: Pair) -> None:
    llm = pair.llm(**TREE, max_rows=2)
    prompt_ids = prompts(2)
    stream = llm.stream(prompt_ids, PARAMS)
    found: dict[int, list[int]] = {}
    event = next(stream)
    found[event.index] = list(event.token_ids)
    for alone in (lambda: llm.draft_tree(prompt_ids[0]), lambda: generate_through(llm, llm.cycle, prompt_ids, PARAMS)):
        with pytest.raises(ResourceError, match=r"engine: expected no other open call during an exclusive one, found 2 requests"):
            alone()
    collect(stream, found)
    assert [found[i] for i in range(2)] == expected(pair, prompt_ids)
    assert llm.draft_tree(prompt_ids[0]).token_N
    assert ids(generate_through(llm, llm.cycle, prompt_ids, PARAMS)) == expected(pair, prompt_ids)
    assert_idle(llm)


def test_a_call_from_inside_a_step_is_refused(pair: Pair) -> None:
    """The thread that steps would wait for itself; progress is reported in the caller's own thread, which may call."""
    llm = pair.llm(**CHAIN)
    prompt_ids = prompts(2)

    class Calling:
        in_flight = property(lambda self: llm.cycle.in_flight)
        read = llm.cycle.read

        def launch(self, key: Any, message: Any) -> int:
            with pytest.raises(ResourceError, match="engine: expected a call from outside its own steps"):
                llm.generate([[1, 2]], PARAMS)
            refused.append(key)
            return llm.cycle.launch(key, message)

    refused: list[Any] = []
    assert ids(generate_through(llm, Calling(), prompt_ids, PARAMS)) == expected(pair, prompt_ids)
    assert len(refused) > 4
    inner: list[list[list[int]]] = []

    def progress(*_: Any) -> None:
        if not inner:
            inner.append([])
            inner[0] = ids(llm.generate(prompt_ids, PARAMS))

    llm._engine.progress = progress
    hot = SamplingParams(max_tokens=3, temperature=1.0, seed=1)
    assert [len(tokens) for tokens in ids(llm.generate(prompt_ids, hot))] == [3, 3]
    assert inner == [expected(pair, prompt_ids)]
    assert_idle(llm)


def test_programs_that_cannot_be_built_fail_the_call_that_needs_them(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = pair.llm(**CHAIN)
    prompt_ids = prompts(2)
    prepare = type(llm.cycle).prepare

    def refuse(self: Any, keys: Any, progress: Any = None) -> None:
        if any(key.sampling.penalties for key in keys):
            raise ResourceError("memory", "room", "none")
        prepare(self, keys, progress)

    monkeypatch.setattr(type(llm.cycle), "prepare", refuse)
    stream, found = llm.stream(prompt_ids, PARAMS), {}
    event = next(stream)
    found[event.index] = list(event.token_ids)
    with pytest.raises(ResourceError, match="memory: expected room, found none"):
        llm.generate(prompt_ids, SamplingParams(repetition_penalty=1.5))
    collect(stream, found)
    assert [found[i] for i in range(2)] == expected(pair, prompt_ids)
    assert_idle(llm)


def test_a_collected_stream_frees_its_rows(pair: Pair) -> None:
    llm = pair.llm(**CHAIN, max_rows=2)
    stream = llm.stream(prompts(3), PARAMS)
    next(stream)
    del stream
    gc.collect()
    assert_idle(llm)


def test_a_stream_that_is_collected_inside_a_step(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may close it anywhere, in the driving thread too."""
    llm = pair.llm(**CHAIN, max_rows=3)
    prompt_ids = prompts(2)
    left = [llm.stream(prompts(1, seed=7), PARAMS)]
    next(left[0])
    step = Engine._step

    def collecting(self: Engine) -> None:
        step(self)
        left.clear()

    monkeypatch.setattr(Engine, "_step", collecting)
    assert ids(llm.generate(prompt_ids, PARAMS)) == expected(pair, prompt_ids)
    assert_idle(llm)


def test_a_consumer_that_raises_ends_its_own_call_only(pair: Pair) -> None:
    llm = pair.llm(**CHAIN, max_rows=2)
    prompt_ids = prompts(2)
    stream, found = llm.stream(prompt_ids, PARAMS), {}
    event = next(stream)
    found[event.index] = list(event.token_ids)

    def progress(*_: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.generate(prompt_ids, PARAMS, progress)
    collect(stream, found)
    assert [found[i] for i in range(2)] == expected(pair, prompt_ids)
    assert_idle(llm)


def test_a_call_next_to_an_open_one_builds_one_class(pair: Pair) -> None:
    """The class of both together; nothing is built for it alone while the other waits."""
    llm = pair.llm(**CHAIN, max_rows=2)
    stream = llm.stream(prompts(1), SamplingParams(max_tokens=LENGTH, ignore_eos=True, repetition_penalty=1.5))
    next(stream)
    before = {key.sampling for key in llm.cycle.programs}
    llm.generate(prompts(1), SamplingParams(max_tokens=3, temperature=1.0, seed=1))
    assert {key.sampling for key in llm.cycle.programs} - before == {SamplingClass(noise=True, penalties=True)}
    collect(stream, {})
    assert_idle(llm)


@SHAPES
def test_what_a_larger_class_wrote_for_an_earlier_request_is_cleared(pair: Pair, shape: dict[str, Any], lockstep: Lockstep) -> None:
    """Where a prompt ends is written by every join with room for it: before that no stop id comes, which is not so for a shorter one."""
    # Latest, so that the other one has joined before.
    right = max((pair.greedy([token], LENGTH) for token in range(43)), key=lambda tokens: (tokens[-1] == 43) * len(tokens))
    stops = next([token] for token in range(43) if pair.greedy([token], LENGTH) == right)
    llm = pair.llm(**shape, max_rows=2, buckets=[2], prefix_cache=False)
    biased = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0.9, logit_bias={3: 2.0})
    llm.warm_up(2, sampling=biased.resolve().sampling_class)
    llm.generate(prompts(2, lengths=(30, 30)), SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.9))
    llm.warm_up(2)  # with greedy programs there the short one joins in one of them, and decodes in one of the others' class
    short, _ = llm.generate([stops, prompts(1)[0]], [SamplingParams(max_tokens=LENGTH), biased])
    assert (short.token_ids, short.finish_reason) == (right, "stop")

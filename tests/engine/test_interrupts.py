"""Ctrl-C at every line of a caller, errors at every line of a step: no result is shifted, no other call is affected, nothing leaks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch._dynamo import utils as dynamo_utils

from graphspec.api.llm import LLM, SamplingParams
from graphspec.api.outputs import StreamEvent
from graphspec.engine.engine import Engine
from graphspec.engine.request import Request
from graphspec.engine.scheduler import Scheduler
from graphspec.errors import CaptureError, ResourceError
from graphspec.graphs.cycle import Cycle
from graphspec.graphs.programs import PrefillKey, Program
from graphspec.graphs.stages.mailbox import Message, MessageBuffer
from graphspec.shapes import GREEDY, SamplingClass
from tests.support.engines import CHAIN, TREE, Pair, ids, prompts
from tests.support.interrupts import Fault, failing, interrupted
from tests.support.lockstep import Lockstep

from .test_shared_engine import assert_idle, expected

FILES = ("engine/engine.py", "engine/driver.py", "api/llm.py")
"""What a caller runs."""
STEP = (
    "engine/scheduler.py", "engine/admission.py", "engine/pages.py", "graphspec/graphs/cycle.py",
    MessageBuffer.write.__code__,
    *(
        getattr(Engine, name).__code__
        for name in ("_handle_command", "_start_call", "_admit", "_cover", "_prepare", "_report_building", "_report")
    ),
)  # fmt: skip
"""What the driving thread runs, but for what it does after an error."""
LENGTH = 7
PARAMS = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
PLAIN_AND_CHAIN = [pytest.param({"variant": "none"}, id="plain", marks=pytest.mark.full), pytest.param(CHAIN, id="chain")]
BOUNDARIES = (Cycle.launch.__code__, Cycle._send.__code__, Cycle.read.__code__, MessageBuffer.write.__code__)


@pytest.fixture(autouse=True)
def lockstep(monkeypatch: pytest.MonkeyPatch) -> Lockstep:
    """What is open stays open while something else is interrupted."""
    return Lockstep(monkeypatch)


class Opened:
    """A stream that is under way."""

    def __init__(self, llm: LLM, prompt_ids: list[list[int]], params: SamplingParams = PARAMS) -> None:
        self.stream, self.events, self.prompt_ids = llm.stream(prompt_ids, params), list[StreamEvent](), prompt_ids
        self.events += [next(self.stream) for _ in prompt_ids]

    def tokens(self) -> list[list[int]]:
        """Of every request, to their ends."""
        self.events += self.stream
        assert sum(event.finished for event in self.events) == len(self.prompt_ids)
        return [[token for event in self.events if event.index == i for token in event.token_ids] for i in range(len(self.prompt_ids))]


def lines_of(llm: LLM, codes: Any, prompt_ids: list[list[int]], params: SamplingParams = PARAMS) -> int:
    with failing(llm._engine, codes, None) as lines:
        llm.generate(prompt_ids, params)
    return lines.count


def check(llm: LLM, pair: Pair, codes: Any, at: int, prompt_ids: list[list[int]], other: list[list[int]]) -> str:
    """A step fails while two calls are open; returns where. Each call has its tokens or the error; the next one has its tokens."""
    opened = Opened(llm, other)
    where, failed = "nowhere", 0
    with failing(llm._engine, codes, at) as lines:
        try:
            assert ids(llm.generate(prompt_ids, PARAMS)) == expected(pair, prompt_ids, LENGTH)
        except Fault:
            failed += 1
        try:
            assert opened.tokens() == expected(pair, other, LENGTH), f"the open stream, after an error at {lines.where}"
        except Fault:
            failed += 1
        where = lines.where or where
    assert bool(failed) == (where != "nowhere"), f"an error at {where} that no caller received"
    assert ids(llm.generate(prompt_ids, PARAMS)) == expected(pair, prompt_ids, LENGTH), f"the next call, after an error at {where}"
    assert_idle(llm)
    return where


@pytest.mark.parametrize(
    ("shape", "cycles_in_flight"),
    [
        pytest.param(CHAIN, 2, id="chain-2"), pytest.param(TREE, 1, id="tree-1"),
        pytest.param(CHAIN, 1, id="chain-1", marks=pytest.mark.full), pytest.param(TREE, 2, id="tree-2", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_every_boundary_of_launch_and_read(pair: Pair, shape: dict[str, Any], cycles_in_flight: int) -> None:
    llm = pair.llm(**shape, max_rows=2, buckets=[1, 2], cycles_in_flight=cycles_in_flight)
    prompt_ids, other = prompts(1), prompts(2, seed=3)
    llm.generate(other, PARAMS)
    count = lines_of(llm, BOUNDARIES, prompt_ids)
    # From the first prompt chunk on, through launches of every kind and their results.
    seen = {check(llm, pair, BOUNDARIES, at, prompt_ids, other) for at in range(min(count, 90))}
    lines = {line for code in BOUNDARIES for _, _, line in code.co_lines() if line is not None}
    assert len(seen) > 0.5 * len(lines), "logprobs, debug mode and CUDA have lines of their own"


@pytest.mark.parametrize("shape", PLAIN_AND_CHAIN)
def test_anywhere_in_a_step(pair: Pair, shape: dict[str, Any]) -> None:
    """Every line of the driving thread in turn, about; pages are short, so that rows are sent back as well."""
    llm = pair.llm(**shape, max_rows=2, buckets=[1, 2], cycles_in_flight=2, page_size=4, num_pages=20)
    prompt_ids, other = prompts(3), prompts(1, seed=3)
    llm.generate(other, PARAMS)
    count = lines_of(llm, STEP, prompt_ids)
    seen = {check(llm, pair, STEP, at, prompt_ids, other) for at in range(0, count, max(1, count // 50))}
    assert len(seen) > 20


def test_anywhere_in_a_caller(pair: Pair) -> None:
    """Ctrl-C at every line that a caller runs, about: the other call does not notice, and nothing of the interrupted one stays."""
    llm = pair.llm(**CHAIN, max_rows=2, buckets=[1, 2], cycles_in_flight=2)
    prompt_ids, other = prompts(1), prompts(1, seed=3)
    llm.generate(other, PARAMS)
    seen = set()
    for call in (lambda: ids(llm.generate(prompt_ids, PARAMS)), lambda: Opened(llm, prompt_ids).tokens()):
        with interrupted(FILES, None) as lines:
            call()
        for at in range(0, lines.count, max(1, lines.count // 40)):
            opened = Opened(llm, other)
            with suppress(KeyboardInterrupt), interrupted(FILES, at) as lines:
                assert call() == expected(pair, prompt_ids, LENGTH)
            seen.add(lines.where)
            assert opened.tokens() == expected(pair, other, LENGTH), f"the open stream, after an interrupt at {lines.where}"
            assert_idle(llm)
    assert len(seen) > 20


def test_ctrl_c_reaches_a_caller_that_waits(pair: Pair, lockstep: Lockstep) -> None:
    """A signal, while the caller sleeps and the engine builds nothing and steps nothing; the engine serves on."""
    llm = pair.llm(**CHAIN, max_rows=2)
    prompt_ids = prompts(2)
    llm.generate(prompt_ids, PARAMS)
    held = threading.Event()
    step = Engine._step
    process = os.getpid()

    def stopped(engine: Engine) -> None:
        if not held.is_set():
            held.set()
            os.kill(process, signal.SIGINT)
        step(engine)

    engine_step, Engine._step = step, stopped  # type: ignore[method-assign]
    # A shell has what it starts in the background ignore the signal.
    heeded = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        opened = llm.stream(prompt_ids, SamplingParams(max_tokens=70, ignore_eos=True))
        with pytest.raises(KeyboardInterrupt):
            for _ in opened:
                # Python runs a handler when the main thread runs again, wherever it then is.
                pass
            llm.generate(prompt_ids, SamplingParams(max_tokens=70, ignore_eos=True))
    finally:
        Engine._step = engine_step  # type: ignore[method-assign]
        signal.signal(signal.SIGINT, heeded)
    assert ids(llm.generate(prompt_ids, PARAMS)) == expected(pair, prompt_ids, LENGTH)
    assert_idle(llm)


def test_callers_of_other_launches_continue(pair: Pair) -> None:
    """A prompt that cannot be launched fails its own call; rows that decode are prefilled again and end with their tokens."""
    llm = pair.llm(**CHAIN, max_rows=3)
    prompt_ids, other = prompts(1), prompts(2, seed=3)
    llm.generate(other, PARAMS)
    opened = Opened(llm, other)
    launch = llm.cycle.launch

    def broken(key: Any, message: Message) -> int:
        if isinstance(key, PrefillKey) and any(list(chunk.tokens) == prompt_ids[0] for chunk in message.chunks):
            raise Fault
        return launch(key, message)

    llm.cycle.launch = broken  # type: ignore[method-assign]
    with pytest.raises(Fault):
        llm.generate(prompt_ids, PARAMS)
    assert opened.tokens() == expected(pair, other, LENGTH)
    llm.cycle.launch = launch  # type: ignore[method-assign]
    assert ids(llm.generate(prompt_ids, PARAMS)) == expected(pair, prompt_ids, LENGTH)
    assert_idle(llm)


def test_a_device_that_is_lost_is_reported_to_every_call(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery fails as well; once the device is back, so is the engine."""
    llm = pair.llm(**CHAIN, max_rows=3)
    prompt_ids, other = prompts(1), prompts(2, seed=3)
    llm.generate(other, PARAMS)
    opened = Opened(llm, other)

    def lost(*_: Any) -> None:
        raise Fault

    with monkeypatch.context() as patch:
        patch.setattr(Cycle, "reset", lost)
        patch.setattr(Cycle, "read", lost)
        for call in (lambda: llm.generate(prompt_ids, PARAMS), opened.tokens, lambda: llm.generate(prompt_ids, PARAMS), llm.warm_up):
            with pytest.raises(Fault):
                call()
    assert ids(llm.generate(prompt_ids, PARAMS)) == expected(pair, prompt_ids, LENGTH)
    assert_idle(llm)


@pytest.mark.parametrize("shape", PLAIN_AND_CHAIN)
def test_results_that_were_taken_are_not_taken_twice(pair: Pair, shape: dict[str, Any]) -> None:
    """An error while results are processed, with log-probabilities and a stop id; the call that continues took no part in the launch."""
    llm = pair.llm(**shape, max_rows=2, buckets=[1, 2])
    # With one lane the rows take turns, so that an error concerns one of the two.
    llm.cycle.dropped.update(
        key for prompt_ids in (GREEDY, SamplingClass(logprobs=1)) for key in llm.plan.graph_keys(prompt_ids) if key.bucket > 1
    )
    prompt_ids, other = prompts(1), prompts(1, seed=3)
    wanted = pair.greedy(other[0], LENGTH, ignore_eos=True)
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, stop_token_ids=[wanted[5]], logprobs=1)
    whole = llm.generate(other, params)[0]
    taking = (Scheduler._read_oldest, Scheduler._take, Scheduler._finish, Scheduler._end, Request.note_logprobs)
    codes = tuple(function.__code__ for function in taking)
    llm.generate(prompt_ids, PARAMS)
    count = lines_of(llm, codes, prompt_ids)
    went_on = 0
    for at in range(count):
        stream, events, failed = llm.stream(other, params), [], False
        events.append(next(stream))
        with failing(llm._engine, codes, at):
            with suppress(Fault):
                llm.generate(prompt_ids, PARAMS)
            try:
                events += stream
            except Fault:
                failed = True
        if not failed:
            went_on += 1
            assert [token for event in events for token in event.token_ids] == whole.token_ids
            assert [entry.token_id for event in events for entry in event.logprobs or ()] == whole.token_ids
            assert [event.finish_reason for event in events if event.finished] == [whole.finish_reason]
    assert went_on > count // 4
    assert_idle(llm)


def test_while_programs_are_built(pair: Pair) -> None:
    """Another call's class is built while a stream is open; what was built in part is built again."""
    prompt_ids, other = prompts(1), prompts(1, seed=3)
    penalised = SamplingParams(max_tokens=LENGTH, ignore_eos=True, repetition_penalty=1.5)
    wanted = ids(pair.llm(**CHAIN).generate(prompt_ids, penalised))
    codes = tuple(getattr(Cycle, name).__code__ for name in ("prepare", "_each", "_build"))
    failed = 0
    for at in range(0, 100, 10):
        llm = pair.llm(**CHAIN, max_rows=2, buckets=[1, 2])
        opened = Opened(llm, other)
        with failing(llm._engine, codes, at) as lines:
            try:
                assert ids(llm.generate(prompt_ids, penalised)) == wanted
            except Fault:
                failed += 1
                assert lines.where
        assert opened.tokens() == expected(pair, other, LENGTH)
        assert ids(llm.generate(prompt_ids, penalised)) == wanted
        assert_idle(llm)
    assert failed > 5


@pytest.mark.parametrize("moment", ["before the copy", "before the program", "after the program"])
def test_a_launch_that_did_not_end_must_be_forgotten_first(pair: Pair, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cycle by itself: the device may have counted the launch or not."""
    llm = pair.llm(**CHAIN)
    llm.warm_up()
    cycle, prompt_ids = llm.cycle, prompts(1)  # the engine is idle: this thread may use its cycle
    key = next(iter(llm.keys(1, GREEDY)))
    program = cycle.programs[key]
    stop = {
        "before the copy": (MessageBuffer, "write"),
        "before the program": (type(program), "__call__"),
        "after the program": (Cycle, "_send"),
    }
    owner, name = stop[moment]
    real = getattr(owner, name)

    def raising(*arguments: Any) -> Any:
        if moment == "after the program":
            real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raising)
        with pytest.raises(KeyboardInterrupt):
            cycle.launch(key, Message(lanes=()))
    for use in (lambda: cycle.launch(key, Message(lanes=())), lambda: cycle.read(0)):
        with pytest.raises(ResourceError, match="ring: expected launches and reads that ended, found one that was interrupted"):
            use()
    cycle.reset()
    assert int(cycle.arena["cycle_1"]) == cycle._launched and cycle.in_flight == 0
    assert ids(llm.generate(prompt_ids, PARAMS)) == expected(pair, prompt_ids, LENGTH)


def test_a_launch_that_compiles_shifts_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes after the program ran; the device has counted it."""
    llm = pair.llm(**CHAIN, max_rows=2)
    prompt_ids = prompts(2)
    llm.generate(prompt_ids, PARAMS)
    run: Callable[[Program], None] = Program.__call__
    calls = [0]

    def compiling(program: Program) -> None:
        run(program)
        calls[0] += 1
        llm.cycle.compilations.graphs += calls[0] == 4

    with monkeypatch.context() as patch:
        patch.setattr(Program, "__call__", compiling)
        with pytest.raises(CaptureError, match="expected no compilation after the warm-up"):
            llm.generate(prompt_ids, PARAMS)
    for _ in range(2):
        assert ids(llm.generate(prompt_ids, PARAMS)) == expected(pair, prompt_ids, LENGTH)
    assert_idle(llm)


def test_what_others_compile_meanwhile_is_not_a_launch_that_compiles(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's counts are per process; another engine has its own thread."""
    llm = pair.llm(variant="none", runtime="compiled", max_rows=1, buckets=[1])
    prompt_ids = prompts(1)
    llm.generate(prompt_ids, PARAMS)
    run: Callable[[Program], None] = Program.__call__
    another = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    graphs = [dynamo_utils.counters["stats"]["unique_graphs"]]

    def run_while_another_compiles(program: Program) -> None:
        # Another shape each time is another graph.
        thread = threading.Thread(target=another, args=(torch.ones(len(graphs)),))
        thread.start()
        run(program)
        thread.join()
        graphs.append(dynamo_utils.counters["stats"]["unique_graphs"])

    monkeypatch.setattr(Program, "__call__", run_while_another_compiles)
    assert ids(llm.generate(prompt_ids, PARAMS)) == expected(pair, prompt_ids, LENGTH)
    assert len(set(graphs[:5])) == 5, "launches saw Dynamo's own count rise"
    assert_idle(llm)


def test_an_envelope_interrupted_between_its_words_is_written_whole(pair: Pair) -> None:
    cycle = pair.llm(variant="none", max_rows=4).cycle
    messages = [Message(lanes=[0, 1, 2]), Message(lanes=[3]), Message(lanes=[2, 1])]
    whole = []
    for message in messages:
        words = torch.zeros(cycle.layout.size, dtype=torch.int64)
        cycle.layout.encode(message, words)
        whole.append(words)
    for at in range(12):
        buffer = MessageBuffer(cycle.layout, pinned=False)
        assert torch.equal(buffer.write(messages[0]), whole[0])
        with suppress(KeyboardInterrupt), interrupted((MessageBuffer.write.__code__,), at):
            buffer.write(messages[1])
        assert torch.equal(buffer.write(messages[2]), whole[2])
        assert torch.equal(buffer.write(messages[0]), whole[0])

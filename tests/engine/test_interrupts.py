"""Ctrl-C at every line: no later result is shifted, no other call notices, nothing stays taken."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from graphspec.engine.llm import LLM, SamplingParams
from graphspec.engine.scheduler import Scheduler
from graphspec.errors import CaptureError, ResourceError
from graphspec.graphs.cycle import Cycle
from graphspec.graphs.envelope import Envelope
from graphspec.graphs.stages.mailbox import Message
from graphspec.shapes import GREEDY
from tests.support.engines import CHAIN, TREE, Pair, ids, mirror_pair, prompts
from tests.support.interrupts import interrupted

from .test_shared_engine import assert_idle, collect, expected

FILES = (
    "engine/engine.py",
    "engine/scheduler.py",
    "engine/offers.py",
    "engine/prefix.py",
    "engine/pages.py",
    "graphspec/graphs/cycle.py",
    "graphs/envelope.py",
)
LENGTH = 7
PARAMS = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
BOUNDARIES = (Cycle.launch.__code__, Cycle._send.__code__, Cycle.read.__code__, Envelope.write.__code__)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return mirror_pair(tmp_path_factory.mktemp("pair"), noise=0.8)


def lines_of(llm: LLM, codes: Any, asked: list[list[int]], params: SamplingParams = PARAMS) -> int:
    with interrupted(codes, None) as lines:
        llm.generate(asked, params)
    return lines.count


def check(llm: LLM, pair: Pair, codes: Any, at: int, asked: list[list[int]], other: list[list[int]]) -> str:
    """Interrupt one call while another is open; returns where it happened."""
    stream, found = llm.stream(other, PARAMS), {}
    for _ in range(2):
        event = next(stream)
        found.setdefault(event.index, []).extend(event.token_ids)
    where = "nowhere"
    with interrupted(codes, at) as lines:
        try:
            assert ids(llm.generate(asked, PARAMS)) == expected(pair, asked, LENGTH)
        except KeyboardInterrupt:
            where = lines.where
    collect(stream, found)
    assert [found[i] for i in range(len(other))] == expected(pair, other, LENGTH), f"the open stream, after an interrupt at {where}"
    assert ids(llm.generate(asked, PARAMS)) == expected(pair, asked, LENGTH), f"the next call, after an interrupt at {where}"
    assert_idle(llm)
    return where


@pytest.mark.parametrize("cycles_in_flight", [1, 2])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_every_boundary_of_launch_and_read(pair: Pair, shape: dict[str, Any], cycles_in_flight: int) -> None:
    llm = pair.llm(**shape, max_rows=2, buckets=[1, 2], cycles_in_flight=cycles_in_flight)
    asked, other = prompts(1), prompts(2, seed=3)
    llm.generate(other, PARAMS)
    count = lines_of(llm, BOUNDARIES, asked)
    # From the first prompt chunk on, through launches of every kind and their results.
    seen = {check(llm, pair, BOUNDARIES, at, asked, other) for at in range(min(count, 90))}
    lines = {line for code in BOUNDARIES for _, _, line in code.co_lines() if line is not None}
    assert len(seen) > 0.5 * len(lines), "logprobs, debug mode and CUDA have lines of their own"


@pytest.mark.parametrize("shape", [{"variant": "none"}, CHAIN], ids=["plain", "chain"])
def test_anywhere_in_the_engine(pair: Pair, shape: dict[str, Any]) -> None:
    """Every line of the host's side in turn, about; pages are short, so that rows are sent back as well."""
    llm = pair.llm(**shape, max_rows=2, buckets=[1, 2], cycles_in_flight=2, page_size=4, num_pages=20)
    asked, other = prompts(3), prompts(1, seed=3)
    llm.generate(other, PARAMS)
    count = lines_of(llm, FILES, asked)
    seen = {check(llm, pair, FILES, at, asked, other) for at in range(0, count, max(1, count // 50))}
    assert len(seen) > 20


@pytest.mark.parametrize("shape", [{"variant": "none"}, CHAIN], ids=["plain", "chain"])
def test_results_that_were_taken_are_not_taken_twice(pair: Pair, shape: dict[str, Any]) -> None:
    """An interrupt between tokens and what they mean, with log-probabilities and a stop id."""
    llm = pair.llm(**shape, max_rows=2, buckets=[1, 2])
    asked, other = prompts(1), prompts(1, seed=3)
    wanted = pair.greedy(other[0], LENGTH, ignore_eos=True)
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, stop_token_ids=[wanted[5]], logprobs=1)
    whole = llm.generate(other, params)[0]
    taking = ("_read_oldest", "_take", "_finish", "_note_logprobs", "_end")
    codes = tuple(getattr(Scheduler, name).__code__ for name in taking)
    llm.generate(asked, PARAMS)
    count = lines_of(llm, codes, asked)
    for at in range(count):
        # The interrupted call drives both.
        stream, events = llm.stream(other, params), []
        events.append(next(stream))
        with suppress(KeyboardInterrupt), interrupted(codes, at):
            llm.generate(asked, PARAMS)
        events += stream
        assert [token for event in events for token in event.token_ids] == whole.token_ids
        assert [entry.token_id for event in events for entry in event.logprobs or ()] == whole.token_ids
        assert [event.finish_reason for event in events if event.finished] == [whole.finish_reason]
    assert_idle(llm)


def test_while_programs_are_built(pair: Pair) -> None:
    """Another call's class is built while a stream is open; what was built in part is built again."""
    asked, other = prompts(1), prompts(1, seed=3)
    penalised = SamplingParams(max_tokens=LENGTH, ignore_eos=True, repetition_penalty=1.5)
    wanted = ids(pair.llm(**CHAIN).generate(asked, penalised))
    codes = tuple(getattr(Cycle, name).__code__ for name in ("prepare", "_each", "_build"))
    for at in range(0, 100, 10):
        llm = pair.llm(**CHAIN, max_rows=2, buckets=[1, 2])
        stream, found = llm.stream(other, PARAMS), {}
        event = next(stream)
        found[0] = list(event.token_ids)
        with interrupted(codes, at) as lines:
            try:
                assert ids(llm.generate(asked, penalised)) == wanted
            except KeyboardInterrupt:
                assert lines.where
        collect(stream, found)
        assert found[0] == expected(pair, other, LENGTH)[0]
        assert ids(llm.generate(asked, penalised)) == wanted
        assert_idle(llm)


@pytest.mark.parametrize("moment", ["before the copy", "before the program", "after the program"])
def test_a_launch_that_did_not_end_must_be_forgotten_first(pair: Pair, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cycle by itself: the device may have counted the launch or not."""
    llm = pair.llm(**CHAIN)
    llm.warm_up()
    cycle, asked = llm.cycle, prompts(1)
    key = next(iter(llm.keys(1, GREEDY)))
    program = cycle.programs[key]
    stop = {
        "before the copy": (Envelope, "write"),
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
    assert ids(llm.generate(asked, PARAMS)) == expected(pair, asked, LENGTH)


def test_a_launch_that_compiles_shifts_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes after the program ran; the device has counted it."""
    llm = pair.llm(**CHAIN, max_rows=2)
    asked = prompts(2)
    llm.generate(asked, PARAMS)
    counted: Callable[[], int] = llm.cycle.compiled_graphs
    calls = [0]

    def compiled() -> int:
        calls[0] += 1
        return counted() + (calls[0] == 8)

    with monkeypatch.context() as patch:
        patch.setattr(llm.cycle, "compiled_graphs", compiled)
        with pytest.raises(CaptureError, match="expected no compilation after the warm-up"):
            llm.generate(asked, PARAMS)
    for _ in range(2):
        assert ids(llm.generate(asked, PARAMS)) == expected(pair, asked, LENGTH)
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
        envelope = Envelope(cycle.layout, pinned=False)
        assert torch.equal(envelope.write(messages[0]), whole[0])
        with suppress(KeyboardInterrupt), interrupted((Envelope.write.__code__,), at):
            envelope.write(messages[1])
        assert torch.equal(envelope.write(messages[2]), whole[2])
        assert torch.equal(envelope.write(messages[0]), whole[0])

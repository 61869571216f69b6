"""Callers in an event loop: their tokens, and the engine's state after cancelling, closing and errors."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

import graphspec
from graphspec.api.async_llm import AsyncLLM
from graphspec.api.llm import LLM, SamplingParams
from graphspec.api.outputs import StreamEvent, cumulative
from graphspec.errors import RequestError, ResourceError
from graphspec.graphs.cycle import Cycle
from graphspec.shapes import GREEDY
from tests.support.engines import CHAIN, Pair, ids, prompts
from tests.support.interrupts import Fault
from tests.support.lockstep import PAUSE

from .test_shared_engine import assert_idle, expected

LENGTH = 16
PARAMS = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=80, ignore_eos=True)


async def collect(llm: AsyncLLM, prompt: Any, params: SamplingParams = PARAMS) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    async for event in llm.generate(prompt, params):
        found.setdefault(event.index, []).extend(event.token_ids)
    return found


@pytest.mark.parametrize("cycles_in_flight", [1, 2])
def test_many_callers_at_a_time(pair: Pair, cycles_in_flight: int) -> None:
    """In the loop and in threads, over one engine."""
    llm = pair.llm(**CHAIN, max_rows=3, buckets=[1, 4], cycles_in_flight=cycles_in_flight)
    face = AsyncLLM(llm)
    prompt_ids = prompts(6)

    async def run() -> list[Any]:
        several = [collect(face, [prompt_ids[i], prompt_ids[i - 1]]) for i in range(len(prompt_ids))]
        return await asyncio.gather(asyncio.to_thread(llm.generate, prompt_ids, PARAMS), *several)

    outputs, *found = asyncio.run(run())
    wanted = expected(pair, prompt_ids, LENGTH)
    assert ids(outputs) == wanted
    assert found == [{0: wanted[i], 1: wanted[i - 1]} for i in range(len(prompt_ids))]
    assert_idle(llm)


def test_the_loop_goes_on_while_the_engine_steps(pair: Pair) -> None:
    """What the loop does between two events is not held up by a step that does not end."""
    llm = pair.llm(**CHAIN)
    face = AsyncLLM(llm)
    wait, waited = threading.Event(), []
    read = llm.cycle.read

    def slow(ticket: int) -> Any:
        waited.append(wait.wait(120))
        return read(ticket)

    llm.cycle.read = slow  # type: ignore[method-assign]

    async def run() -> dict[int, list[int]]:
        task = asyncio.ensure_future(collect(face, prompts(1)))
        for _ in range(20):
            await asyncio.sleep(0)
        wait.set()
        return await task

    assert asyncio.run(run()) == {0: expected(pair, prompts(1), LENGTH)[0]}
    assert waited and all(waited)


def test_greedy_programs_are_there_before_the_first_caller(pair: Pair) -> None:
    face = AsyncLLM(pair.llm(**CHAIN, max_rows=4, buckets=[1, 4]))
    built = len(face.llm.capture_report())
    assert built == len(face.llm.keys(4, GREEDY))
    asyncio.run(collect(face, prompts(3)))
    assert len(face.llm.capture_report()) == built


def hold(llm: LLM) -> tuple[list[Any], threading.Event]:
    """An engine that makes no step from the first token on until the event says that the caller has left; and its requests."""
    requests: list[Any] = []
    engine, left = llm._engine, threading.Event()
    add, step = engine.scheduler.add, engine._step

    def held() -> None:
        if left.is_set() or not any(request.output for request in requests):
            step()
        else:
            time.sleep(PAUSE)

    engine.scheduler.add = lambda request: (requests.append(request), add(request))  # type: ignore[method-assign]
    engine._step = held  # type: ignore[method-assign]
    return requests, left


@pytest.mark.parametrize("how", ["cancelled", "closed", "left", "loop closed"])
def test_a_caller_that_leaves_aborts_its_requests(pair: Pair, how: str) -> None:
    """The requests of others get their tokens; rows and pages are given back."""
    llm = pair.llm(**CHAIN, max_rows=2)
    face = AsyncLLM(llm)
    prompt_ids = prompts(3)
    requests, left = hold(llm)

    async def run() -> None:
        events = face.generate(prompt_ids[:2], ENDLESS)
        await anext(events)
        other = asyncio.ensure_future(collect(face, prompt_ids[2]))
        if how == "loop closed":
            return
        if how == "cancelled":
            # An event that has already come ends the wait before the cancellation; steps are held, so no more than a few have.
            cancelled = False
            while not cancelled:
                task = asyncio.ensure_future(anext(events))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
                cancelled = task.cancelled()
        elif how == "closed":
            await events.aclose()
        elif how == "left":
            del events
            gc.collect()
            await asyncio.sleep(0)
        left.set()
        assert (await other)[0] == expected(pair, prompt_ids, LENGTH)[2]

    asyncio.run(run())
    left.set()
    assert_idle(llm)
    reasons = [request.finish_reason for request in requests if request.budget == ENDLESS.max_tokens]
    assert reasons == ["abort", "abort"]


def test_an_event_has_what_is_new_and_all_so_far(pair: Pair) -> None:
    llm = pair.llm(**CHAIN, max_rows=4)
    face, prompt_ids = AsyncLLM(llm), prompts(2)
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, n=2, temperature=1.0, seed=3, logprobs=1)

    async def run() -> tuple[Any, ...]:
        events = [event async for event in face.stream(prompt_ids, params, "mine")]
        return events, await face.generate(prompt_ids, params)

    events, outputs = asyncio.run(run())
    new: dict[tuple[int, int], list[int]] = {}
    for event in events:
        tokens = new.setdefault((event.index, event.sample), [])
        tokens += event.token_ids
        [so_far] = event.outputs
        assert (event.request_id, event.prompt_token_ids, so_far.index) == ("mine", prompt_ids[event.index], event.sample)
        assert so_far.token_ids == tokens == [entry.token_id for entry in so_far.logprobs or []]
        assert so_far.finish_reason == event.finish_reason == ("length" if event.finished else None)
    assert [new[output.index, output.sample] for output in outputs] == [output.token_ids for output in outputs] == list(new.values())
    assert len(events) > len(outputs) == 4
    assert_idle(llm)


def test_texts_of_events_are_put_together() -> None:
    add = cumulative("r", [SimpleNamespace(index=0, sample=0, prompt=[1, 2])])  # type: ignore[list-item]
    pieces = [("one", [5], False), (" ", [6, 7], False), ("two", [], True)]
    events = [add(StreamEvent(0, text, tokens, last, finish_reason="stop" if last else None)) for text, tokens, last in pieces]
    assert [event.outputs[0].text for event in events] == ["one", "one ", "one two"], "later events change no earlier one"
    assert [event.outputs[0].token_ids for event in events] == [[5], [5, 6, 7], [5, 6, 7]]
    assert isinstance(events[0], StreamEvent) and events[2].outputs[0].finish_reason == "stop"


def test_waiting_gives_the_outputs(pair: Pair) -> None:
    """From the beginning, from the middle of the events, and once more."""
    llm = pair.llm(**CHAIN, max_rows=3, buckets=[1, 4])
    face, prompt_ids = AsyncLLM(llm), prompts(3)
    wanted = expected(pair, prompt_ids, LENGTH)

    async def run() -> None:
        assert ids(await face.generate(prompt_ids, PARAMS)) == wanted
        assert ids(await face.generate(prompt=prompt_ids[0], sampling_params=PARAMS, request_id="a")) == wanted[:1]
        begun = face.generate(prompt_ids, PARAMS)
        await anext(begun)
        assert ids(await begun) == ids(await begun) == wanted
        with pytest.raises(RequestError, match="prompts: expected prompts, or prompt as another name of it, found both"):
            face.generate(prompt_ids, prompt=prompt_ids[0])
        with pytest.raises(RequestError, match="a token id from 0 to"):
            await face.generate([10**9], PARAMS)
        closed = face.generate(prompt_ids, PARAMS)
        await closed.aclose()
        with pytest.raises(ResourceError, match="one that was closed before"):
            await closed

    asyncio.run(run())
    assert_idle(llm)


@pytest.mark.parametrize("how", ["break", "abort", "cancelled"])
def test_what_is_left_ends_with_its_caller_or_by_its_name(pair: Pair, how: str) -> None:
    """A call can be ended by anyone who knows its name, and the same name then serves again."""
    llm = pair.llm(**CHAIN, max_rows=2)
    face, (requests, left) = AsyncLLM(llm), hold(llm)

    async def leave() -> None:
        async for event in face.generate(prompts(1)[0], ENDLESS, "mine"):
            assert event.request_id == "mine"
            break

    async def run() -> None:
        if how == "break":
            await leave()
        else:
            task = asyncio.ensure_future(_outputs(face))
            while not any(request.output for request in requests):
                await asyncio.sleep(PAUSE)
            with pytest.raises(RequestError, match="request_id: expected one that no open call has, found 'mine'"):
                await face.generate(prompts(1)[0], PARAMS, "mine")
            await face.abort("another")
            if how == "abort":
                await face.abort("mine")
            else:
                task.cancel()
            left.set()
            assert isinstance(
                (await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError if how == "cancelled" else list
            )
        left.set()
        assert ids(await face.generate(prompts(1)[0], PARAMS, "mine")) == expected(pair, prompts(1), LENGTH)

    asyncio.run(run())
    assert_idle(llm)
    assert [request.finish_reason for request in requests] == ["abort", *["abort"] * (how != "break" and len(requests) == 3), "length"]


async def _outputs(face: AsyncLLM) -> Any:
    return await face.generate(prompts(1)[0], ENDLESS, "mine")


def test_errors_reach_the_caller(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = pair.llm(**CHAIN, max_rows=2)
    face = AsyncLLM(llm)
    with pytest.raises(RequestError):
        asyncio.run(collect(face, prompts(1), [PARAMS, PARAMS]))  # type: ignore[arg-type]

    def broken(*_: Any) -> None:
        raise Fault

    with monkeypatch.context() as patch:
        patch.setattr(Cycle, "read", broken)
        with pytest.raises(Fault):
            asyncio.run(collect(face, prompts(2)))
    assert asyncio.run(collect(face, prompts(1)))[0] == expected(pair, prompts(1), LENGTH)[0]
    assert_idle(llm)


def test_closing_ends_open_calls(pair: Pair) -> None:
    llm = pair.llm(**CHAIN, max_rows=2)

    async def run() -> None:
        async with AsyncLLM(llm) as face:
            open_calls = [asyncio.ensure_future(collect(face, prompts(1), ENDLESS)) for _ in range(3)]
            await asyncio.sleep(0)
            held = face.generate(prompts(1), ENDLESS)
            await anext(held)
        for call in await asyncio.gather(*open_calls, return_exceptions=True):
            assert isinstance(call, ResourceError) or len(call[0]) == 80  # type: ignore[index]
        with pytest.raises(ResourceError, match="engine: expected an open engine, found one that was closed"):
            await collect(face, prompts(1))

    asyncio.run(run())
    assert not llm._engine._driver.thread.is_alive()


def test_it_is_exported(pair: Pair) -> None:
    face = graphspec.AsyncLLM(model=pair.target, draft=pair.draft, runtime="eager", prefill_chunks=[8, 16], **CHAIN)
    assert asyncio.run(collect(face, prompts(1)))[0] == expected(pair, prompts(1), LENGTH)[0]

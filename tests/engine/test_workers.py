"""Threads for texts: order, errors, cancelled callers, and calls that do not wait for each other."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from typing import Any

import pytest

from graphspec.api.async_llm import LONG_TEXT, AsyncLLM, length_of
from graphspec.api.workers import Workers
from graphspec.engine.request import SamplingParams
from graphspec.shapes import NEUTRAL
from graphspec.text.conversation import Conversation

PATIENCE = 60.0


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if name in thread.name]


def test_jobs_run_in_order_and_errors_go_to_their_callers() -> None:
    async def main() -> None:
        workers, done = Workers("of a test", 1), []

        def fail() -> None:
            raise KeyError("of a job")

        jobs = [workers.run(lambda place=place: done.append(place)) for place in range(20)]
        results = await asyncio.gather(*jobs, workers.run(fail), workers.run(lambda: 7), return_exceptions=True)
        assert done == list(range(20)) and results[-1] == 7 and isinstance(results[-2], KeyError)

    asyncio.run(main())
    gc.collect()
    for thread in named("of a test"):
        thread.join(PATIENCE)
    assert not named("of a test")


def test_a_caller_that_is_cancelled_frees_its_place() -> None:
    async def main() -> None:
        workers, go, ran = Workers("busy", 1), threading.Event(), []
        first = asyncio.ensure_future(workers.run(lambda: go.wait(PATIENCE)))
        second = asyncio.ensure_future(workers.run(lambda: ran.append("second")))
        third = asyncio.ensure_future(workers.run(lambda: ran.append("third")))
        while workers.stuck_seconds == 0:
            await asyncio.sleep(0.001)
        second.cancel()
        await asyncio.sleep(0)
        go.set()
        assert await first and await third is None
        assert ran == ["third"]
        while workers.stuck_seconds:
            await asyncio.sleep(0.001)

    asyncio.run(main())


def test_a_process_does_not_wait_for_a_job() -> None:
    code = """
import asyncio, threading
from graphspec.api.workers import Workers
workers, began = Workers("endless", 1), threading.Event()
async def main():
    asyncio.ensure_future(workers.run(lambda: (began.set(), threading.Event().wait())))
    while not began.is_set():
        await asyncio.sleep(0.001)
    print("ends")
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr


@pytest.mark.parametrize(
    ("prompts", "length"),
    [
        ("abc", 3),
        (["abc", "de"], 5),
        ([5] * 7, 7),
        ([[5] * 7, "ab"], 9),
        ({"prompt": "abc"}, 3),
        (Conversation([{"role": "user", "content": "abc"}, 3]), 7),
        (None, 0),
    ],
)
def test_lengths_of_calls(prompts: Any, length: int) -> None:
    assert length_of(prompts) == length


def test_calls_of_one_kind_do_not_wait_for_another() -> None:
    """Long texts and grammars that take for ever: a short text is served."""

    class Slow:
        """An engine whose long texts and grammars wait."""

        class plan:
            max_rows = 1
            sampling_defaults = NEUTRAL

        def __init__(self) -> None:
            self.go = threading.Event()

        def warm_up(self, *_: Any, **__: Any) -> None: ...

        def submit(self, prompts: Any, params: Any, *_: Any, **__: Any) -> str:
            if prompts != "short" or params is not None:
                self.go.wait(PATIENCE)
            return "submitted"

    async def main() -> None:
        from graphspec.text.structured import Structured

        engine = Slow()
        llm = AsyncLLM(engine)  # type: ignore[arg-type]
        grammar = SamplingParams(structured=Structured(regex="a"))
        waiting = [asyncio.ensure_future(llm.submit("x" * LONG_TEXT)) for _ in range(9)]
        waiting += [asyncio.ensure_future(llm.submit("short", params)) for params in [grammar, [grammar]] * 5]
        async with asyncio.timeout(PATIENCE):
            assert (await llm.submit("short")).stream == "submitted"  # type: ignore[comparison-overlap]
        assert not any(task.done() for task in waiting)
        engine.go.set()
        await asyncio.gather(*waiting)

    asyncio.run(main())

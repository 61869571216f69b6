"""The engine's own thread: when it starts and ends, its settings, and calls that are refused."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphspec.api.llm import LLM, SamplingParams
from graphspec.errors import ConfigError, RequestError, ResourceError
from graphspec.shapes import GREEDY, SamplingClass, SamplingDefaults, prepared_classes
from tests.support.engines import CHAIN, Pair, ids, prompts
from tests.support.lockstep import Lockstep
from tests.support.plans import plan as make

from .test_shared_engine import assert_idle, expected

LENGTH = 8
PARAMS = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
CLOSED = "engine: expected an open engine, found one that was closed"


def test_closed_it_ends_open_calls_and_refuses_others(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    Lockstep(monkeypatch)
    with pair.llm(**CHAIN, max_rows=2) as llm:
        stream = llm.stream(prompts(2), PARAMS)
        next(stream)
        thread = llm._engine._driver.thread
        assert thread.is_alive()
    assert not thread.is_alive()
    with pytest.raises(ResourceError, match=CLOSED):
        list(stream)
    for use in (lambda: llm.generate(prompts(1), PARAMS), lambda: next(llm.stream(prompts(1))), llm.warm_up, lambda: llm.draft_tree([1])):
        with pytest.raises(ResourceError, match=CLOSED):
            use()
    llm.close()
    assert llm.cycle.in_flight == 0 and llm.slots(), "what does not run can still be looked at"


def test_closing_wakes_a_caller_that_waits(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another thread, during a call that would never end."""
    held = Lockstep(monkeypatch)
    llm = pair.llm(**CHAIN)
    errors: list[BaseException] = []
    begun = threading.Event()

    def call() -> None:
        try:
            for _ in llm.stream(prompts(1), SamplingParams(max_tokens=80, ignore_eos=True)):
                begun.set()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    real = type(llm._engine)._step
    monkeypatch.setattr(type(llm._engine), "_step", lambda engine: real(engine) if not begun.is_set() else None)
    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    assert begun.wait(60)
    llm.close()
    caller.join(60)
    assert not caller.is_alive() and held is not None
    assert [str(error) for error in errors] == [CLOSED]


def test_collected_it_leaves_no_thread(pair: Pair) -> None:
    for _ in range(3):
        llm = pair.llm(**CHAIN)
        assert ids(llm.generate(prompts(1), PARAMS)) == expected(pair, prompts(1), LENGTH)
        thread, cycle = llm._engine._driver.thread, weakref.ref(llm.cycle)
        del llm
        gc.collect()
        thread.join(60)
        assert not thread.is_alive()
        assert cycle() is None


def test_dropped_while_it_serves_it_ends_after_that(pair: Pair) -> None:
    """A reference to a stream keeps the engine alive."""
    llm = pair.llm(**CHAIN)
    stream, thread = llm.stream(prompts(1), PARAMS), llm._engine._driver.thread
    tokens = list(next(stream).token_ids)
    del llm
    gc.collect()
    for event in stream:
        tokens += event.token_ids
    assert tokens == expected(pair, prompts(1), LENGTH)[0]
    del stream
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


SCRIPT = """
import sys, threading
from graphspec.api.llm import LLM, SamplingParams
llm = LLM({target!r}, draft={draft!r}, runtime="eager", prefill_chunks=[8, 16])
stream = llm.stream([[1, 2, 3]], SamplingParams(max_tokens=80, ignore_eos=True))
next(stream)
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("print('end')", 0), ("sys.exit(3)", 3), ("raise KeyboardInterrupt", -2), ("llm.close(); print('end')", 0)],
    ids=["end", "exit", "interrupt", "closed"],
)
def test_the_interpreter_ends_with_a_call_open(pair: Pair, end: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(target=str(pair.target), draft=str(pair.draft), end=end)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    # 130: as a shell names what a signal ended.
    assert done.returncode in ((code, 130) if code < 0 else (code,)), done.stderr
    assert "Fatal" not in done.stderr and "terminate" not in done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_is_refused_and_harms_nothing(pair: Pair) -> None:
    script = SCRIPT.format(
        target=str(pair.target),
        draft=str(pair.draft),
        end="""
import os
child = os.fork()
if child == 0:
    try:
        llm.generate([[1, 2, 3]])
    except Exception as error:
        print(error, flush=True)
        del llm, stream
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(sum(len(event.token_ids) for event in stream) > 0)
""",
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    refusal, served = done.stdout.splitlines()
    assert refusal.startswith("engine: expected use in the process that made it") and "a fork of it" in refusal
    assert served == "True"


def test_its_thread_is_set_as_the_one_that_loaded_it(pair: Pair) -> None:
    """torch keeps thread counts and the handling of denormals per thread."""
    torch.set_num_threads(3)
    llm = pair.llm(**CHAIN)
    torch.set_num_threads(2)
    tiny = torch.tensor([1e-40])
    threads, product = llm._engine.between_steps(lambda: (torch.get_num_threads(), float(tiny * 1.0)))
    assert threads == 3
    assert product == 0.0
    assert torch.get_num_threads() == 2


def test_a_caller_that_wants_whole_outputs_is_woken_once(pair: Pair) -> None:
    llm = pair.llm(**CHAIN, max_rows=2)
    woken: list[int] = []
    requests = llm._requests(prompts(3), PARAMS)
    handle = llm._engine.submit(requests, streaming=False, notify=lambda: woken.append(sum(len(r.output) for r in requests)))
    assert handle.wait() == [] and handle.ended
    assert woken == [3 * LENGTH]


def test_progress_is_reported_in_the_callers_thread(pair: Pair) -> None:
    seen: list[tuple[str, int, int, int | None]] = []
    llm = LLM(
        pair.target, "none", runtime="eager", prefill_chunks=[8, 16],
        progress=lambda phase, done, total: seen.append((phase, done, total, threading.get_ident())),
    )  # fmt: skip
    llm.generate(prompts(1), PARAMS)
    assert {entry[3] for entry in seen} == {threading.get_ident()}
    assert [entry[0] for entry in seen if entry[0] == "build"]


def test_building_for_one_call_while_others_wait_is_logged(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A prepared class that covers the request is used, even if it computes more; only a missing one is built, with a message."""
    Lockstep(monkeypatch)
    llm = pair.llm(**CHAIN, max_rows=2)
    stream = llm.stream(prompts(1), PARAMS)
    next(stream)
    with caplog.at_level(logging.WARNING, "graphspec.engine.engine"):
        llm.generate(prompts(1), SamplingParams(max_tokens=3, temperature=1.0, top_k=5, seed=1))
    assert caplog.messages == ["1 requests wait while programs are built for other requests: noise+truncate"]
    built = {key.sampling for key in llm.cycle.programs}
    assert built == {GREEDY, SamplingClass(noise=True, truncate=True)}
    llm.generate(prompts(1), SamplingParams(max_tokens=3, temperature=1.0, seed=1))
    assert {key.sampling for key in llm.cycle.programs} == built
    stream.close()
    assert_idle(llm)


def test_configured_classes() -> None:
    everything = SamplingClass(noise=True, truncate=True, penalties=True, bias=True, logprobs=20, allowed=True, bad_words=True)
    assert make("none").sampling_classes == (GREEDY, everything)
    named = make("none", runtime={"sampling_classes": ["noise+truncate", "greedy", "greedy"], "max_logprobs": 3})
    assert named.sampling_classes == (SamplingClass(noise=True, truncate=True), GREEDY)
    noise = SamplingClass(noise=True)
    names = ["default", "everything+grammar", "everything+prompt_logprobs", "prompt_logprobs+noise"]
    assert prepared_classes(names, SamplingDefaults(temperature=0.7), 20) == (
        noise, replace(everything, grammar=True), replace(everything, prompt_logprobs=True), replace(noise, prompt_logprobs=True)
    )  # fmt: skip
    for wrong in ("truncate", "noise+noise", "all", "", "default+noise", "everything+noise"):
        with pytest.raises(
            ConfigError, match=r"runtime.sampling_classes\[0\]: expected greedy, everything, everything\+grammar, default, or"
        ):
            make("none", runtime={"sampling_classes": [wrong]})


def test_a_sealed_engine_builds_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests run in the smallest class that covers them, alone and together; what none covers is refused before it waits."""
    hot = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0.9, seed=3)
    scored = SamplingParams(max_tokens=3, temperature=1.0, seed=1, logprobs=1)
    alone = pair.llm(**CHAIN)
    wanted = [alone.generate(prompts(1), params)[0].token_ids for params in (hot, scored)]
    llm: Any = pair.llm(**CHAIN, max_rows=2, max_logprobs=2, sampling_classes=["greedy", "noise", "logprobs"])
    llm.seal()
    assert {key.sampling for key in llm.cycle.programs} == {
        GREEDY, SamplingClass(noise=True), SamplingClass(logprobs=2), SamplingClass(noise=True, logprobs=2)
    }  # fmt: skip
    monkeypatch.setattr(llm.cycle, "_build", lambda key: pytest.fail(f"built {key}"))
    streams = [llm.submit(prompts(1), params) for params in (hot, scored)]
    for stream in streams:
        while not stream.ended:
            stream.wait()
    assert [stream.requests[0].output for stream in streams] == wanted
    assert ids(llm.generate(prompts(1), PARAMS)) == expected(pair, prompts(1), LENGTH)
    for params, field in (({"prompt_logprobs": 1}, "prompt_logprobs"), ({"temperature": 1.0, "top_k": 5}, "top_k, top_p, min_p")):
        with pytest.raises(
            RequestError, match=rf"sampling\.{field}: expected the default, since no class of runtime\.sampling_classes has"
        ):
            llm.generate(prompts(1), SamplingParams(max_tokens=3, **params))
    assert_idle(llm)


def test_all_configured_classes_are_prepared_together(pair: Pair) -> None:
    """As a captured engine does at load; afterwards no request makes another one wait."""
    llm: Any = pair.llm(**CHAIN, max_rows=2, max_logprobs=2)
    llm._engine.prepare(llm.plan.max_rows, *llm.plan.sampling_classes)
    built = len(llm.cycle.programs)
    assert {key.sampling for key in llm.cycle.programs} == {*llm.plan.sampling_classes}
    hot = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0.9, seed=3)
    alone = pair.llm(**CHAIN).generate(prompts(1), hot)[0].token_ids
    assert llm.generate(prompts(1), hot)[0].token_ids == alone
    assert ids(llm.generate(prompts(1), PARAMS)) == expected(pair, prompts(1), LENGTH)
    assert len(llm.cycle.programs) == built

"""Grammars that take too long: refused in time, dropped with their clients, and no burden on others or on the server's end."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import httpx2
import pytest

from graphspec.api.grammar import Grammars
from graphspec.api.llm import LLM
from graphspec.serve import app, grammar_trials
from graphspec.text.schema_size import compile_steps
from graphspec.text.structured import Structured
from tests.support.hostile import COMPLETIONS as PATH
from tests.support.hostile import LONG, body, schema
from tests.support.serving import PATIENCE, Served, raw_post, serving, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(model="demo", variant="none", runtime="eager", max_rows=2) as found:
        yield found


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Served]:
    with serving(llm, grammar_seconds=120.0) as found:
        assert found.post(PATH, body(schema(2))).status_code == 200
        yield found


def forks(server: Served) -> list[str]:
    """Compilations in the server's process for them."""
    process = server.api.trials._process
    assert process is not None
    number = process._process.pid
    return Path(f"/proc/{number}/task/{number}/children").read_text().split()


def test_one_that_takes_too_long_is_refused(llm: LLM) -> None:
    """In a time that does not depend on it, after which the process serves others."""
    with serving(llm, grammar_seconds=0.3) as server:
        error = server.post(PATH, body(LONG)).json()["error"]
        expected = "expected a grammar that compiles within server.grammar_seconds = 0.3 and 1024 MiB, found 730924"
        assert error["param"] == "structured.json_schema" and expected in error["message"] and "characters" in error["message"]
        server.idle()
        wait_for(lambda: not forks(server))


def test_one_that_can_not_be_compiled_is_not_tried(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trials, "_Process", lambda *_: pytest.fail("tried"))
    with serving(llm) as server:
        error = server.post(PATH, body(schema(1001))).json()["error"]
        assert error["param"] == "structured.json_schema" and "fewer optional properties" in error["message"]


def test_steps_count_the_optional_properties_of_every_object() -> None:
    inner = schema(3)
    outer = {**schema(4), "required": ["k1"], "items": [inner, {"anyOf": [inner]}]}
    assert compile_steps(Structured(json_schema=outer)) == 3**2 + 9 + 9
    assert compile_steps(Structured(structural_tag={"type": "json_schema", "json_schema": inner})) == 9
    assert compile_steps(Structured(regex="a")) == compile_steps(Structured(json_schema=True)) == 0


def test_a_client_that_leaves_ends_its_compilation(server: Served) -> None:
    """Unless another waits for the same grammar."""
    sent = raw_post(json.dumps(body(LONG)).encode())
    waiting = server.api.trials._waiting
    with server.connect() as first, server.connect() as second:
        first.sendall(sent)
        wait_for(lambda: len(forks(server)) == 1)
        second.sendall(sent)
        wait_for(lambda: list(waiting.values()) == [2])
        first.close()
        wait_for(lambda: list(waiting.values()) == [1])
        assert len(forks(server)) == 1
        assert server.post(PATH, body(schema(3))).status_code == 200
        second.close()
        wait_for(lambda: not forks(server))
        server.idle()


def test_each_is_tried_once(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = server.complete(**body(schema(5)))["choices"]
    monkeypatch.setattr(grammar_trials._Process, "hand_over", lambda *_: pytest.fail("tried again"))
    assert server.complete(**body(schema(5)))["choices"] == wanted


def test_a_process_that_died_is_replaced(server: Served) -> None:
    before = server.api.trials._process
    assert before is not None
    before._process.kill()
    before._process.wait()
    assert server.post(PATH, body(schema(6))).status_code == 200 and server.api.trials._process is not before


def test_health_is_that_of_the_process(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs; it answers while a grammar is compiled, and one that died is replaced when it is needed."""

    def health() -> int:
        return server.client.get("/health").status_code

    trials = server.api.trials
    process = trials._process
    assert process is not None and health() == 200
    with server.connect() as connection:
        connection.sendall(raw_post(json.dumps(body(LONG)).encode()))
        wait_for(lambda: len(forks(server)) == 1 and health() == 200 and trials._question.done())
    process._process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(app, "STUCK_SECONDS", 0.0)
    health()  # Asks.
    assert health() == 503
    process._process.send_signal(signal.SIGCONT)
    wait_for(lambda: health() == 200)
    wait_for(trials._question.done)
    process._process.kill()
    process._process.wait()
    assert health() == health() == 200
    assert server.post(PATH, body(schema(8))).status_code == 200 and health() == 200


def test_grammars_may_come_while_they_are_counted(llm: LLM) -> None:
    """Two clients at once: a server under load failed so."""
    grammars = Grammars(llm.plan)
    kept = []

    class Arriving:
        @property
        def memory_size_bytes(self) -> int:
            kept.append(Arriving())
            grammars._held[Structured(regex="b" * len(kept))] = kept[-1]
            return 3

    kept.append(Arriving())
    grammars._held[Structured(regex="a")] = kept[-1]
    assert (grammars.held_bytes, grammars.held_bytes) == (3, 6)
    del kept[1:]
    gc.collect()
    assert grammars.held_bytes == 3


def test_grammars_that_are_held_are_bounded(server: Served, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's grammar counts until it is dropped."""

    def none_held() -> None:
        # The engine keeps the requests of its last step until the next one.
        server.complete(prompt="x", max_tokens=2)
        wait_for(lambda: gc.collect() >= 0 and llm.grammars.held_bytes == 0)

    none_held()
    stream = llm.submit("x", {"structured": Structured(json_schema=schema(7)), "max_tokens": 200})
    size = llm.grammars.held_bytes
    assert size > 0
    with monkeypatch.context() as patch:
        patch.setattr(grammar_trials, "CACHE_BYTES", size - 1)
        patch.setattr(llm, "load", lambda: SimpleNamespace(running=1, waiting=0))
        refused = server.post(PATH, body(schema(2)))
    assert refused.status_code == 503 and refused.headers["retry-after"]
    stream.abort()
    server.idle()
    del stream
    none_held()


def test_a_grammar_that_is_held_is_not_compiled_again(llm: LLM) -> None:
    from graphspec import SamplingParams

    grammars, params = Grammars(llm.plan), SamplingParams(structured=Structured(regex="ab"))
    first, second = (grammars.grammar(params, (0,), lambda: llm.tokenizer) for _ in range(2))
    assert first._compiled is second._compiled


def test_the_server_ends_while_a_grammar_is_compiled() -> None:
    words = ["model=demo", "variant=none", "runtime=eager", "server.port=0", "server.drain_seconds=30", "server.grammar_seconds=600"]
    command = [sys.executable, "-m", "graphspec", "serve", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        assert httpx2.post(f"{url}/completions", json=body(schema(2)), timeout=PATIENCE).status_code == 200
        with httpx2.Client(timeout=0.5) as client, pytest.raises(httpx2.ReadTimeout):
            client.post(f"{url}/completions", json=body(LONG))
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(PATIENCE) == 0
        assert time.monotonic() - began < 30

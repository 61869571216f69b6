"""Hostile inputs beside a stream and a prober: what runs where, counted, and in the full tier how long the others wait."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from graphspec.api.llm import LLM
from graphspec.api.outputs import StopTexts, automaton
from graphspec.serve import app
from graphspec.serve.bodies import LARGE_BODY
from tests.support.hostile import COMPLETIONS, FIELDS, INPUTS, MORE, body, schema
from tests.support.serving import PATIENCE, serving, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def test_no_long_work_is_done_by_the_event_loop_or_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies of :data:`LARGE_BODY` bytes are parsed, texts encoded, stop texts prepared and grammars compiled by other threads."""
    from graphspec.api import grammar

    done: dict[str, set[str]] = {}

    def note(owner: Any, name: str, minimum: int = 0) -> None:
        real = getattr(owner, name)

        def noted(*given: Any, **named: Any) -> Any:
            if not minimum or len(given[0]) >= minimum:
                done.setdefault(name, set()).add(threading.current_thread().name)
            return real(*given, **named)

        monkeypatch.setattr(owner, name, noted)

    automaton.cache_clear()  # of the same inputs in other tests
    with LLM(model="demo", variant="eagle3", runtime="eager") as llm, serving(llm, grammar_seconds=0.5) as server:
        note(app, "parse_json", LARGE_BODY)
        for name in ("encode", "words", "chat"):
            note(llm.tokenizer, name)
        note(StopTexts, "__init__")
        note(grammar, "compile_grammar")
        for path, sent in [*((path, sent) for path, sent, _ in FIELDS.values()), *MORE.values()]:
            server.post(path, sent)
        server.complete(**body(schema(2)))
    assert done.keys() == {"parse_json", "encode", "__init__", "compile_grammar"}
    for name, threads in done.items():
        assert all(thread.startswith(("graphspec texts", "graphspec long texts", "graphspec grammars")) for thread in threads), name


class Waits:
    """How long one client waits each time, in seconds."""

    def __init__(self, loop: Callable[[Waits], None]) -> None:
        self.seconds: list[float] = []
        self.stop = threading.Event()
        threading.Thread(target=loop, args=(self,), daemon=True).start()
        wait_for(lambda: self.seconds)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server in a process of its own, whose clients take nothing from it but processors."""
    words = ["model=demo", "variant=eagle3", "runtime=eager", "server.port=0", "server.access_log=off", "server.grammar_seconds=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "graphspec", "serve", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True) as process:
        assert process.stdout is not None
        found = process.stdout.readline().split()[-1].removesuffix("/v1")
        yield found
        process.terminate()


@pytest.fixture(scope="module")
def clients(url: str) -> Iterator[dict[str, Waits]]:
    def stream(waits: Waits) -> None:
        sent = {"prompt": "def f(x):", "max_tokens": 300, "temperature": 0.7, "ignore_eos": True, "stream": True}
        with httpx2.Client(timeout=PATIENCE) as client:
            while not waits.stop.is_set():
                with client.stream("POST", url + COMPLETIONS, json=sent) as response:
                    last = 0.0
                    for line in response.iter_lines():
                        now = time.perf_counter()
                        if line.startswith("data: {"):
                            waits.seconds += [now - last] if last else []
                            last = now

    def probe(waits: Waits) -> None:
        with httpx2.Client(timeout=PATIENCE) as client:
            while not waits.stop.wait(0.01):
                began = time.perf_counter()
                assert client.get(url + "/health").status_code == 200
                waits.seconds.append(time.perf_counter() - began)

    found = {"stream": Waits(stream), "health": Waits(probe)}
    yield found
    for waits in found.values():
        waits.stop.set()


ATTEMPTS = 5
"""Another process may delay any of them; what the input itself delays is in all of them."""


@pytest.mark.full
@pytest.mark.parametrize("name", INPUTS)
def test_others_wait_little_longer(url: str, clients: dict[str, Waits], name: str) -> None:
    """The longest wait next to the input is at most three times the 99th percentile without it, and 50 ms."""
    host, port = url.removeprefix("http://").split(":")
    excess = dict.fromkeys(clients, float("inf"))
    for _ in range(ATTEMPTS):
        idle, beside = ({kind: len(waits.seconds) for kind, waits in clients.items()} for _ in range(2))
        wait_for(lambda idle=idle: all(len(clients[kind].seconds) > idle[kind] + 25 for kind in clients))
        beside = {kind: len(waits.seconds) for kind, waits in clients.items()}
        # It may refuse before it has read everything.
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection, suppress(OSError):
            connection.sendall(INPUTS[name])
            connection.recv(65536)
        wait_for(lambda beside=beside: all(len(clients[kind].seconds) > beside[kind] + 2 for kind in clients))
        for kind, waits in clients.items():
            calm = sorted(waits.seconds[idle[kind] : beside[kind]])
            maximum = 3 * calm[int(0.99 * (len(calm) - 1))] + 0.05
            excess[kind] = min(excess[kind], max(waits.seconds[beside[kind] :]) - maximum)
        if max(excess.values()) <= 0:
            break
    assert max(excess.values()) <= 0, excess

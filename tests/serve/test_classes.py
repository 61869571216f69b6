"""Programs of a server: all that it will ever run are built before it is ready, and until then it says so."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from graphspec.api.llm import LLM
from graphspec.config.compose import load_config
from graphspec.config.server_options import ServerConfig
from graphspec.graphs.cycle import Cycle
from graphspec.serve.http import HttpServer, bind
from graphspec.serve.limits import Keys
from graphspec.serve.loading import answering
from graphspec.serve.run import load_api
from graphspec.shapes import GREEDY
from tests.support.hostile import COMPLETIONS, INPUTS
from tests.support.serving import PATIENCE, Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

WORDS = ("model=demo", "variant=eagle3", "runtime=eager", "runtime.max_rows=2", "runtime.buckets=[1,2]", "server.grammar_seconds=1")
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "a temperature": {"temperature": 0.8},
    "a filter": {"temperature": 0.8, "top_p": 0.9},
    "penalties": {"temperature": 0, "presence_penalty": 1},
    "a bias": {"temperature": 0, "logit_bias": {"7": 2}},
    "allowed ids": {"temperature": 0, "allowed_token_ids": [7, 8, 9]},
    "bad words": {"temperature": 0, "bad_words": ["def"]},
    "log-probabilities": {"temperature": 0, "logprobs": 3},
    "those of the prompt": {"temperature": 0, "echo": True, "logprobs": 1},
    "a grammar": {"temperature": 0, "structured_outputs": {"regex": "[ab]+"}},
    "all of it": {
        "top_k": 5,
        "frequency_penalty": 1,
        "bad_words": ["x"],
        "prompt_logprobs": 1,
        "structured_outputs": {"choice": ["a", "b"]},
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    api = load_api(load_config(*WORDS), Keys())
    with api.llm.llm, serving(api) as found:
        yield found


@pytest.fixture
def built(server: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Programs that are built, or asked for in vain, from here on."""
    found: list[object] = []
    prepare, build = Cycle.prepare, Cycle._build
    monkeypatch.setattr(Cycle, "prepare", lambda self, keys, *more: [found.append("asked"), prepare(self, keys, *more)][1])
    monkeypatch.setattr(Cycle, "_build", lambda self, key: [found.append(key), build(self, key)][1])
    yield found
    assert server.llm.load().running == 0


def test_what_is_built(server: Served) -> None:
    """Greedy, everything, both with what a prompt's tokens are scored by, and each of these with a grammar."""
    kinds = {(key.sampling.noise, key.sampling.prompt_logprobs, key.sampling.grammar) for key in server.llm.cycle.programs}
    assert kinds == {(False, False, False), *((True, scored, grammar) for scored in (False, True) for grammar in (False, True))}
    assert all(server.llm.cycle.prepared(key) for each in server.llm.plan.sampling_classes for key in server.llm.keys(2, each))


@pytest.mark.parametrize(("name", "beside"), combinations_with_replacement(ASKED, 2))
def test_no_request_has_a_program_built(server: Served, built: list[object], name: str, beside: str) -> None:
    """Two requests at a time, whatever they ask for."""
    answers: list[dict[str, Any]] = []

    def ask(fields: dict[str, Any]) -> None:
        answers.append(server.complete(prompt="def f(x):", max_tokens=6, seed=1, **fields))

    threads = [threading.Thread(target=ask, args=(ASKED[each],)) for each in (name, beside)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(answers) == 2 and all(answer["usage"]["completion_tokens"] > 0 for answer in answers)
    server.idle()
    assert built == []


def test_no_hostile_request_has_a_program_built(server: Served, built: list[object]) -> None:
    for sent in INPUTS.values():
        connection = server.connect()
        try:
            connection.sendall(sent)
            connection.recv(65536)
        except OSError:
            pass
        finally:
            connection.close()
    server.idle()
    assert built == []


def test_an_answer_is_that_of_its_own_class(server: Served) -> None:
    with LLM(model="demo", variant="eagle3", runtime="eager", max_rows=2, buckets=[1, 2]) as llm, serving(llm) as other:
        for name in ("a filter", "those of the prompt", "a grammar"):
            asked = {"prompt": "def f(x):", "max_tokens": 8, "seed": 1, **ASKED[name]}
            assert server.complete(**asked)["choices"] == other.complete(**asked)["choices"]


def test_classes_are_an_option() -> None:
    """What they leave out is refused with the field's name, streams included; nothing is built for it."""
    config = load_config(*WORDS[:3], "runtime.max_rows=1", "runtime.buckets=[1]", "runtime.sampling_classes=[noise]")
    api = load_api(config, Keys())
    with api.llm.llm as llm, serving(api) as server:
        assert {key.sampling for key in llm.cycle.programs} == {GREEDY, replace(GREEDY, noise=True)}
        server.complete(prompt="x", max_tokens=2, temperature=0.7)
        for fields, name in (({"logprobs": 1}, "logprobs"), ({"structured_outputs": {"regex": "a"}}, "structured")):
            for stream in (False, True):
                response = server.post(COMPLETIONS, {"prompt": "x", "stream": stream, **fields})
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, name)
                assert "expected the default, since no class of runtime.sampling_classes has" in error["message"]
        assert server.api.trials._process is None
        server.idle()


def test_until_the_model_is_loaded() -> None:
    """The process lives and is not ready; a request that comes at the end is served by the server that follows."""
    options = ServerConfig(port=0)
    with bind(options) as sock:
        url = "http://{}:{}".format(*sock.getsockname()[:2])
        with answering(sock, options), httpx2.Client(base_url=url, timeout=PATIENCE) as client:
            assert client.get("/live").status_code == 200
            for path in ("/health", "/v1/models", COMPLETIONS):
                response = client.get(path)
                assert (response.status_code, response.json()["error"]["code"]) == (503, "loading") and response.headers["retry-after"]
        late = socket.create_connection(sock.getsockname()[:2], timeout=PATIENCE)
        late.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        server = HttpServer(app, options)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
        thread.start()
        assert late.recv(65536).startswith(b"HTTP/1.1 204 ")
        late.close()
        server.drain()
        thread.join(PATIENCE)


SLOW = """
import sys, threading
from graphspec.graphs.cycle import Cycle
from graphspec.cli.main import main
Cycle._build = lambda self, key: threading.Event().wait()
sys.exit(main(sys.argv[1:]))
"""


def test_the_end_does_not_wait_for_programs_that_are_built() -> None:
    """SIGTERM while the engine's thread builds one that takes for ever."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SLOW, "serve", *WORDS, f"server.port={port}", "server.drain_seconds=600"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        assert process.stderr is not None
        # The target, then the draft; what follows is building.
        for _ in range(2):
            assert process.stderr.readline().startswith(b"load ")
        health = httpx2.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE)
        assert health.status_code == 503 and health.json()["error"]["code"] == "loading"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM

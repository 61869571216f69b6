"""Clients that disconnect, stall or never send, requests that run out of time, and the shutdown of a server."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from graphspec.config.server_options import ServerConfig
from graphspec.errors import ConfigError
from graphspec.graphs.cycle import Cycle
from graphspec.serve.http import bind
from tests.support.engines import CHAIN
from tests.support.serving import PATIENCE, Served, held_after_the_first_token, raw_post, serving, wait_for

if TYPE_CHECKING:
    from graphspec.api.llm import LLM
    from tests.support.engines import Pair

PATH = "/v1/completions"
ENDLESS = {"prompt": "w7", "max_tokens": 80, "ignore_eos": True, "temperature": 0}


def closed_by_server(connection: socket.socket) -> bytes:
    """What came until the server closed the connection."""
    found = b""
    try:
        while piece := connection.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("waiting", [True, False])
def test_a_client_that_leaves_aborts_its_request(pair: Pair, stream: bool, waiting: bool) -> None:
    """While it decodes, and while it waits for a row; other requests continue."""
    with pair.llm(**CHAIN, max_rows=1, buckets=[1]) as llm, serving(llm) as server:
        wanted = server.complete(**ENDLESS)["choices"][0]["text"]
        with held_after_the_first_token(llm) as go:
            body = json.dumps({**ENDLESS, "stream": stream}).encode()
            first, second = server.connect(), server.connect()
            first.sendall(raw_post(body))
            wait_for(lambda: llm.load().running == 1)
            second.sendall(raw_post(body))
            wait_for(lambda: llm.load().waiting == 1)
            leaving, staying = (second, first) if waiting else (first, second)
            leaving.close()
            wait_for(lambda: server.api.slots.taken == 1)
            go.set()
        answer = b""
        while b"[DONE]" not in answer and b'"usage"' not in answer:
            piece = staying.recv(65536)
            assert piece
            answer += piece
        staying.close()
        server.idle()
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 1
        assert server.complete(**ENDLESS)["choices"][0]["text"] == wanted


def test_headers_have_to_come_in_time(llm: LLM) -> None:
    with serving(llm, read_seconds=1.0) as server:
        silent, slow = server.connect(), server.connect()
        slow.sendall(b"POST /v1/completions HT")
        assert closed_by_server(silent) == closed_by_server(slow) == b""
        assert server.complete(prompt="w7", max_tokens=1)


def test_a_body_has_to_come_in_time(llm: LLM) -> None:
    with serving(llm, read_seconds=1.0) as server:
        connection = server.connect()
        connection.sendall(raw_post(b"{", length=100))
        assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")
        connection.close()
        server.idle()


def test_a_connection_is_kept_for_the_next_request(llm: LLM) -> None:
    """It outlives the time limit for headers, which restarts with each request."""
    with serving(llm, read_seconds=0.5, keep_alive_seconds=30.0) as server:
        connection = server.connect()
        for _ in range(2):
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(65536)
            assert b"200 OK" in answer
            threading.Event().wait(1.0)
        connection.close()


def test_clients_give_up_idle_connections_first() -> None:
    """One that the server closes may be that of the next request."""
    expiry = httpx2.Limits().keepalive_expiry
    assert expiry is not None and ServerConfig().keep_alive_seconds >= 2 * expiry


def test_a_client_that_does_not_read_is_disconnected(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request is aborted, and its row serves others."""
    from graphspec.serve import app

    # One event fills every buffer on the way; the tiny model's own would take minutes.
    monkeypatch.setattr(app, "sse", lambda _: b"data: " + b"x" * 2**20 + b"\n\n")
    with pair.llm(**CHAIN, max_rows=1, buckets=[1]) as llm, serving(llm, write_seconds=0.3) as server:
        connection = server.connect()
        connection.sendall(raw_post(json.dumps({**ENDLESS, "stream": True}).encode()))
        wait_for(lambda: server.api.slots.taken == 1)
        server.idle()
        connection.close()
        assert server.complete(prompt="w7", max_tokens=1)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_time_is_over_ends_with_what_it_has(llm: LLM, stream: bool) -> None:
    with serving(llm, request_seconds=0.2) as server, held_after_the_first_token(llm) as go:
        threading.Timer(0.5, go.set).start()
        choice = server.chunks(PATH, **ENDLESS)[-1]["choices"][0] if stream else server.complete(**ENDLESS)["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")


def test_the_end_waits_for_what_was_accepted(pair: Pair) -> None:
    """Streams, whole answers and those that wait for a row are finished; nothing new gets in."""
    with pair.llm(**CHAIN, max_rows=1, buckets=[1]) as llm:
        server = Served(llm)
        wanted = server.complete(**ENDLESS)["choices"][0]["text"]
        found: dict[bool, Any] = {}
        with held_after_the_first_token(llm) as go:

            def send(stream: bool) -> None:
                with httpx2.Client(base_url=server.url, timeout=PATIENCE) as client:
                    found[stream] = client.post(PATH, json={**ENDLESS, "stream": stream}).text

            threads = [threading.Thread(target=send, args=(stream,)) for stream in (True, False)]
            for thread in threads:
                thread.start()
            wait_for(lambda: (load := llm.load()).running == load.waiting == 1)
            server.server.drain()
            wait_for(lambda: not server.server.servers[0].is_serving())
            with pytest.raises(httpx2.ConnectError):
                httpx2.get(server.url + "/health")
            go.set()
            for thread in threads:
                thread.join(PATIENCE)
        server.stop()
        assert json.loads(found[False])["choices"][0]["text"] == wanted
        events = [json.loads(line[6:]) for line in found[True].split("\n\n") if line and not line.endswith("[DONE]")]
        assert "".join(event["choices"][0]["text"] for event in events) == wanted and found[True].endswith("[DONE]\n\n")


def test_the_end_does_not_wait_for_ever(pair: Pair) -> None:
    """What is left when its time is over is aborted."""
    with pair.llm(**CHAIN, max_rows=1, buckets=[1]) as llm:
        server = Served(llm, drain_seconds=1.0)
        with held_after_the_first_token(llm):
            connection = server.connect()
            connection.sendall(raw_post(json.dumps({**ENDLESS, "stream": True}).encode()))
            wait_for(lambda: llm.load().running == 1)
            server.stop()
            assert b"[DONE]" not in closed_by_server(connection)
        server.idle()


HANGS = """
import sys, threading
from graphspec.api import grammar
from graphspec.engine.engine import Engine
from graphspec.text.tokenizer import Tokenizer
from graphspec.cli.main import main

def hang(*_, **__):
    print("hangs", flush=True)
    threading.Event().wait()

owner, name = {"grammar": (grammar, "compile_grammar"), "text": (Tokenizer, "encode"), "step": (Engine, "_step")}[sys.argv.pop(1)]
setattr(owner, name, hang)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("kind", "code"), [("grammar", 0), ("text", 0), ("step", 1)])
def test_the_end_does_not_wait_for_what_hangs(kind: str, code: int) -> None:
    """Work that can't be ended: compiling in this process, encoding, and a step of the engine, after which stderr says where it was."""
    classes = "runtime.sampling_classes=[grammar]" if kind == "grammar" else "runtime.sampling_classes=[greedy]"
    # Nothing waits for as long as that but the step.
    drain = f"server.drain_seconds={2 if code else 50}"
    words = ["model=demo", "variant=none", "runtime=eager", "runtime.max_rows=1", "runtime.buckets=[1]", "server.port=0", classes, drain]
    command = [sys.executable, "-c", HANGS, kind, "serve", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        host, port = process.stdout.readline().split("//")[1].removesuffix("/v1\n").split(":")
        body = {"prompt": "x", "max_tokens": 2, "temperature": 0, **({"structured_outputs": {"regex": "a"}} if kind == "grammar" else {})}
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(raw_post(json.dumps(body).encode()))
            assert process.stdout.readline() == "hangs\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == code
        assert ("Timeout" in (said := process.stderr.read()) and "in hang" in said) == bool(code)


def test_health_is_that_of_the_engine(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is lost, one that comes back, and an engine that was closed."""

    def lost(*_: Any) -> None:
        raise RuntimeError("lost")

    with pair.llm(**CHAIN, max_rows=1, buckets=[1]) as llm, serving(llm) as server:
        found = [server.client.get("/health").status_code]
        with monkeypatch.context() as patch:
            patch.setattr(Cycle, "reset", lost)
            patch.setattr(Cycle, "read", lost)
            assert server.post(PATH, ENDLESS).status_code == 500
            refused = server.client.get("/health")
            found.append(refused.status_code)
        assert refused.json()["error"]["code"] == "engine_down"
        server.complete(**ENDLESS)
        found.append(server.client.get("/health").status_code)
        llm.close()
        found.append(server.client.get("/health").status_code)
    assert found == [200, 503, 200, 503]


def test_health_is_asked_of_the_engines_thread(pair: Pair) -> None:
    """A thread that hangs in a step does not answer; the process lives, and says so."""
    with pair.llm(**CHAIN, max_rows=1, buckets=[1]) as llm, serving(llm) as server:
        go, hangs, step = threading.Event(), threading.Event(), llm._engine._step

        def hang() -> None:
            hangs.set()
            go.wait(PATIENCE)
            step()

        llm._engine._step = hang  # type: ignore[method-assign]
        stream = server.client.send(server.client.build_request("POST", PATH, json={**ENDLESS, "stream": True}), stream=True)
        assert hangs.wait(PATIENCE) and llm.load().answers
        assert [server.client.get(path).status_code for path in ("/health", "/live", "/health")] == [503, 200, 503]
        llm._engine._step = step  # type: ignore[method-assign]
        go.set()
        assert b"[DONE]" in stream.read()
        assert server.client.get("/health").status_code == 200


def test_a_taken_port_is_an_error(server: Served) -> None:
    with pytest.raises(ConfigError, match=r"server\.port: expected a free port at 127\.0\.0\.1"):
        bind(ServerConfig(port=server.address[1]))
    with pytest.raises(ConfigError, match=r"server\.host: expected an address of this machine, found no\.such\.host\.invalid"):
        bind(ServerConfig(host="no.such.host.invalid"))


def test_the_command_serves_and_ends_at_a_signal(pair: Pair) -> None:
    """In a separate process: the address on stdout, one answer, SIGTERM in the middle of a stream, exit code 0."""
    words = [
        f"model.path={pair.target}",
        "variant=none",
        "runtime=eager",
        "server.port=0",
        "server.model_name=mine",
        "server.access_log=json",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "graphspec", "serve", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("graphspec serve: mine at http://127.0.0.1:"), process.stderr.read()
        url = line.split()[-1]
        body = {**ENDLESS, "model": "mine"}
        whole = httpx2.post(f"{url}/completions", json=body, timeout=PATIENCE).json()["choices"][0]["text"]
        with httpx2.stream("POST", f"{url}/completions", json={**body, "stream": True}, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            events = [next(lines)]
            process.send_signal(signal.SIGTERM)
            events += [line for line in lines if line]
        assert process.wait(PATIENCE) == 0
        progress, _, lines_of_access = process.stderr.read().partition("{")
        # A slow machine says more than once how far it is.
        assert re.fullmatch(r"([\w ]+ \d+/\d+\n)*([\w ]+ (\d+)/\3\n)+", progress)
    logged = [json.loads(line) for line in ("{" + lines_of_access).splitlines()]
    assert [(line["path"], line["status"], line["completion_tokens"]) for line in logged] == [("/v1/completions", 200, 80)] * 2
    assert events[-1] == "data: [DONE]"
    assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-1]) == whole

"""A server over a tiny engine, in a thread of the test: real sockets, a real event loop."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx2

from graphspec.api.async_llm import AsyncLLM
from graphspec.config.server_options import ServerConfig
from graphspec.serve.access import hosts_of
from graphspec.serve.app import Api
from graphspec.serve.http import HttpServer, bind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphspec.api.llm import LLM
    from graphspec.serve.limits import Keys

MODEL = "tiny"
PATIENCE = 60.0
"""Seconds until a test stops waiting and fails; no result depends on it."""
BOS = 5
TEMPLATE = (
    "{{ bos_token }} {% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('no such role') }}{% endif %}"
    "{% if message.role == 'user' %}w1{% elif message.role == 'system' %}w2{% else %}w3{% endif %} {{ message.content }} "
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.word }} {% endfor %}w4 {% endfor %}"
    "{% if flag %}w6 {% endif %}{% if add_generation_prompt %}w3{% endif %}"
)


class Served:
    """A running server, and a client of it. Routes that exist already may take the place of an engine."""

    def __init__(self, llm: LLM | Api, keys: Keys | None = None, **options: Any) -> None:
        self.options = ServerConfig(**{"port": 0, "keep_alive_seconds": 1.0, **options})
        self.api = llm if isinstance(llm, Api) else Api(AsyncLLM(llm), self.options, MODEL, keys)
        self.llm = self.api.llm.llm
        self.socket = bind(self.options)
        self.address = self.socket.getsockname()[:2]
        self.url = f"http://{self.address[0]}:{self.address[1]}"
        self.server = HttpServer(self.api.app(hosts_of(self.options)), self.options)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve(sockets=[self.socket])), daemon=True)
        self.thread.start()
        wait_for(lambda: self.server.started)
        # A connection that the server is about to close must not be used again: a request on its way then would be reset.
        limits = httpx2.Limits(keepalive_expiry=self.options.keep_alive_seconds / 2)
        self.client = httpx2.Client(base_url=self.url, timeout=PATIENCE, limits=limits)

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx2.Response:
        return self.client.post(path, json=body, headers=headers)

    def complete(self, **body: Any) -> dict[str, Any]:
        """A completion that is served."""
        return served(self.post("/v1/completions", body))

    def chat(self, **body: Any) -> dict[str, Any]:
        """A chat that is served."""
        return served(self.post("/v1/chat/completions", body))

    def chunks(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Events of a stream, whose end is checked."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in response.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def metric(self, name: str, **labels: str) -> float:
        """A sample of ``/metrics``; 0 if it is absent."""
        value = self.api.metrics.registry.get_sample_value(name, {"model_name": MODEL, **labels})
        return value or 0.0

    def connect(self) -> socket.socket:
        """A connection without a request."""
        return socket.create_connection(self.address, timeout=PATIENCE)

    def idle(self) -> None:
        """Wait until nothing runs, and check that all slots and pages are free."""
        wait_for(lambda: (load := self.llm.load()).running == load.waiting == load.pages_used == 0)
        wait_for(lambda: self.api.slots.taken == 0)

    def stop(self) -> None:
        self.server.drain()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        self.client.close()
        self.api.close()


class Honest:
    """A client that streams one completion after the other."""

    def __init__(self, server: Served) -> None:
        self.events, self.failed, self._server, self._stop = 0, "", server, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        body = {"prompt": "def f(x):", "max_tokens": 300, "temperature": 0.7, "ignore_eos": True, "stream": True}
        while not self._stop.is_set() and not self.failed:
            with self._server.client.stream("POST", "/v1/completions", json=body) as response:
                lines = [""]
                for line in response.iter_lines():
                    lines = [line] if line else lines
                    self.events += line.startswith("data: {")
                    if self._stop.is_set():
                        return
            self.failed = "" if lines == ["data: [DONE]"] else f"{response.status_code}: {lines}"

    def goes_on(self) -> None:
        """Wait for its next event."""
        before = self.events
        wait_for(lambda: self.events > before or self.failed)
        assert not self.failed

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)


def served(response: httpx2.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    return document


def raw_post(body: bytes, length: int | None = None, framing: str | None = None) -> bytes:
    """A completion as bytes on a connection; ``length``: the one that its header announces; ``framing``: another header instead."""
    framing = f"Content-Length: {len(body) if length is None else length}" if framing is None else framing
    headers = f"Host: localhost\r\nContent-Type: application/json\r\n{framing}"
    return f"POST /v1/completions HTTP/1.1\r\n{headers}\r\n\r\n".encode() + body


def wait_for(done: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, "gave up waiting"
        time.sleep(0.005)


@contextmanager
def serving(llm: LLM | Api, keys: Keys | None = None, **options: Any) -> Iterator[Served]:
    found = Served(llm, keys, **options)
    try:
        yield found
    finally:
        found.stop()


@contextmanager
def held_after_the_first_token(llm: LLM) -> Iterator[threading.Event]:
    """Stop the engine's steps after the first token of some request until the event is set, at the latest at the end of the context."""
    engine, go = llm._engine, threading.Event()
    step = engine._step

    def held() -> None:
        if go.is_set() or not any(request.output for request in engine.scheduler.running):
            step()
        else:
            time.sleep(0.002)

    engine._step = held  # type: ignore[method-assign]
    try:
        yield go
    finally:
        go.set()
        engine._step = step  # type: ignore[method-assign]

"""Hostile inputs against the demo model: each gets its status and the field's name, little work is done for it, and others are served."""

from __future__ import annotations

import asyncio
import random
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest

from graphspec.api.llm import LLM
from graphspec.serve import app
from tests.support.hostile import FIELDS, RAW, SHORT
from tests.support.serving import PATIENCE, Honest, Served, raw_post, serving

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

MAX_ENCODED = 100_000
"""Characters that may be encoded for all of the catalogue together; one of its texts has 36 times as many."""


ATTACKS = 6
"""Hostile inputs of the soak that are waited for; each of them has a test of its own above."""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with LLM(model="demo", variant="eagle3", runtime="eager") as llm, serving(llm) as found:
        yield found


@pytest.fixture(scope="module")
def honest(server: Served) -> Iterator[Honest]:
    found = Honest(server)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def encoded(server: Served) -> Iterator[list[int]]:
    """Lengths of the texts that are encoded."""
    lengths: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        # A machine under load may take longer than a second for a step.
        patch.setattr(app, "HEALTH_SECONDS", PATIENCE)
        for name in ("encode", "words"):
            patch.setattr(server.llm.tokenizer, name, noting(getattr(server.llm.tokenizer, name), lengths))
        yield lengths


def noting(encode: Callable[..., list[int]], lengths: list[int]) -> Callable[..., list[int]]:
    def noted(text: str, *more: Any, **named: Any) -> list[int]:
        lengths.append(len(text))
        return encode(text, *more, **named)

    return noted


@pytest.mark.parametrize("name", FIELDS)
def test_fields(server: Served, honest: Honest, encoded: list[int], name: str) -> None:
    path, body, param = FIELDS[name]
    response = server.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and len(response.content) < 1000
    assert param is not None or error["code"] == "too_many_values"
    assert server.client.get("/health").status_code == 200
    honest.goes_on()
    assert sum(encoded) < MAX_ENCODED


@pytest.mark.parametrize("name", RAW)
def test_bytes(server: Served, honest: Honest, encoded: list[int], name: str) -> None:
    sent, status = RAW[name]
    connection = server.connect()
    connection.sendall(sent)
    assert connection.recv(65536).startswith(b"HTTP/1.1 %d " % status)
    connection.close()
    assert server.client.get("/health").status_code == 200
    honest.goes_on()


def test_a_second_request_is_not_smuggled(server: Served) -> None:
    connection = server.connect()
    inner = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    connection.sendall(raw_post(b"0\r\n\r\n" + inner, framing="Content-Length: 5\r\nTransfer-Encoding: chunked"))
    assert everything(connection).count(b"HTTP/1.1 ") == 1


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    found = b""
    while piece := connection.recv(65536):
        found += piece
    connection.close()
    return found


def test_many_at_once(server: Served, honest: Honest) -> None:
    """Short requests are served while large bodies come from several clients at the same time."""
    statuses: list[int] = []

    def attack(name: str) -> None:
        path, body, _ = FIELDS[name]
        statuses.append(server.post(path, body).status_code)

    names = ["a completion of 4 MB", "80,000 messages", "300,000 stop texts", "deep metadata of 4 MB"]
    threads = [threading.Thread(target=attack, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for _ in range(3):
        assert server.complete(prompt="def f(x):", **SHORT)["usage"]["completion_tokens"] == 4
        honest.goes_on()
    for thread in threads:
        thread.join(PATIENCE)
    assert statuses == [400] * len(names)


def test_clients_of_the_soak(server: Served, honest: Honest) -> None:
    """Honest and hostile ones, as ``perf/serve_soak.py`` sends them in the random order of its seed."""
    from perf.serve_soak import Target, Waits, attack, complete, probe, stream

    target, kinds = Target(*server.address), {"stream": stream, "health": probe, "completion": complete}
    waits, go, stop, log = {name: Waits() for name in kinds}, threading.Event(), threading.Event(), SimpleQueue()
    hostile = threading.Thread(target=attack, args=(*server.address, 1, go, stop, log))
    hostile.start()
    go.set()

    async def run() -> None:
        leave = asyncio.Event()
        tasks = [asyncio.ensure_future(client(target, waits[name], leave, random.Random(1))) for name, client in kinds.items()]
        while not all(each.waits for each in waits.values()) or log.qsize() < ATTACKS:
            await asyncio.sleep(0.05)
        leave.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    stop.set()
    hostile.join()
    assert log.get() is None and all(began <= ended and status != "500" for began, ended, _, status in (log.get() for _ in range(ATTACKS)))
    assert not any(each.broken for each in waits.values()) and waits["health"].statuses["200"]
    assert all(each.figures([(0, float("inf"))])["max"] > 0 for each in waits.values())
    honest.goes_on()


def test_nothing_is_left(server: Served, honest: Honest) -> None:
    honest.stop()
    assert not honest.failed and honest.events > 0
    server.idle()
    assert server.metric("graphspec:requests_refused_total", status="400") >= len(FIELDS)
    assert not any(server.metric("graphspec:requests_preparing", stage=stage) for stage in ("reading", "encoding", "compiling"))

"""Hostile inputs against the demo model: each gets its status and the field's name, little work is done for it, and others are served."""

from __future__ import annotations

import gzip
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from graphspec.api.llm import LLM
from graphspec.serve import app
from tests.support.serving import PATIENCE, Served, raw_post, serving, wait_for

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
SHORT = {"max_tokens": 4, "temperature": 0}
BODY = json.dumps({"prompt": "def f(x):", **SHORT}).encode()
WORDS = "def foo(x): return x + 1 # comment \u00e9\U0001f600 \n"
TEXT = (WORDS * 90_000)[:3_600_000]
MAX_ENCODED = 100_000
"""Characters that may be encoded for all of the catalogue together; one of its texts has 36 times as many."""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with LLM(model="demo", variant="eagle3", runtime="eager") as llm, serving(llm) as found:
        yield found


class Honest:
    """A client that streams one completion after the other."""

    def __init__(self, server: Served) -> None:
        self.events, self.failed, self._server, self._stop = 0, "", server, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        body = {"prompt": "def f(x):", "max_tokens": 300, "temperature": 0.7, "ignore_eos": True, "stream": True}
        while not self._stop.is_set() and not self.failed:
            with self._server.client.stream("POST", COMPLETIONS, json=body) as response:
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


def numbers(count: int) -> list[str]:
    return [f"zq{number}" for number in range(count)]


CIRCLE = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}


def constrained(**structured: Any) -> dict[str, Any]:
    return {"prompt": "x", "structured_outputs": structured}


FIELDS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "a completion of 4 MB": (COMPLETIONS, {"prompt": TEXT}, "prompt"),
    "two of 2 MB": (COMPLETIONS, {"prompt": [TEXT[:1_800_000]] * 2}, "prompt"),
    "one word of 4 MB": (COMPLETIONS, {"prompt": "a" * 3_900_000}, "prompt"),
    "4 MB to encode": (TOKENIZE, {"prompt": TEXT}, "prompt"),
    "4 MB to encode and spell": (TOKENIZE, {"prompt": "a b " * 970_000, "return_token_strs": True}, "prompt"),
    "80,000 messages": (CHAT, {"messages": [{"role": "user", "content": "x"}] * 80_000}, "messages"),
    "500,000 ids to decode": (DETOKENIZE, {"tokens": [300] * 500_000}, "tokens"),
    "800,000 ids to decode": (DETOKENIZE, {"tokens": [300] * 800_000}, None),
    "300,000 stop texts": (COMPLETIONS, {"prompt": "x", "stop": numbers(300_000)}, "stop"),
    "a stop text of 3 MB": (COMPLETIONS, {"prompt": "x", "stop": "\n" + " " * 3_000_000}, "stop"),
    "a bad word of 3 MB": (COMPLETIONS, {"prompt": "x", "bad_words": ["ab" * 1_500_000]}, "bad_words"),
    "300,000 bad words": (COMPLETIONS, {"prompt": "x", "bad_words": numbers(300_000)}, "bad_words"),
    "500,000 ids": (COMPLETIONS, {"prompt": [1] * 500_000}, "prompt"),
    "1,300,000 ids": (COMPLETIONS, {"prompt": [1] * 1_300_000}, None),
    "100,000 prompts": (COMPLETIONS, {"prompt": [[1]] * 100_000}, "prompt"),
    "deep metadata of 4 MB": (COMPLETIONS, {"prompt": "x", "metadata": [[[]] * 3] * 300_000}, None),
    "wide metadata": (COMPLETIONS, {"prompt": "x", "metadata": dict.fromkeys(numbers(100000), "v")}, "metadata"),
    "500,000 allowed ids": (COMPLETIONS, {"prompt": "x", "allowed_token_ids": [5] * 500_000}, "allowed_token_ids"),
    "100,000 biases": (COMPLETIONS, {"prompt": "x", "logit_bias": {str(key): 1 for key in range(100_000)}}, "logit_bias"),
    "a bias of 5,000 digits": (COMPLETIONS, {"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    "a reference to itself": (COMPLETIONS, constrained(json={"$ref": "#"}), "structured.json_schema.$ref"),
    "references in a circle": (COMPLETIONS, constrained(json={"$ref": "#/$defs/a", "$defs": CIRCLE}), "structured.json_schema.$ref"),
    "an enum of nothing": (COMPLETIONS, constrained(json={"enum": []}), "structured.json_schema"),
    "rules in a circle": (COMPLETIONS, constrained(grammar="root ::= a\na ::= b\nb ::= a\n"), "structured.grammar"),
    "a rule that is itself": (COMPLETIONS, constrained(grammar="root ::= root\n"), "structured.grammar"),
    "an unknown rule": (COMPLETIONS, constrained(grammar="root ::= nothing\n"), "structured.grammar"),
    "no root": (COMPLETIONS, constrained(grammar='a ::= "x"\n'), "structured.grammar"),
    "an empty alternative": (COMPLETIONS, constrained(grammar='root ::= "a" |\n'), "structured.grammar"),
    "an empty grammar": (COMPLETIONS, constrained(grammar=""), "structured_outputs.grammar"),
    "a grammar of no known kind": (COMPLETIONS, constrained(gramar="x"), "structured_outputs"),
    "no choice": (COMPLETIONS, constrained(choice=[]), "structured_outputs.choice"),
    "half an expression": (COMPLETIONS, constrained(regex="("), "structured.regex"),
    "100,000 tools": (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": [0] * 100_000}, "tools"),
    "a priority": (COMPLETIONS, {"prompt": "x", "priority": -(2**31)}, "priority"),
    "a salt of 1 MB": (COMPLETIONS, {"prompt": "x", "cache_salt": "a" * 2**20}, "cache_salt"),
    "100,000 samples": (COMPLETIONS, {"prompt": "x", "n": 60_000}, "n"),
}


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


RAW: dict[str, tuple[bytes, int]] = {
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 421),
    "another host": (b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
    "no host": (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
    "no HTTP": (b"\x00\x01\x02\x16\x03\x01\r\n\r\n", 400),
    "a parent folder": (b"GET /%2e%2e/%2e%2e/etc/passwd%00 HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    "a long path": (b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    "a slash": (b"GET /v1/models/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    "a web socket": (b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 405),
    "two lengths": (raw_post(BODY, framing="Content-Length: 3\r\nContent-Length: 5"), 400),
    "a length and chunks": (raw_post(b"0\r\n\r\n", framing="Content-Length: 5\r\nTransfer-Encoding: chunked"), 400),
    "a negative length": (raw_post(b"", framing="Content-Length: -5"), 400),
    "100 MB announced": (raw_post(b"{", length=10**8), 413),
    "a bad chunk": (raw_post(b"zz\r\n", framing="Transfer-Encoding: chunked"), 400),
    "compressed": (raw_post(gzip.compress(BODY), framing=f"Content-Encoding: gzip\r\nContent-Length: {len(gzip.compress(BODY))}"), 415),
    "a form": (raw_post(BODY).replace(b"application/json", b"application/x-www-form-urlencoded"), 415),
    "plain text": (raw_post(BODY).replace(b"application/json", b"text/plain"), 415),
    "UTF-16": (raw_post(BODY.decode().encode("utf-16")), 400),
    "a byte order mark": (raw_post(b"\xef\xbb\xbf" + BODY), 400),
    "not finite": (raw_post(b'{"prompt":"a","temperature":Infinity}'), 400),
    "too large a number": (raw_post(b'{"prompt":"a","temperature":1e400}'), 400),
    "a seed of 4,000 digits": (raw_post(b'{"prompt":"a","seed":' + b"9" * 4000 + b"}"), 400),
    "a seed of 100,000 digits": (raw_post(b'{"prompt":"a","seed":' + b"9" * 100_000 + b"}"), 400),
    "100,000 levels": (raw_post(b'{"metadata":' + b"[" * 100_000 + b"]" * 100_000 + b',"prompt":"a"}'), 400),
}


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


def test_nothing_is_left(server: Served, honest: Honest) -> None:
    honest.stop()
    assert not honest.failed and honest.events > 0
    server.idle()
    assert server.metric("graphspec:requests_refused_total", status="400") >= len(FIELDS)
    assert not any(server.metric("graphspec:requests_preparing", stage=stage) for stage in ("reading", "encoding", "compiling"))

"""Request ids and the access log: figures of every request, and nothing that it says."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from graphspec.config.server_options import ServerConfig
from graphspec.errors import ConfigError
from graphspec.serve.access import line
from tests.support.serving import held_after_the_first_token, raw_post, serving, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphspec.api.llm import LLM
    from tests.support.serving import Served

COMPLETIONS = "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture
def server(llm: LLM) -> Iterator[Served]:
    with serving(llm, access_log="json") as found:
        yield found


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "graphspec.access")

    def read(count: int) -> list[dict[str, Any]]:
        wait_for(lambda: len(caplog.records) >= count)
        assert all(record.name == "graphspec.access" for record in caplog.records)
        return [json.loads(record.getMessage()) for record in caplog.records]

    return read


def test_a_line_of_every_request(server: Served, llm: LLM, lines: Any) -> None:
    answer = server.complete(prompt="w7 w8", **GREEDY)
    # A line may come after its response.
    lines(1)
    server.chunks(COMPLETIONS, prompt=["w7 w8", "w9"], **GREEDY)
    lines(2)
    server.post(COMPLETIONS, {"prompt": "w7", "temperature": -1})
    lines(3)
    server.client.get("/v1/models?key=secret")
    whole, stream, refused, models = lines(4)
    assert {"time", "id", "peer", "seconds"} <= whole.keys() and whole["peer"].startswith("127.0.0.1:")
    assert (whole["method"], whole["path"], whole["status"]) == ("POST", COMPLETIONS, 200)
    usage = answer["usage"]
    assert (whole["prompt_tokens"], whole["completion_tokens"]) == (usage["prompt_tokens"], 12)
    assert whole["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < whole["first_token_seconds"] <= whole["seconds"]
    assert whole["acceptance_length"] > 1
    assert (stream["status"], stream["completion_tokens"]) == (200, 24)
    assert refused["status"] == 400 and "prompt_tokens" not in refused
    assert (models["method"], models["path"], models["status"]) == ("GET", "/v1/models", 200)


def test_nothing_that_was_said_is_logged(server: Served, caplog: pytest.LogCaptureFixture, lines: Any) -> None:
    answer = server.complete(prompt="w7 w8 w31", **GREEDY)
    server.post(COMPLETIONS, {"prompt": "w7 unutterable", "stop": ["w31"], "top_k": "w31"})
    lines(2)
    assert not [word for word in ("w31", "unutterable", answer["choices"][0]["text"].split()[0]) if word in caplog.text]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves(server: Served, llm: LLM, lines: Any, stream: bool) -> None:
    with held_after_the_first_token(llm):
        connection = server.connect()
        connection.sendall(raw_post(json.dumps({"prompt": "w7", "stream": stream, **GREEDY}).encode()))
        wait_for(lambda: llm.load().running == 1)
        connection.close()
        assert [entry["status"] for entry in lines(1)] == [499]
    server.idle()


def test_an_error_in_a_stream(server: Served, llm: LLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The response has begun with status 200; the line has that of the error."""

    def fail(*_: object) -> None:
        raise RuntimeError("lost")

    caplog.set_level(logging.INFO, "graphspec.access")
    with monkeypatch.context() as patch:
        patch.setattr(llm.cycle, "launch", fail)
        assert server.post(COMPLETIONS, {"prompt": "w7", "stream": True}).status_code == 200
    server.idle()
    wait_for(lambda: any(record.name == "graphspec.access" for record in caplog.records))
    [found] = [json.loads(record.getMessage()) for record in caplog.records if record.name == "graphspec.access"]
    assert found["status"] == 500


@pytest.mark.parametrize(
    ("given", "kept"),
    [("req-1.a:b_c", "req-1.a:b_c"), ("a b\tc\"<>{}'\\d", "abcd"), ("x" * 1000, "x" * 128), ("\u00e9", None), (None, None)],
)
def test_ids_are_taken_over_and_bounded(server: Served, lines: Any, given: str | None, kept: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given.encode()}
    response = server.client.get("/v1/models", headers=headers)
    found = response.headers["x-request-id"]
    assert found == kept if kept is not None else len(found) == 32
    assert [entry["id"] for entry in lines(1)] == [found]


def test_every_response_has_an_id(server: Served, lines: Any) -> None:
    for count, (path, host) in enumerate((("/nothing", "localhost"), ("/health", "localhost"), ("/v1/models", "evil.example")), 1):
        response = server.client.get(path, headers={"X-Request-Id": "mine", "Host": host})
        lines(count)
        assert response.headers["x-request-id"] == "mine"
    assert [(entry["path"], entry["status"]) for entry in lines(3)] == [("/nothing", 404), ("/health", 200), ("/v1/models", 421)]


def test_a_path_can_not_forge_lines(server: Served, lines: Any) -> None:
    server.client.get("/a%0Ab%22" + "c" * 5000)
    [entry] = lines(1)
    assert entry["path"].startswith("/a%0Ab%22ccc") and len(entry["path"]) == 200
    fields = {"peer": "p", "id": "i", "method": "GET", "path": '/a"b', "status": 200, "seconds": 0.5, "acceptance_length": 2.5}
    assert line(fields, "text").split(" ", 1)[1] == 'p i "GET /a\\"b" 200 seconds=0.5 acceptance_length=2.5'


def test_it_can_be_off(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "graphspec.access")
    with serving(llm, access_log="off") as server:
        assert server.client.get("/v1/models").headers["x-request-id"]
    assert not caplog.records
    with pytest.raises(ConfigError, match=r"server\.access_log: expected one of text, json, off"):
        ServerConfig(access_log="loud")

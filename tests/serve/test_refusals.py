"""Errors: one status each, the field's name, and no paths, tracebacks or prompts."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from graphspec.api.llm import LLM
from graphspec.errors import ConfigError
from graphspec.serve.limits import Keys
from tests.support.engines import CHAIN, SMALL, mirror_pair
from tests.support.serving import Served, held_after_the_first_token, serving, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.engines import Pair

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
SECRET = "w7 unutterable"
QUESTION = [{"role": "user", "content": SECRET}]
TOOL = {"type": "function", "function": {"name": "w20"}}
ENDLESS = {"prompt": "w7", "max_tokens": 80, "ignore_eos": True, "temperature": 0}


def refused(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert "unutterable" not in response.text and "Traceback" not in response.text and "/" not in response.text.replace("/v1/", "")
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"prompt": None}, "prompt", "a text"),
        ({"prompt": []}, "prompt", "a text"),
        ({"prompt": [SECRET, 3]}, "prompt", "a text"),
        ({"prompt": [[1.5]]}, "prompt", "a text"),
        ({"prompt": [7, 99]}, "prompt[1]", "a token id from 0 to 43"),
        ({"prompt": [7] * 200}, "prompt", "found 200 tokens"),
        ({"prompt": [[7], []]}, "prompt", "an empty prompt"),
        ({"temperature": -1}, "temperature", "found -1"),
        ({"temperature": "hot"}, "temperature", "a number"),
        ({"temperature": True}, "temperature", "a number"),
        ({"temperature": 10**400}, "temperature", "a number, found 1000"),
        ({"seed": 1.0}, "seed", "an integer, found 1.0 (float)"),
        ({"seed": "1"}, "seed", "an integer, found '1' (str)"),
        ({"stream": "true"}, "stream", "true or false, found 'true' (str)"),
        ({"stop": ["x", 1]}, "stop[1]", "text, found 1 (int)"),
        ({"stop_token_ids": 7}, "stop_token_ids", "a list, found 7 (int)"),
        ({"allowed_token_ids": [7, *["x"] * 60_000]}, "allowed_token_ids[1]", "an integer, found 'x' (str)"),
        ({"logit_bias": {"7": None}}, "logit_bias.7", "a number"),
        ({"logit_bias": [7]}, "logit_bias", "an object"),
        ({"structured_outputs": "x"}, "structured_outputs", "an object"),
        ({"stream": True, "stream_options": 1}, "stream_options", "an object"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
        ({"max_tokens": 0}, "max_tokens", "found 0"),
        ({"max_tokens": 10**6}, "max_tokens", "at most"),
        ({"n": 0}, "n", ">= 1"),
        ({"n": 1000}, "n", "at most"),
        ({"n": 2, "temperature": 0}, "n", "1 at temperature 0"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"44": 1}}, "logit_bias", "from 0 to 43"),
        ({"priority": -1}, "priority", "server.allow_priority=true, found -1"),
        ({"priority": 1}, "priority", "server.allow_priority=true"),
        ({"num_steps": 5}, "num_steps", "0 to variant.num_steps = 4"),
        ({"stream_options": {}}, "stream_options", "without stream"),
        ({"stream": True, "stream_options": {"what": 1}}, "stream_options.what", "unsupported"),
        ({"suffix": "x", "best_of": 3, "what": [1]}, "suffix", "unsupported: suffix, best_of, what"),
        ({"max_new_tokens": 3}, "max_new_tokens", "unsupported: max_new_tokens (max_new_tokens: here it is max_tokens, as in vLLM)"),
        (
            {"guided_json": {}, "num_beams": 2},
            "guided_json",
            "guided_json: here it is structured_outputs, as in vLLM; num_beams: beam search",
        ),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens", "found 0"),
        ({"model": "other"}, "model", "expected model 'tiny'"),
    ],
)
def test_fields_of_a_completion(server: Served, fields: dict[str, Any], param: str, part: str) -> None:
    error = refused(server.post(COMPLETIONS, {"prompt": SECRET, **fields}), 404 if param == "model" else 400)
    assert error["param"] == param and part in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"messages": []}, "messages", "at least one"),
        ({"messages": ["w7"]}, "messages[0]", "an object"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "type text"),
        ({"messages": [{"role": "user", "content": "w7", "audio": {"id": 1}}]}, "messages[0]", "audio"),
        ({"messages": [{"role": SECRET, "content": "w7"}]}, "messages", "chat template takes"),
        ({"top_logprobs": 2}, "top_logprobs", "without logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": "text"}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "a JSON schema"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs", "found xml"),
        ({"structured_outputs": {}}, "structured_outputs", "found an empty object"),
        ({"structured_outputs": {"json": None, "json_object": False}}, "structured_outputs", "found json: null, json_object: false"),
        ({"structured_outputs": {"json": False}}, "structured.json_schema", "found 'false': Schema 'false' cannot accept any value"),
        ({"structured_outputs": {"regex": False}}, "structured_outputs.regex", "found False (bool)"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "text"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format", "one form"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "among tools"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "none, auto, required"),
        ({"tool_choice": "auto"}, "tool_choice", "without tools"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "function"),
        ({"tools": {}}, "tools", "a list"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "chat_template"),
        ({"add_generation_prompt": False}, "add_generation_prompt", "continue_final_message"),
        ({"echo": True}, "echo", "false in chat"),
        ({"reasoning_effort": "high", "guided_json": {}}, "reasoning_effort", "reasoning_effort, guided_json"),
    ],
)
def test_fields_of_a_chat(server: Served, fields: dict[str, Any], param: str, part: str) -> None:
    error = refused(server.post(CHAT, {"messages": QUESTION, **fields}), 400)
    assert error["param"] == param and part in error["message"]


def test_fields_that_change_nothing_are_taken(server: Served) -> None:
    server.complete(prompt="w7", max_tokens=1, best_of=1, suffix="", user="me", metadata={"a": "b"}, store=False, logit_bias=None)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"\xff", b"[" * 30000])
def test_bodies_that_are_no_json_object(server: Served, body: bytes) -> None:
    assert refused(server.client.post(COMPLETIONS, content=body, headers=JSON), 400)["code"] == "invalid_json"


def test_paths_and_methods(server: Served) -> None:
    refused(server.client.get("/v1/nothing"), 404)
    refused(server.client.get("/v1/models/"), 404)
    response = server.client.get(COMPLETIONS)
    refused(response, 405)
    assert response.headers["allow"] == "OPTIONS, POST"


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_long(llm: LLM, declared: bool) -> None:
    body = json.dumps({"prompt": "w7 " * 1000}).encode()
    with serving(llm, max_body_bytes=1000) as server:
        content = body if declared else iter([body[:600], body[600:]])
        assert refused(server.client.post(COMPLETIONS, content=content, headers=JSON), 413)["code"] == "body_too_large"
        assert server.complete(prompt="w7", max_tokens=1)


def test_a_length_that_the_server_does_not_allow(llm: LLM) -> None:
    with serving(llm, max_tokens=5) as server:
        assert "at most 5" in refused(server.post(COMPLETIONS, {"prompt": "w7", "max_tokens": 6}), 400)["message"]
        assert server.complete(prompt="w7", ignore_eos=True)["usage"]["completion_tokens"] == 5
        assert server.chat(messages=[{"role": "user", "content": "w7"}], ignore_eos=True)["usage"]["completion_tokens"] == 5


def test_keys(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first\n\n second \nschl\u00fcssel\n", encoding="utf-8")
    with serving(llm, Keys.read(file)) as server:
        for given in ("", "Bearer", "Bearer firs", "Bearer first second", "first", "Basic first"):
            response = server.post(COMPLETIONS, {"prompt": "w7"}, **({"Authorization": given} if given else {}))
            assert refused(response, 401)["code"] == "invalid_api_key" and response.headers["www-authenticate"] == "Bearer"
        for given in ("Bearer first", "Bearer second", "bearer first", "BEARER  second", "Bearer schl\u00fcssel".encode()):
            assert server.client.get("/v1/models", headers={"Authorization": given}).status_code == 200
        assert server.client.get("/health").status_code == server.client.get("/metrics").status_code == 200
    file.write_text("\n")
    with pytest.raises(ConfigError, match=r"server\.api_key_file.*at least one key"):
        Keys.read(file)
    with pytest.raises(ConfigError, match="a file of keys"):
        Keys.read(tmp_path)


def test_a_full_queue_answers_at_once(pair: Pair) -> None:
    """The row and the place in the queue are taken; the next request is refused with Retry-After, and the others are served."""
    with pair.llm(**CHAIN, max_rows=1, buckets=[1]) as llm, serving(llm, max_waiting=1) as server:
        with held_after_the_first_token(llm), server.client.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as first:
            lines = first.iter_lines()
            assert next(lines).startswith("data:")
            other = server.client.build_request("POST", COMPLETIONS, json={**ENDLESS, "stream": True})
            second = server.client.send(other, stream=True)
            wait_for(lambda: server.api.slots.taken == 2)
            response = server.post(COMPLETIONS, ENDLESS)
            assert refused(response, 503)["code"] == "queue_full" and int(response.headers["retry-after"]) >= 1
            assert server.metric("graphspec:requests_refused_total", status="503") == 1
            second.close()
        server.idle()
        assert server.complete(**ENDLESS)["usage"]["completion_tokens"] == 80


def test_the_engines_own_limit_counts_where_it_is_set(pair: Pair) -> None:
    with pair.llm(**CHAIN, max_rows=2, max_queued=3) as llm, serving(llm, max_waiting=100) as server:
        assert server.api.slots.maximum == 5
        assert "at most 5 outputs" in refused(server.post(COMPLETIONS, {"prompt": "w7", "n": 6}), 400)["message"]


def test_priorities_by_option(pair: Pair) -> None:
    """One row: of the two that wait for it the later one is served first."""
    with pair.llm(**CHAIN, max_rows=1, buckets=[1]) as llm, serving(llm, allow_priority=True) as server:
        ended: list[int] = []

        def ask(place: int, priority: int) -> threading.Thread:
            def work() -> None:
                server.complete(**ENDLESS, priority=priority)
                ended.append(place)

            thread = threading.Thread(target=work)
            thread.start()
            return thread

        with held_after_the_first_token(llm):
            threads = [ask(0, 0)]
            wait_for(lambda: llm.load().running == 1)
            for place, priority in ((1, 0), (2, -1)):
                threads.append(ask(place, priority))
                wait_for(lambda place=place: llm.load().waiting == place)
            waiting = [request.priority for request in llm._engine.scheduler.waiting.requests]
        for thread in threads:
            thread.join()
        assert waiting == [-1, 0] and sorted(ended) == [0, 1, 2]


def test_unexpected_errors_reveal_nothing(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(f"/secret/path {SECRET}")

    with monkeypatch.context() as patch:
        patch.setattr(server.llm, "submit", fail)
        assert refused(server.post(COMPLETIONS, {"prompt": "w7"}), 500)["message"] == "internal error"
    with monkeypatch.context() as patch:
        patch.setattr(server.llm.cycle, "launch", fail)
        assert refused(server.post(COMPLETIONS, {"prompt": "w7"}), 500)["message"] == "internal error"
        [event] = server.chunks(COMPLETIONS, prompt="w7")
        assert event["error"]["message"] == "internal error"
    server.idle()
    assert server.complete(prompt="w7", max_tokens=2)


def test_a_base_model_takes_no_chats(tmp_path: Path) -> None:
    from tests.support.engines import add_tokenizer

    target = mirror_pair(tmp_path).target
    add_tokenizer(target)
    with LLM(target, variant="none", **SMALL) as llm, serving(llm) as server:
        assert "without" in refused(server.post(CHAT, {"messages": QUESTION}), 400)["message"]
        assert server.complete(prompt="w7", max_tokens=1)

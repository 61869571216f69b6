"""Sizes of fields are checked before anything is done with them, texts are encoded once, and routes for tokens wait their turn."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from graphspec.api.async_llm import THREADS
from graphspec.serve import app
from graphspec.serve.bodies import MAX_VALUES, NESTED_SHARE, parse_json
from graphspec.serve.errors import ApiError
from graphspec.serve.limits import BOUNDS
from tests.support.engines import CHAIN
from tests.support.serving import PATIENCE, raw_post, serving, wait_for

if TYPE_CHECKING:
    from graphspec.api.llm import LLM
    from tests.support.engines import Pair
    from tests.support.serving import Served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGE = {"role": "user", "content": "w7"}


def refused(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"stop": ["w9"] * 33}, "at most 32 entries, found 33"),
        ({"stop": "w9" * 513}, "at most 1024 characters in a text, found 1026"),
        ({"stop": ["w9", "w9" * 513]}, "at most 1024 characters in a text, found 1026"),
        ({"stop_token_ids": [7] * 65}, "at most 64 entries"),
        ({"bad_words": ["w9"] * 129}, "at most 128 entries"),
        ({"bad_words": ["w9" * 129]}, "at most 256 characters"),
        ({"logit_bias": {str(token): 1 for token in range(301)}}, "at most 300 entries, found 301"),
        ({"logit_bias": {"9" * 5000: 1}}, "at most 20 characters in a text, found 5000"),
        ({"allowed_token_ids": [7] * 65537}, "at most 65536 entries"),
        ({"metadata": {str(key): "a" for key in range(17)}}, "at most 16 entries"),
        ({"metadata": {"a": "b" * 513}}, "at most 512 characters"),
        ({"metadata": [[]] * 17}, "at most 16 entries"),
        ({"user": "a" * 513}, "at most 512 characters"),
        ({"model": "a" * 513}, "at most 512 characters"),
        ({"prompt": [7] * 100_000}, "tokens (max_context"),
        ({"prompt": [[7], [7] * 100_000]}, "found 100000 tokens"),
        ({"prompt": ["w7"] * 1000}, "prompts, found 1000"),
        ({"messages": [MESSAGE] * 2049}, "at most 2048 entries"),
        ({"messages": [MESSAGE], "tools": [{}] * 129}, "at most 128 entries"),
        ({"messages": [MESSAGE], "chat_template_kwargs": {str(key): 1 for key in range(65)}}, "at most 64 entries"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_fields_that_are_too_large(server: Served, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], found: str) -> None:
    """Nothing but the lengths is looked at."""
    monkeypatch.setattr(app, "parse", lambda *_: pytest.fail("parsed"))
    chat = "messages" in fields
    error = refused(server.post(CHAT if chat else COMPLETIONS, fields if chat else {"prompt": "w7", **fields}))
    assert error["param"] == [*fields][-1] and found in error["message"]
    assert server.api.slots.taken == 0


def test_fields_at_their_bounds(server: Served) -> None:
    stop = ["none" + str(place) + "x" * (1024 - 4 - len(str(place))) for place in range(32)]
    fields = {"stop": stop, "metadata": {str(key): "v" * 512 for key in range(16)}, "user": "u" * 512}
    assert server.complete(prompt="w7", max_tokens=2, ignore_eos=True, **fields)["usage"]["completion_tokens"] == 2


def test_an_option_of_the_engine_raises_a_bound(pair: Pair) -> None:
    with pair.llm(**CHAIN, max_rows=1, buckets=[1], max_stop_ids=100) as llm, serving(llm) as server:
        server.complete(prompt="w7", max_tokens=2, stop_token_ids=[7] * 100)
        assert "at most 100 entries" in refused(server.post(COMPLETIONS, {"prompt": "w7", "stop_token_ids": [7] * 101}))["message"]


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    for bound in BOUNDS:
        assert f"| `{bound.field}` | {bound.limit} | {bound.why} |\n" in page


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        ({"a": [0] * (MAX_VALUES - 3)}, True),
        ({"a": [0] * (MAX_VALUES + 1)}, False),
        ({"a": [""] * (MAX_VALUES + 1)}, False),
        ({"a": [[]] * (MAX_VALUES // NESTED_SHARE - 2)}, True),
        ({"a": [{}] * (MAX_VALUES // NESTED_SHARE + 1)}, False),
        ({"a": '[,:{"\\' * MAX_VALUES}, True),
        ({"a\\": ["\\\\", '\\"[,', "é\\u0041"] * 1000 + [" " * MAX_VALUES]}, True),
    ],
    ids=["numbers", "more numbers", "texts", "lists", "more objects", "marks in a text", "escapes"],
)
def test_values_of_a_body_are_counted(body: Any, fits: bool) -> None:
    data = json.dumps(body).encode()
    if fits:
        assert parse_json(data, MAX_VALUES) == body
        return
    with pytest.raises(ApiError, match="expected at most 524288 values in a body, and at most 32768 lists and objects") as error:
        parse_json(data, MAX_VALUES)
    assert (error.value.status, error.value.code) == (400, "too_many_values")


def test_halves_of_characters() -> None:
    assert parse_json(b'{"a": "\\ud83d\\ude00 \\\\ud83d"}', MAX_VALUES) == {"a": "\U0001f600 \\ud83d"}
    for text in (rb"\ud83d", rb"\ude00\ud83d", rb"\uD83D x"):
        with pytest.raises(ApiError, match="JSON in UTF-8"):
            parse_json(b'{"a": "' + text + b'"}', MAX_VALUES)


@pytest.mark.parametrize("step", ["parse_json", "check_bounds", "parse", "structured_of"])
def test_a_large_body_is_read_by_a_thread_of_its_own(server: Served, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """While it is being parsed and checked, others are answered."""
    go, work, threads = threading.Event(), getattr(app, step), []

    def held(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        assert len(threads) > 1 or go.wait(PATIENCE)
        return work(*arguments)

    monkeypatch.setattr(app, step, held)
    connection = server.connect()
    connection.sendall(raw_post(json.dumps({"prompt": "w7", "max_tokens": 1, "metadata": {"a": [" " * 2**18]}}).encode()))
    wait_for(lambda: threads)
    assert server.complete(prompt="w7", max_tokens=1) and server.client.get("/health").status_code == 200
    go.set()
    assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    connection.close()
    assert threads[0].startswith("graphspec long texts") and not threads[1].startswith("graphspec")


@pytest.mark.parametrize("prompt", ["w7 " * 300, ["w7 " * 300, "w8"]], ids=["alone", "with another"])
def test_a_prompt_that_is_refused_is_encoded_once(server: Served, llm: LLM, monkeypatch: pytest.MonkeyPatch, prompt: Any) -> None:
    encode, encoded = llm.tokenizer.encode, []
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text, **options: [encoded.append(text), encode(text, **options)][1])
    error = refused(server.post(COMPLETIONS, {"prompt": prompt}))
    assert error["param"] == "prompt" and "tokens" in error["message"]
    assert encoded == ([prompt] if isinstance(prompt, str) else prompt)


def test_a_text_that_can_not_fit_is_not_encoded(server: Served, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphspec.text.bounds._longest", lambda *_: 4)
    for name in ("encode", "words"):
        monkeypatch.setattr(llm.tokenizer, name, lambda *_, **__: pytest.fail("encoded"))
    text = "w7 " * 4 * llm.plan.max_context
    for path in (COMPLETIONS, "/tokenize"):
        error = refused(server.post(path, {"prompt": text}))
        assert error["param"] == "prompt"
        assert error["message"].endswith(
            f"(max_context {llm.plan.max_context}, one of them new), found at least {-(-len(text) // 4)} tokens"
        )


def test_token_routes_take_slots(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    go, words = threading.Event(), llm.tokenizer.words
    monkeypatch.setattr(llm.tokenizer, "words", lambda text, **options: [go.wait(PATIENCE), words(text, **options)][1])
    with serving(llm, max_waiting=0) as server:
        body = {"prompt": "w7", "add_special_tokens": False}
        found: list[int] = []
        threads = [
            threading.Thread(target=lambda: found.append(server.post("/tokenize", body).status_code))
            for _ in range(server.api.slots.maximum)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.api.slots.taken == server.api.slots.maximum)
        for path, other in (("/tokenize", body), ("/detokenize", {"tokens": [7]}), (COMPLETIONS, {"prompt": "w7"})):
            assert refused(server.post(path, other), 503)["code"] == "queue_full"
        go.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert found == [200] * len(threads)
        server.idle()
    too_many = [7] * (llm.plan.max_context + 1)
    with serving(llm) as server:
        assert refused(server.post("/detokenize", {"tokens": too_many}))["param"] == "tokens"
        assert server.post("/detokenize", {"tokens": too_many[:-1]}).status_code == 200


def test_health_is_that_of_the_threads_for_texts(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    go, started = threading.Event(), threading.Semaphore(0)

    def job() -> None:
        started.release()
        go.wait(PATIENCE)

    async def main() -> None:
        await asyncio.gather(*(server.api.llm.work(job) for _ in range(THREADS)))

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    for _ in range(THREADS):
        assert started.acquire(timeout=PATIENCE)
    assert server.client.get("/health").status_code == 200
    monkeypatch.setattr(app, "STUCK_SECONDS", 0.0)
    assert server.client.get("/health").status_code == 503
    go.set()
    thread.join(PATIENCE)
    wait_for(lambda: server.api.llm.stuck_seconds == 0)
    assert server.client.get("/health").status_code == 200

"""A server under hostile and mutated requests beside an honest stream: each is answered, none by an error of the server, and it goes on."""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from graphspec.config.compose import load_config
from graphspec.serve.limits import Keys
from graphspec.serve.protocol import ChatBody, CompletionBody
from graphspec.serve.run import load_api
from tests.support.hostile import CHAT, COMPLETIONS, DETOKENIZE, FIELDS, INPUTS, TOKENIZE
from tests.support.serving import Honest, Served, serving

from ._values import values

if TYPE_CHECKING:
    from collections.abc import Iterator

WORDS = ("model=demo", "variant=none", "runtime=eager", "runtime.max_rows=2", "runtime.buckets=[1,2]")
LIMITS = ("server.grammar_seconds=0.5", "server.request_seconds=2", "server.max_waiting=8", "server.access_log=off")
STATUSES = {200, 400, 404, 413, 503}
"""Of a body that is an object, whatever is in it."""
BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "def f(x):", "max_tokens": 4, "temperature": 0}),
    (COMPLETIONS, {"prompt": ["x = ", "y"], "max_tokens": 3, "n": 2, "temperature": 0.8, "seed": 1, "logprobs": 2, "echo": True}),
    (COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}),
    (COMPLETIONS, {"prompt": "x = ", "max_tokens": 4, "structured_outputs": {"json": {"type": "object", "properties": {"a": {}}}}}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f"}}]}),
    (TOKENIZE, {"prompt": "def f(x):", "return_token_strs": True}),
    (DETOKENIZE, {"tokens": [5, 6, 7]}),
    *((path, sent) for path, sent, _ in FIELDS.values() if len(json.dumps(sent)) < 10_000),
]
"""What mutations begin with."""
NAMES = sorted(
    {*CompletionBody.model_fields, *ChatBody.model_fields, "what", "suffix", "metadata", "guided_json", "type", "properties", "$ref"}
)


def is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def a_value(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.randrange(8)
    if kind == 0 and depth:
        return [a_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 1 and depth:
        return {rng.choice(NAMES): a_value(rng, depth - 1) for _ in range(rng.randrange(4))}
    if kind == 2:
        return rng.choice(
            [rng.choice("ab\n\u00e9\U0001f600\ud800") * rng.choice([1, 100, 5000]), "(" * 300, "#/$defs/a", "root ::= root\n"]
        )
    if kind == 3:
        return [rng.choice([0, "a", 1.5, [], None])] * rng.choice([1, 40, 3000])
    return rng.choice([value for value in values() if is_json(value)])


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body: fields of a good or a hostile request replaced, added, taken away, or replaced deep inside."""
    path, sent = rng.choice(BODIES)
    sent = json.loads(json.dumps(sent))
    for _ in range(rng.randrange(1, 4)):
        place: Any = sent
        while (inner := [value for value in place.values() if isinstance(value, dict) and value]) and rng.random() < 0.5:
            place = rng.choice(inner)
        name = rng.choice([*place] if place and rng.random() < 0.5 else NAMES)
        if rng.random() < 0.15:
            place.pop(name, None)
        else:
            place[name] = a_value(rng)
    return (rng.choice([COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE]) if rng.random() < 0.1 else path), json.dumps(sent).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    api = load_api(load_config(*WORDS, *LIMITS), Keys())
    with api.llm.llm, serving(api) as found:
        yield found


def fault_of(server: Served, path: str, body: bytes) -> str:
    """What is wrong with the answer; nothing if it is as it should be."""
    answer = server.client.post(path, content=body, headers={"Content-Type": "application/json"})
    if answer.status_code not in STATUSES:
        return f"status {answer.status_code}"
    if answer.status_code == 200:
        return "" if b"[DONE]" in answer.content or isinstance(answer.json(), dict) else "no answer"
    error = answer.json()["error"]
    if len(answer.content) > 2000 or "Traceback" in answer.text:
        return f"an error of {len(answer.content)} bytes"
    return "" if error["message"] and error.keys() == {"message", "type", "param", "code"} else f"an error without a message: {error}"


def test_a_server(server: Served, request: pytest.FixtureRequest) -> None:
    """Until the budget of requests or that of seconds is used up."""
    seed, budget, seconds = (request.config.getoption(f"--fuzz-{name}") for name in ("seed", "budget", "seconds"))
    rng, honest, end, faults = random.Random(seed), Honest(server), time.monotonic() + seconds, []
    hostile = rng.sample(sorted(INPUTS), len(INPUTS))
    try:
        for number in range(budget):
            if time.monotonic() > end:
                break
            if number % 5 == 4 and hostile:
                with server.connect() as connection, suppress(OSError):
                    # It may be refused before it is read.
                    connection.sendall(INPUTS[hostile.pop()])
                    connection.recv(65536)
            else:
                path, body = mutated(rng)
                if fault := fault_of(server, path, body):
                    faults.append(f"{path} {body[:2000]!r}: {fault}")
            honest.goes_on()
    finally:
        honest.stop()
    assert faults == []
    server.idle()
    assert server.client.get("/health").status_code == 200 and not honest.failed

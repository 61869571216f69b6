"""Texts with tool calls, and schemas with odd references and expressions: calls or content, a schema or one message, nothing else."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from graphspec.errors import RequestError
from graphspec.serve.tools import BEGIN, END, CallReader
from graphspec.text.schemas import check_schema, object_schema

PIECES = (
    BEGIN, END, BEGIN, '{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "arguments": null}', '{"name": "',
    '"arguments": ', "{", "}", "[", "]", '"', "\\", "\\u00e9", "\\ud800", "NaN", "1e400",
    "-", "null", ",", ":", "\n", " ", "x", "\u00e9", "<tool", "</tool_call", "\x00", "0" * 500,
)  # fmt: skip
REFERENCES = (
    "#",
    "#/",
    "#/$defs/a",
    "#/$defs/b",
    "#/$defs/a~1b",
    "#a",
    "#%41",
    "http://x",
    "http://x#/$defs/a",
    "x.json",
    "#/$defs/a/0",
    3,
    None,
    "",
)
PATTERNS = (
    "^a+$",
    'a"b',
    "(",
    "[^x]*",
    r"\p{L}",
    r"\u12",
    "(?=a)",
    "a{9999}",
    "[z-a]",
    "\\",
    r"[\x00-\x1f]",
    "(a|b){2,1}",
    "^$",
    ".",
    "\ud800",
)


def a_schema(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.randrange(9 if depth else 4)
    if kind == 0:
        return {"$ref": rng.choice(REFERENCES)}
    if kind == 1:
        return {"type": rng.choice(("string", None, 3, ["string"])), "pattern": rng.choice((*PATTERNS, 3))}
    if kind == 2:
        return rng.choice((True, False, {}, [], None, 3, "x"))
    if kind == 3:
        return {"type": "integer", rng.choice(("$anchor", "$id", "not", "minimum")): rng.choice(("a", "#a", "http://x", 3, {}))}
    inner = {name: a_schema(rng, depth - 1) for name in rng.sample(("a", "b", "a/b"), 2)}
    if kind == 4:
        return {rng.choice(("anyOf", "oneOf", "allOf")): [*inner.values()]}
    if kind == 5:
        return {"type": "object", rng.choice(("properties", "patternProperties")): inner, "required": rng.choice((["a"], ["z"], "a"))}
    if kind == 6:
        return {"type": "array", "items": a_schema(rng, depth - 1)}
    return {**(first if isinstance(first := a_schema(rng, depth - 1), dict) else {}), "$defs": inner}


@pytest.fixture
def draws(request: pytest.FixtureRequest) -> tuple[random.Random, int]:
    seed, budget = (request.config.getoption(name) for name in ("--fuzz-seed", "--fuzz-budget"))
    return random.Random(seed), 10 * budget


def test_texts_with_calls(draws: tuple[random.Random, int]) -> None:
    rng, budget = draws
    for _ in range(budget):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 14)))
        found = []
        for size in (1, rng.randint(2, 9), len(text)):
            reader, content, calls = CallReader(), "", []
            for place in range(0, len(text), size):
                more, fresh = reader.push(text[place : place + size], last=place + size >= len(text))
                content, calls = content + more, [*calls, *((call.name, call.arguments) for call in fresh)]
            found.append((content, calls))
        assert found[0] == found[1] == found[2], text
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in found[0][1]), text
        assert found[0][1] or found[0][0] == text, text


def test_schemas(draws: tuple[random.Random, int]) -> None:
    rng, budget = draws
    taken = 0
    for _ in range(budget):
        schema = a_schema(rng)
        for check in (check_schema, object_schema):
            try:
                json.dumps(check("key", schema))
            except RequestError as error:
                assert str(error).startswith("key"), schema
            else:
                taken += 1
    assert 0 < taken < 2 * budget

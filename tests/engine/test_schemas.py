"""JSON schemas: keywords that xgrammar ignores are refused by name, and the installed version still ignores them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from graphspec.api.llm import model_folder
from graphspec.errors import RequestError
from graphspec.text.schemas import check_schema
from graphspec.text.tokenizer import Tokenizer

INTEGER = {"type": "integer"}
# A schema, a value that it does not allow and xgrammar does, and where the error points.
OVERLOOKED: list[tuple[dict[str, Any], str, str]] = [
    ({"minimum": 5}, "4", "minimum"),
    ({"minLength": 3}, '"a"', "minLength"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aaa"', "pattern"),
    ({"type": "string", "format": "date", "minLength": 30}, '"2020-01-01"', "format"),
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, "[1, 1]", "uniqueItems"),
    ({"type": "array", "items": INTEGER, "contains": {"const": 4}}, "[1]", "contains"),
    ({"type": "object", "properties": {}, "required": ["a"]}, "{}", "required"),
    ({"type": "object", "properties": {"a": INTEGER}, "dependentRequired": {"a": ["b"]}}, '{"a": 1}', "dependentRequired"),
    ({"type": "object", "properties": {"a": INTEGER}, "dependentSchemas": {"a": {"required": ["b"]}}}, '{"a": 1}', "dependentSchemas"),
    ({"allOf": [INTEGER, {"type": "integer", "minimum": 3}]}, "2", "allOf"),
    ({"type": "object", "properties": {"a": INTEGER}, "anyOf": [{"type": "object"}]}, '{"a": "x"}', "anyOf"),
    ({"oneOf": [INTEGER, {"type": "integer", "minimum": 3}]}, "4", "oneOf"),
    ({"type": "integer", "not": {"const": 4}}, "4", "not"),
    ({"if": INTEGER, "then": {"type": "integer", "minimum": 4}}, "3", "if"),
    ({"type": "string", "enum": [1, "a"]}, "1", "enum"),
    ({"type": "integer", "const": "a"}, '"a"', "const"),
    ({"enum": [1, 5], "minimum": 3}, "1", "enum|minimum"),
    ({"$defs": {"x": INTEGER}, "$ref": "#/$defs/x", "type": "string"}, "3", r"\$ref"),
]
ENFORCED: list[tuple[Any, str]] = [
    ({"type": "integer", "minimum": 5, "maximum": 9}, "4"),
    ({"type": "number", "exclusiveMaximum": 5}, "5.0"),
    ({"type": "integer", "multipleOf": 3}, "4"),
    ({"type": "string", "minLength": 2, "maxLength": 3}, '"abcd"'),
    ({"type": "string", "pattern": "^a+$"}, '"b"'),
    ({"type": "string", "format": "uuid"}, '"b"'),
    ({"type": "array", "items": INTEGER, "minItems": 2}, "[1]"),
    ({"type": "array", "prefixItems": [INTEGER], "items": False}, "[1, 2]"),
    ({"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}, "{}"),
    ({"type": "object", "additionalProperties": INTEGER, "maxProperties": 1}, '{"a": 1, "b": 2}'),
    ({"type": "object", "patternProperties": {"^x": INTEGER}, "additionalProperties": False}, '{"x": "a"}'),
    ({"type": "object", "propertyNames": {"pattern": "^x$", "type": "string"}}, '{"y": 1}'),
    ({"anyOf": [INTEGER, {"type": "string"}]}, "true"),
    ({"type": ["integer", "null"]}, '"a"'),
    ({"type": "string", "enum": ["a", "b"]}, '"c"'),
    ({"const": {"a": [1]}}, '{"a": [2]}'),
    ({"allOf": [INTEGER]}, '"a"'),
    ({"oneOf": [INTEGER, {"type": "string"}]}, "null"),
    ({"type": "object", "properties": {"c": {"$ref": "#"}}, "additionalProperties": False}, '{"c": {"d": 1}}'),
    (
        {"oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"], "additionalProperties": False}
            for kind in "ab"
        ]},
        '{"kind": "c"}',
    ),
]  # fmt: skip


@cache
def compiler() -> xgrammar.GrammarCompiler:
    tokenizer = Tokenizer(Path(model_folder("demo")))
    texts = [tokenizer.token_bytes(token) for token in range(2048)]
    info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, vocab_size=2048, stop_token_ids=[0])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def takes(schema: Any, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(compiler().compile_json_schema(json.dumps(schema)), override_stop_tokens=[0])
    return bool(matcher.accept_string(text)) and matcher.is_completed()


@pytest.mark.parametrize(("schema", "value", "key"), OVERLOOKED, ids=[key for _, _, key in OVERLOOKED])
def test_what_is_overlooked_is_refused(schema: dict[str, Any], value: str, key: str) -> None:
    assert takes(schema, value), "xgrammar enforces it by now"
    with pytest.raises(RequestError, match=rf"^key\.({key}): expected"):
        check_schema("key", schema)
    with pytest.raises(RequestError, match=r"^key\.properties\.'in'\.items\."):
        check_schema("key", {"type": "object", "properties": {"in": {"items": schema}}})


@pytest.mark.parametrize(("schema", "value"), ENFORCED, ids=[json.dumps(schema)[:60] for schema, _ in ENFORCED])
def test_what_is_enforced_is_taken(schema: Any, value: str) -> None:
    check_schema("key", schema)
    assert not takes(schema, value)


def test_a_schema_without_an_end_is_refused() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(300):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="expected a schema of at most 200 levels"):
        check_schema("key", deep)

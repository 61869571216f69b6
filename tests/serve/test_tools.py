"""Tools: calls are found in a text by their structure, and the schemas of functions are those of objects."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from graphspec.api.grammar import compile_grammar
from graphspec.errors import RequestError
from graphspec.serve.json_objects import ObjectScanner
from graphspec.serve.tools import BEGIN, END, CallReader, read_tools
from graphspec.text.structured import Structured
from tests.engine.test_patterns import compiler

CALL = '<tool_call>\n{"name": "look", "arguments": {"word": "a<b"}}\n</tool_call>'
F = '{"name": "f", "arguments": {"a": 1}}'


def read(text: str, size: int = 1000) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a text that comes in pieces."""
    reader, content, calls = CallReader(), "", []
    for place in range(0, max(len(text), 1), size):
        more, found = reader.push(text[place : place + size], last=place + size >= len(text))
        content, calls = content + more, [*calls, *found]
    return content, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_calls_are_found_in_pieces_of_any_size(size: int) -> None:
    text = f"well, <tool {CALL} and{CALL}."
    reader, content, calls = CallReader(), "", []
    for place in range(0, len(text), size):
        more, found = reader.push(text[place : place + size], last=place + size >= len(text))
        content, calls = content + more, [*calls, *found]
    assert content == "well, <tool  and."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("look", {"word": "a<b"})] * 2
    spelled = [call.spelled() for call in calls]
    assert spelled[0]["id"] != spelled[1]["id"] and spelled[0]["type"] == "function"


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ('<tool_call>{"name": "f"}', "", ["f"]),
        ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
        ("a<tool_c", "a<tool_c", []),
    ],
)
def test_text_that_is_no_call_is_content(text: str, content: str, names: list[str]) -> None:
    found, calls = CallReader().push(text, last=True)
    assert (found, [call.name for call in calls]) == (content, names)


CASES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("I use <tool_call> now.\n" + f"{BEGIN}\n{F}\n{END}", "I use <tool_call> now.\n", [("f", '{"a": 1}')]),
    (f"{BEGIN}\n{BEGIN}\n{F}\n{END}", f"{BEGIN}\n", [("f", '{"a": 1}')]),
    (f"{BEGIN}{BEGIN}{BEGIN}{F}{END}", f"{BEGIN}{BEGIN}", [("f", '{"a": 1}')]),
    (f'{BEGIN}{{"name": "f", "arguments": {{"a": "x {END} y"}}}}{END}.', ".", [("f", '{"a": "x </tool_call> y"}')]),
    (f'{BEGIN}{{"name": "f", "arguments": {{"a": "x {BEGIN} y"}}}}{END}', "", [("f", '{"a": "x <tool_call> y"}')]),
    (f'{BEGIN}{{"name": "a{END}b\\"", "arguments": {{}}}}{END}', "", [(f'a{END}b"', "{}")]),
    (f'{BEGIN}{{"name": "f", "arguments": null}}{END}', "", [("f", "{}")]),
    (f'{BEGIN}{{"name": "f"}}{END}', "", [("f", "{}")]),
    (f'{BEGIN}{{"name": "f", "arguments": ""}}{END}', "", [("f", "{}")]),
    (f'{BEGIN}{{"name": "f", "arguments": "{{\\"z\\": [1], \\"a\\": \\"\u00e9\\"}}"}}{END}', "", [("f", '{"z": [1], "a": "\u00e9"}')]),
    (f'{BEGIN}{{"name": "f", "arguments": {{"a": "\\u00e9", "b": -1.5e3}}}}{END}', "", [("f", '{"a": "\u00e9", "b": -1500.0}')]),
    (f"{BEGIN}{F}{BEGIN}{F}", "", [("f", '{"a": 1}')] * 2),
    (f"{BEGIN}{F}\n{END}\n{BEGIN}{F}{END} so", "\n so", [("f", '{"a": 1}')] * 2),
    (f"{BEGIN}{F} and more", " and more", [("f", '{"a": 1}')]),
    (f"{BEGIN}{F}</tool_cal", "</tool_cal", [("f", '{"a": 1}')]),
]
NO_CALLS = [
    f'{BEGIN}{{"name": "f", "arguments": {{"a": NaN}}}}{END}',
    f'{BEGIN}{{"name": "f", "arguments": "{{\\"a\\": Infinity}}"}}{END}',
    f'{BEGIN}{{"name": "f", "arguments": [1]}}{END}',
    f'{BEGIN}{{"name": "f", "arguments": "text"}}{END}',
    f'{BEGIN}{{"name": "f", "arguments": 3}}{END}',
    f'{BEGIN}{{"name": 3, "arguments": {{}}}}{END}',
    f'{BEGIN}{{"name": "f", "arguments": {{"a": "\\ud800"}}}}{END}',
    f'{BEGIN}{{"name": "f", "arguments": {{"a": 1e400}}}}{END}',
    f'{BEGIN}{{"name": "f", "arguments": {{"a": 01}}}}{END}',
    f"{BEGIN}{'[' * 10}{END}",
    BEGIN + '{"a":' * 500,
    f"{BEGIN}[]{END}",
    f"{BEGIN}",
    f"{END}{BEGIN} {END}",
]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(("text", "content", "calls"), CASES)
def test_calls_are_read_by_structure(text: str, content: str, calls: list[tuple[str, str]], size: int) -> None:
    assert read(text, size) == (content, calls)


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_is_content_and_logged(text: str, size: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "graphspec"):
        assert read(text, size) == (text, [])
    assert caplog.records and all("in an output is content" in record.message for record in caplog.records)


@pytest.mark.parametrize("piece", [BEGIN, BEGIN + "{", BEGIN + '{"a": "', BEGIN + '{"a": [', f"{BEGIN}{F}", END, BEGIN + '{"' + BEGIN])
def test_hostile_text_is_read_a_bounded_number_of_times(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read_characters = 0
    scan = ObjectScanner.read

    def counted(scanner: ObjectScanner, text: str, place: int) -> int | None:
        nonlocal read_characters
        before = place
        try:
            end = scan(scanner, text, place)
        except Exception:
            # Where it was refused does not show; a refusal in the first characters is what is expected of most.
            read_characters += min(len(text) - before, 64)
            raise
        read_characters += (len(text) if end is None else end) - before
        return end

    monkeypatch.setattr(ObjectScanner, "read", counted)
    text = piece * 2000
    content, calls = read(text, 7)
    assert len(content) + len(calls) > 0 and read_characters < 8 * len(text)


def tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **function}}]


OBJECT = {"type": "object"}


@pytest.mark.parametrize(
    ("function", "schema"),
    [
        ({}, OBJECT),
        ({"parameters": None}, OBJECT),
        ({"parameters": {}}, OBJECT),
        ({"parameters": {"properties": {"a": {}}}}, {"properties": {"a": {}}, "type": "object"}),
        ({"parameters": {"type": ["null", "object"]}}, OBJECT),
        ({"parameters": {"anyOf": [{"type": "string"}, {"properties": {}}]}}, {"anyOf": [{"properties": {}, "type": "object"}]}),
        ({"parameters": {"enum": [1, {"a": 2}]}}, {"enum": [{"a": 2}]}),
        ({"parameters": {"$ref": "#/$defs/a", "$defs": {"a": OBJECT}}}, {"type": "object", "$defs": {"a": OBJECT}}),
        (
            {"parameters": {"$ref": "#a", "$defs": {"a": {"$anchor": "a", "enum": [{}, 2]}}}},
            {"enum": [{}], "$anchor": "a", "$defs": {"a": {"$anchor": "a", "enum": [{}, 2]}}},
        ),
    ],
)
def test_required_calls_have_arguments_that_are_objects(function: dict[str, Any], schema: dict[str, Any]) -> None:
    form = read_tools(tool(**function), "required").form
    assert form is not None and form["format"]["tags"][0]["content"]["json_schema"] == schema
    compile_grammar(compiler(), Structured(structural_tag=form))


@pytest.mark.parametrize(
    ("parameters", "place"),
    [
        ({"type": "string"}, ""),
        ({"type": ["null"]}, ""),
        ({"const": 3}, ".const"),
        ({"enum": [1]}, ".enum"),
        ({"allOf": [OBJECT, {"type": "null"}]}, ".allOf[1]"),
        ({"anyOf": [{"type": "null"}, {"type": "string"}]}, ".anyOf[1]"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}}, ""),
        ({"$ref": "#/$defs/a"}, ".$ref"),
        ({"type": "object", "not": {}}, ".not"),
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, ".properties.'a'.uniqueItems"),
    ],
)
def test_a_required_call_needs_a_schema_of_objects_that_can_be_enforced(parameters: dict[str, Any], place: str) -> None:
    tools = [*tool(), *tool(parameters=parameters)]
    with pytest.raises(RequestError) as caught:
        read_tools(tools, "required")
    assert caught.value.key == f"tools[1].function.parameters{place}"
    assert read_tools(tools, "auto").form is None


def test_a_name_with_marks_and_quotes_is_written_and_read_back() -> None:
    name = f'\u00e9 "{END}" b'
    form = read_tools([{"type": "function", "function": {"name": name}}], "required").form
    assert form is not None
    tag = form["format"]["tags"][0]
    assert "\u00e9" in tag["begin"] and read(tag["begin"] + '{"x": 1}' + tag["end"]) == ("", [(name, '{"x": 1}')])

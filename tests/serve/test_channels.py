"""Answers in channels: reasoning, content and calls are told apart by the checkpoint's own marks, in pieces of any size."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from graphspec.api.outputs import StreamEvent
from graphspec.serve.answers import ChatWriter
from graphspec.serve.channels import MARKS, MAX_HEADER, ChannelReader, in_channels
from graphspec.serve.protocol import ChatBody, parse
from graphspec.serve.tools import Tools

THOUGHT = "<|channel|>analysis<|message|>2 < 3, so <|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is 3.<|return|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"word": "a<|b"}<|call|>'
OTHER_CALL = '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'


def read(text: str, size: int, *, calls: bool = True) -> tuple[str, str, list[tuple[str, str]]]:
    reader, reasoning, content, found = ChannelReader(calls=calls), "", "", []
    for place in range(0, max(len(text), 1), size):
        said = reader.push(text[place : place + size], last=place + size >= len(text))
        reasoning, content, found = reasoning + said.reasoning, content + said.content, [*found, *said.calls]
    return reasoning, content, [(call.name, call.arguments) for call in found]


CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (THOUGHT + FINAL, "2 < 3, so ", "It is 3.", []),
    (THOUGHT + CALL, "2 < 3, so ", "", [("look", '{"word": "a<|b"}')]),
    (THOUGHT + CALL + OTHER_CALL, "2 < 3, so ", "", [("look", '{"word": "a<|b"}'), ("f", '{"a": 1}')]),
    (FINAL, "", "It is 3.", []),
    ("<|channel|>commentary<|message|>I look it up.<|end|>" + CALL, "", "I look it up.", [("look", '{"word": "a<|b"}')]),
    ("plain text", "", "plain text", []),
    ('{"forced": "<| by a grammar"}', "", '{"forced": "<| by a grammar"}', []),
    ("<|channel|>analysis<|message|>cut off", "cut off", "", []),
    ("<|channel|>ana", "", "", []),
    ("<|channel|>final<|message|>a<|chan", "", "a<|chan", []),
    (CALL[:-8], "", "", [("look", '{"word": "a<|b"}')]),
    (CALL.replace("}", ""), "", '{"word": "a<|b"', []),
    (CALL.replace('{"word": "a<|b"}', "[1]"), "", "[1]", []),
    (CALL.replace('{"word": "a<|b"}', ""), "", "", [("look", "{}")]),
    ("<|channel|>commentary to=browser.open<|message|>{}<|end|>", "", "{}", []),
    ('<|channel|>final<|message|><tool_call>{"name": "f", "arguments": {}}</tool_call><|return|>', "", "", [("f", "{}")]),
]


@pytest.mark.parametrize("size", [1, 3, 11, 1000])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_channels_are_told_apart_in_pieces_of_any_size(case: int, size: int) -> None:
    text, reasoning, content, calls = CASES[case]
    assert read(text, size) == (reasoning, content, calls)


def test_without_tools_a_message_to_a_function_is_content() -> None:
    assert read(THOUGHT + CALL, 5, calls=False) == ("2 < 3, so ", '{"word": "a<|b"}', [])


def test_a_header_without_end_is_content() -> None:
    text = "<|channel|>" + "x" * (2 * MAX_HEADER)
    assert read(text, 100)[1] == text


def test_the_marks_of_a_tokenizer_say_whether_answers_are_in_channels() -> None:
    assert in_channels({mark: number for number, mark in enumerate(MARKS)})
    assert not in_channels({"<|start|>": 0, "<|end|>": 1}) and not in_channels(())


def writer(tools: Tools, *, stream: bool) -> ChatWriter:
    body = parse(ChatBody, {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream})
    generation = SimpleNamespace(
        choice=lambda event: 0, request=lambda event: SimpleNamespace(prompt=[1]), usage=dict, speculation=lambda: None
    )
    tokenizer = SimpleNamespace(special_tokens=dict.fromkeys(MARKS, 0))
    return ChatWriter(body, "m", cast("Any", tokenizer), cast("Any", generation), tools=tools)


def events(text: str, size: int) -> list[StreamEvent]:
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    ends = [number == len(pieces) - 1 for number in range(len(pieces))]
    return [
        StreamEvent(0, piece, [number], end, "stop" if end else None) for number, (piece, end) in enumerate(zip(pieces, ends, strict=True))
    ]


def test_a_whole_response_and_its_chunks_have_the_same_parts() -> None:
    found = events(THOUGHT + CALL, 7)
    whole = writer(Tools(read=True), stream=False).whole(found)["choices"][0]
    message = whole["message"]
    assert message["reasoning_content"] == "2 < 3, so " and message["content"] is None
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "look", "arguments": '{"word": "a<|b"}'}]
    assert whole["finish_reason"] == "tool_calls"
    streamed = writer(Tools(read=True), stream=True)
    deltas = [chunk["choices"][0]["delta"] for event in found for chunk in streamed.chunks(event)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "2 < 3, so "
    assert "".join(delta.get("content", "") for delta in deltas) == ""
    assert [json.loads(call["function"]["arguments"]) for delta in deltas for call in delta.get("tool_calls", ())] == [{"word": "a<|b"}]
    answer = writer(Tools(), stream=False).whole(events(THOUGHT + FINAL, 7))["choices"][0]
    assert answer["message"] == {"role": "assistant", "content": "It is 3.", "reasoning_content": "2 < 3, so "}
    assert answer["finish_reason"] == "stop"

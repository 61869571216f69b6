"""Tools: functions that the model may call. Calls are parsed in one syntax, that of Hermes 2 Pro, which Qwen's templates use too:
``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.stops import overlap
from .errors import bad_field

BEGIN, END = "<tool_call>", "</tool_call>"
CHOICES = ("none", "auto", "required")
MOST_TOOLS = 128


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made.

    Attributes:
        name: of the function.
        arguments: a JSON object, as text.
    """

    name: str
    arguments: str

    def spelled(self, index: int | None = None) -> dict[str, Any]:
        """The call in the format of responses, with its ``index`` in a stream."""
        place = {} if index is None else {"index": index}
        function = {"name": self.name, "arguments": self.arguments}
        return place | {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request.

    Attributes:
        described: for the template; empty: the request has none, or ``tool_choice`` is ``none``.
        read: whether the output is parsed for calls.
        form: required format of the text as xgrammar's structural tag, where calls are required; None: they are not.
    """

    described: tuple[Mapping[str, Any], ...] = ()
    read: bool = False
    form: dict[str, Any] | None = None


def read_tools(tools: object, choice: object, *, parallel: bool = True) -> Tools:
    """Read the tools of a request.

    Args:
        tools: ``tools`` of the body.
        choice: ``tool_choice`` of the body.
        parallel: whether an output may have more than one call.

    Raises:
        ApiError: 400, invalid tools, or a choice that is not supported.
    """
    if tools is None or tools == []:
        if choice not in (None, "none"):
            raise bad_field("tool_choice", "none without tools", "another choice")
        return Tools()
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
        raise bad_field("tools", f"a list of at most {MOST_TOOLS} functions", "something else")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not named or not isinstance(function.get("parameters", {}), dict):  # type: ignore[union-attr]
            raise bad_field(f"tools[{place}]", '{"type": "function", "function": {"name": ..., "parameters": {...}}}', "something else")
    if choice is None or choice == "auto":
        return Tools(tuple(tools), read=True)
    if choice == "none":
        return Tools()
    if choice == "required":
        return Tools(tuple(tools), read=True, form=_calls_of(tools, single=not parallel))
    wanted = choice.get("function") if isinstance(choice, dict) else None
    chosen = [tool for tool in tools if isinstance(wanted, dict) and tool["function"]["name"] == wanted.get("name")]
    if not chosen:
        raise bad_field("tool_choice", "one of " + ", ".join(CHOICES) + ", or a function among tools", "something else")
    return Tools(tuple(tools), read=True, form=_calls_of(chosen[:1], single=True))


def _calls_of(tools: Sequence[Mapping[str, Any]], *, single: bool) -> dict[str, Any]:
    """The format of a text that consists of one or more calls of these functions."""
    tags = [
        {
            "type": "tag",
            "begin": f'{BEGIN}\n{{"name": {json.dumps(tool["function"]["name"])}, "arguments": ',
            "content": {"type": "json_schema", "json_schema": tool["function"].get("parameters", {"type": "object"})},
            "end": f"}}\n{END}",
        }
        for tool in tools
    ]
    form = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True, "stop_after_first": single}
    return {"type": "structural_tag", "format": form}


class CallReader:
    """Splits a growing text into content and calls."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[ToolCall]]:
        """Append text; returns the content that is now final, and the calls that are now complete.

        Args:
            text: that will not change.
            last: whether no more text follows.
        """
        self._held += text
        said = ""
        calls: list[ToolCall] = []
        while True:
            mark = END if self._inside else BEGIN
            place = self._held.find(mark)
            if place < 0:
                break
            before, self._held = self._held[:place], self._held[place + len(mark) :]
            if self._inside:
                call = _parse(before)
                # An invalid call is content.
                said, calls = (said, [*calls, call]) if call is not None else (said + BEGIN + before + END, calls)
            else:
                said += before
            self._inside = not self._inside
        if last:
            rest, self._held = self._held, ""
            call = _parse(rest) if self._inside else None
            if call is not None:
                calls.append(call)
            else:
                said += (BEGIN if self._inside else "") + rest
        elif not self._inside:
            final = len(self._held) - overlap(self._held, BEGIN)
            said, self._held = said + self._held[:final], self._held[final:]
        return said, calls


def _parse(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return ToolCall(call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))

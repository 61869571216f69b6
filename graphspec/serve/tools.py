"""Tools: functions that the model may call. One syntax of calls is read, that of Hermes 2 Pro, which Qwen's templates use too:
``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        """As answers have it; with its place among the calls in a stream."""
        place = {} if index is None else {"index": index}
        function = {"name": self.name, "arguments": self.arguments}
        return place | {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Tools:
    """What a request says of tools.

    Attributes:
        described: for the template; none: it has none, or ``tool_choice`` is ``none``.
        read: calls are looked for in the text.
        form: what the text must look like where calls are demanded, as xgrammar's structural tag; None: calls are not demanded.
    """

    described: tuple[Mapping[str, Any], ...] = ()
    read: bool = False
    form: dict[str, Any] | None = None


def read_tools(tools: object, choice: object, *, parallel: bool = True) -> Tools:
    """The tools of a request.

    Args:
        tools: that it offers.
        choice: which of them are to be called.
        parallel: more than one call may come.

    Raises:
        ApiError: 400, no such tools, or a choice that is not served.
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
    """The form of a text that is calls of these functions and nothing else, one of them at least."""
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
    """Splits a growing text into what is said and what is called."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[ToolCall]]:
        """Append text; returns what is final of what is said, and the calls that are whole now.

        Args:
            text: that is final.
            last: none follows.
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
                # What is no call is said as it was written.
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
            final = len(self._held) - _begun(self._held)
            said, self._held = said + self._held[:final], self._held[final:]
        return said, calls


def _begun(text: str) -> int:
    """Characters at the end of ``text`` with which a call's mark may begin."""
    return next((length for length in range(min(len(BEGIN) - 1, len(text)), 0, -1) if text.endswith(BEGIN[:length])), 0)


def _parse(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return ToolCall(call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def spell_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Calls as an answer that is no stream has them."""
    return [call.spelled() for call in calls]

"""Tools: functions that the model may call. Calls are parsed in one syntax, that of Hermes 2 Pro, which Qwen's templates use too:
``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..api.outputs import overlap
from ..config.checks import brief
from ..text.schemas import check_schema, object_schema
from .errors import bad_field
from .json_objects import SPACE, NotAnObjectError, ObjectScanner

logger = logging.getLogger(__name__)

BEGIN, END = "<tool_call>", "</tool_call>"
CHOICES = ("none", "auto", "required")
MARKS = (BEGIN, END)
MAX_TOOLS = 128
LOGGED = 80
"""Characters after a mark without an object that the log shortens."""


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
        RequestError: a call is required, and the schema of its arguments can't be enforced.
    """
    if tools is None or tools == []:
        if choice not in (None, "none"):
            raise bad_field("tool_choice", "none without tools", "another choice")
        return Tools()
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise bad_field("tools", f"a list of at most {MAX_TOOLS} functions", "something else")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not named or not isinstance(function.get("parameters") or {}, dict):  # type: ignore[union-attr]
            raise bad_field(f"tools[{place}]", '{"type": "function", "function": {"name": ..., "parameters": {...}}}', "something else")
    if choice is None or choice == "auto":
        return Tools(tuple(tools), read=True)
    if choice == "none":
        return Tools()
    keyed = [(f"tools[{place}]", tool) for place, tool in enumerate(tools)]
    if choice == "required":
        return Tools(tuple(tools), read=True, form=_calls_of(keyed, single=not parallel))
    wanted = choice.get("function") if isinstance(choice, dict) else None
    chosen = [(key, tool) for key, tool in keyed if isinstance(wanted, dict) and tool["function"]["name"] == wanted.get("name")]
    if not chosen:
        raise bad_field("tool_choice", "one of " + ", ".join(CHOICES) + ", or a function among tools", "something else")
    return Tools(tuple(tools), read=True, form=_calls_of(chosen[:1], single=True))


def _calls_of(tools: Sequence[tuple[str, Mapping[str, Any]]], *, single: bool) -> dict[str, Any]:
    """The format of a text that consists of one or more calls of these functions.

    Args:
        tools: each with the key of its field.
        single: the text is one call.

    Raises:
        RequestError: a schema of arguments that allows no object, or that can't be enforced.
    """
    tags = []
    for key, tool in tools:
        function = tool["function"]
        schema = object_schema(f"{key}.function.parameters", function.get("parameters") or {})
        # Here, for its key; the whole form is checked again.
        check_schema(f"{key}.function.parameters", schema)
        tags.append(
            {
                "type": "tag",
                "begin": f'{BEGIN}\n{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": ',
                "content": {"type": "json_schema", "json_schema": schema},
                "end": f"}}\n{END}",
            }
        )
    form = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True, "stop_after_first": single}
    return {"type": "structural_tag", "format": form}


class CallReader:
    """Splits a growing text into content and calls.

    After a begin mark a JSON object is read, and then an end mark if there is one. Marks inside the object's strings count as text. A mark
    without an object is content, and so is an object that is no call; both are logged. No character is held longer than the object that
    it may belong to, and each is read a bounded number of times.
    """

    def __init__(self) -> None:
        self._mark = ""
        """The end of the text, which may be the beginning of a mark."""
        self._scanner: ObjectScanner | None = None
        """Reader of the object after a begin mark; None: the text is outside of one."""
        self._held: list[str] = []
        """Text since that mark, or the white space after a call."""
        self._after = False
        """A call has just been read: white space and an end mark may follow."""

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[ToolCall]]:
        """Append text; returns the content that is now final, and the calls that are now complete.

        Args:
            text: that will not change.
            last: whether no more text follows.
        """
        said: list[str] = []
        calls: list[ToolCall] = []
        text, self._mark, place = self._mark + text, "", 0
        while place < len(text) or last:
            if self._scanner is not None:
                text, place = self._read(text, place, said, calls, last=last)
            elif self._after:
                place = self._end(text, place, said, last=last)
            else:
                found = text.find(BEGIN, place)
                if found < 0:
                    final = len(text) if last else max(place, len(text) - overlap(text, BEGIN))
                    said.append(text[place:final])
                    self._mark = text[final:]
                    break
                said.append(text[place:found])
                self._scanner, place = ObjectScanner(), found + len(BEGIN)
        return "".join(said), calls

    def _read(self, text: str, place: int, said: list[str], calls: list[ToolCall], *, last: bool) -> tuple[str, int]:
        """Read on in an object; returns the text, and how far it was read."""
        assert self._scanner is not None
        try:
            end = self._scanner.read(text, place)
            if end is None and last:
                raise NotAnObjectError
        except NotAnObjectError:
            # The mark is content, and whatever follows it may have marks of its own.
            if self._held:
                text, place = "".join([*self._held, text[place:]]), 0
            self._leave()
            said.append(BEGIN)
            log_text(f"a {BEGIN} in an output", "no JSON object follows it", text[place : place + LOGGED])
            return text, place
        if end is None:
            self._held.append(text[place:])
            return text, len(text)
        value = "".join([*self._held, text[place:end]])
        self._leave()
        call = _parse(value)
        if call is None:
            said.append(BEGIN + value)
            log_text(f"a {BEGIN} in an output", "its object is no call", value)
        else:
            calls.append(call)
            self._after = True
        return text, end

    def _leave(self) -> None:
        self._scanner, self._held = None, []

    def _end(self, text: str, place: int, said: list[str], *, last: bool) -> int:
        """Skip white space and an end mark after a call; returns how far the text was read."""
        mark = place
        while mark < len(text) and text[mark] in SPACE:
            mark += 1
        self._held.append(text[place:mark])
        if text.startswith(END, mark):
            mark += len(END)
        elif last and mark == len(text):
            pass
        elif not last and len(text) - mark < len(END) and END.startswith(text[mark:]):
            self._mark = text[mark:]
            return len(text)
        else:
            said += self._held
        self._after, self._held = False, []
        return mark


def log_text(what: str, reason: str, text: str) -> None:
    """Warn that something in an output, which looks like a call, is content."""
    logger.warning("%s is content: %s: %s", what, reason, brief(text))


def parse_arguments(text: str) -> str | None:
    """Arguments of a call as the text of an object; None: they are none. No text is an empty object."""
    try:
        value = json.loads(text, parse_constant=_refuse) if text.strip() else {}
        spelled = json.dumps(value, ensure_ascii=False, allow_nan=False)
        # Half of a surrogate pair can't be sent.
        spelled.encode()
    except (ValueError, RecursionError):
        return None
    return spelled if isinstance(value, dict) else None


def _parse(text: str) -> ToolCall | None:
    """The call that a JSON object describes; None: it describes none."""
    try:
        call = json.loads(text)
        name, arguments = call.get("name"), call.get("arguments")
        if isinstance(arguments, str):
            arguments = json.loads(arguments, parse_constant=_refuse) if arguments.strip() else None
        spelled = json.dumps({} if arguments is None else arguments, ensure_ascii=False, allow_nan=False)
        # Half of a surrogate pair can't be sent.
        f"{name}{spelled}".encode()
    except (ValueError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict | None):
        return None
    return ToolCall(name, spelled)


def _refuse(constant: str) -> Any:
    raise ValueError(constant)

"""Answers in channels, the harmony format of gpt-oss: an output is a sequence of messages, each of a channel and perhaps to a tool.

``<|channel|>analysis<|message|>TEXT<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>``. The marks are special tokens of a
checkpoint's own tokenizer, which says by having them that its answers are written so.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from ..api.outputs import overlap
from .tools import CallReader, ToolCall, log_text, parse_arguments

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
REASONING, FUNCTIONS = "analysis", "functions."
_TO = re.compile(r"\bto=([^\s<]+)")
_MARK = re.compile("|".join(map(re.escape, MARKS)))
MAX_HEADER = 1024
"""Characters between the beginning of a message and its text."""


class Said(NamedTuple):
    """What an output has added."""

    reasoning: str
    content: str
    calls: list[ToolCall]


def in_channels(special_tokens: Collection[str]) -> bool:
    """Whether a tokenizer with these special tokens belongs to a model that answers in channels."""
    return all(mark in special_tokens for mark in (START, CHANNEL, MESSAGE, END))


class ChannelReader:
    """Splits a growing text with its marks into reasoning, content, and calls.

    The channel ``analysis`` is reasoning; a message to ``functions.NAME`` is a call of it; everything else is content, so is text without
    marks, which a grammar may have forced, and a message to a function whose text is no JSON object. With calls, content may also hold
    those that :class:`~graphspec.serve.tools.CallReader` finds.

    Args:
        calls: whether messages to functions are calls.
    """

    def __init__(self, *, calls: bool) -> None:
        self._calls = calls
        self._content = CallReader() if calls else None
        self._tail = ""
        """The end of the text, which may be the beginning of a mark."""
        self._header: list[str] | None = None
        """Header of the message that has begun; None: its text is being read."""
        self._channel, self._function = "", ""
        self._held: list[str] = []
        """The text of a call so far."""

    def push(self, text: str, *, last: bool = False) -> Said:
        """Append text; returns what is now final.

        Args:
            text: that will not change.
            last: whether no more text follows.
        """
        reasoning: list[str] = []
        content: list[str] = []
        calls: list[ToolCall] = []
        text, place = self._tail + text, 0
        for mark in _MARK.finditer(text):
            self._say(text[place : mark.start()], reasoning, content)
            self._turn(mark[0], content, calls)
            place = mark.end()
        final = len(text) if last else len(text) - max(overlap(text[place:], mark) for mark in MARKS)
        self._say(text[place:final], reasoning, content)
        self._tail = text[final:]
        if last:
            self._turn(END, content, calls)
        said = "".join(content)
        if self._content is not None:
            said, further = self._content.push(said, last=last)
            calls += further
        return Said("".join(reasoning), said, calls)

    def _say(self, text: str, reasoning: list[str], content: list[str]) -> None:
        if self._header is not None:
            self._header.append(text)
            if sum(map(len, self._header)) > MAX_HEADER:
                # No header is that long.
                content.append("".join(self._header))
                self._header, self._channel, self._function = None, "", ""
        elif self._function:
            self._held.append(text)
        else:
            (reasoning if self._channel == REASONING else content).append(text)

    def _turn(self, mark: str, content: list[str], calls: list[ToolCall]) -> None:
        if mark == MESSAGE:
            header = "".join(self._header or ())
            _, _, named = header.rpartition(CHANNEL)
            to = _TO.search(header)
            name = to[1] if to is not None else ""
            self._channel = next(iter(named.split()), "")
            self._function = name.removeprefix(FUNCTIONS) if self._calls and name.startswith(FUNCTIONS) else ""
            self._header = None
            return
        if mark == CONSTRAIN:
            if self._header is not None:
                self._header.append(" ")
            return
        if self._function:
            self._close(content, calls)
        if mark in (START, CHANNEL):
            kept = self._header if mark == CHANNEL and self._header is not None else []
            self._header = [*kept, *([CHANNEL] if mark == CHANNEL else [])]
        elif self._header is None:
            self._channel = ""

    def _close(self, content: list[str], calls: list[ToolCall]) -> None:
        """End the text of a call."""
        name, text = self._function, "".join(self._held)
        self._function, self._held = "", []
        arguments = parse_arguments(text)
        if arguments is None:
            content.append(text)
            log_text(f"a message to {FUNCTIONS}{name}", "it is no JSON object", text)
        else:
            calls.append(ToolCall(name, arguments))

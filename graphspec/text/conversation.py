"""Conversations: messages as a caller gives them, checked before a chat template reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config.checks import brief, check_text
from ..errors import RequestError
from .call_history import check_calls

MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, oldest first, as a prompt: the checkpoint's chat template turns them into text.

    Attributes:
        messages: ``{"role": ..., "content": ...}`` each, and ``name``, ``tool_calls``, ``tool_call_id`` or ``reasoning_content`` where the
            template reads one; checked when they are encoded. None is as good as nothing. A message with ``tool_calls`` needs no content;
            the arguments of a call are an object or its JSON text, and the template gets what it wants of the two. ``reasoning`` is another
            name of ``reasoning_content``.
        tools: descriptions of functions for the template, each ``{"type": "function", "function": {...}}``; None: none.
        options: names that the template reads in addition, such as ``enable_thinking``.
        continued: the last message is the beginning of the answer, which goes on from there; otherwise a new turn of the assistant follows.
        add_special_tokens: put the special tokens around the text that a prompt gets, in addition to those that the template writes.
        special_tokens_as_text: texts of special tokens in what is given here are text. The template sees something else in their places.
    """

    messages: Any
    tools: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    continued: bool = False
    add_special_tokens: bool = False
    special_tokens_as_text: bool = False


def conversations(messages: Any) -> Conversation | list[Conversation]:
    """One conversation, a list of messages, or many, a list of such lists; the checks of :func:`check_messages` come later, one by one.

    Raises:
        RequestError: neither.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError("messages", "a list of messages, or a list of such lists", brief(messages))
    if messages and all(isinstance(entry, Sequence) and not isinstance(entry, str | bytes) for entry in messages):
        return [Conversation(entry) for entry in messages]
    return Conversation(messages)


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of one conversation as plain dictionaries.

    Raises:
        RequestError: no list, an empty one, or a message without text in ``role`` and ``content``, or with keys that are not known.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError("messages", "a list of at least one message", brief(messages))
    return [_check_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _check_message(key: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(key, 'an object with "role" and "content"', brief(message))
    for name in message:
        if name not in MESSAGE_KEYS:
            raise RequestError(key, "keys " + ", ".join(MESSAGE_KEYS), brief(name))
    given = {name: value for name, value in message.items() if value is not None}
    if "tool_calls" in given:
        given["tool_calls"] = check_calls(f"{key}.tool_calls", given["tool_calls"])
        # Templates join it with other text.
        given.setdefault("content", "")
    for name in ("role", "content"):
        if name not in given:
            raise RequestError(f"{key}.{name}", "text", "nothing")
    for name, value in given.items():
        if name != "tool_calls":
            check_text(f"{key}.{name}", value)
    if "reasoning" in given:
        # Templates read the other name.
        given.setdefault("reasoning_content", given["reasoning"])
    return given

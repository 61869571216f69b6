"""Converts the messages of clients to the engine's :class:`~graphspec.text.tokenizer.Conversation`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..text.conversation import MESSAGE_KEYS, Conversation
from .errors import bad_field
from .protocol import ChatBody
from .tools import Tools

ABSENT = ("refusal", "audio", "function_call", "annotations")
"""Keys of a response's message that clients send back, and that must be empty."""
ROLES = {"developer": "system"}
"""Newer names of roles, and the older ones that templates use."""


def conversation_of(body: ChatBody, tools: Tools, *, special_tokens_as_text: bool = False) -> Conversation:
    """The conversation of a request, for the checkpoint's template.

    Args:
        body: of the request.
        tools: of the request.
        special_tokens_as_text: texts of special tokens in it are text.

    Raises:
        ApiError: 400, a message with parts other than text, or with unknown keys.
    """
    messages = [_message(f"messages[{place}]", message) for place, message in enumerate(body.messages)]
    return Conversation(
        messages,
        list(tools.described) or None,
        dict(body.chat_template_kwargs or {}),
        continued=body.continue_final_message,
        add_special_tokens=bool(body.add_special_tokens),
        special_tokens_as_text=special_tokens_as_text,
    )


def _message(key: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise bad_field(key, 'an object with "role" and "content"', "something else")
    given = {name: value for name, value in message.items() if value is not None and not (name in ABSENT and not value)}
    if unknown := [name for name in given if name not in MESSAGE_KEYS]:
        raise bad_field(key, "keys " + ", ".join(MESSAGE_KEYS), ", ".join(map(str, unknown)))
    if isinstance(given.get("role"), str):
        given["role"] = ROLES.get(given["role"], given["role"])
    if isinstance(given.get("content"), list):
        given["content"] = "".join(_part(f"{key}.content[{place}]", part) for place, part in enumerate(given["content"]))
    if given.get("tool_calls") == []:
        del given["tool_calls"]
    return given


def _part(key: str, part: object) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise bad_field(key, "a part of type text", "something else")
    return str(part["text"])

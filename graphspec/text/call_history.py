"""Tool calls of earlier turns, with their arguments in the spelling that a chat template wants.

In OpenAI's protocol the arguments are JSON text. Some templates join that text with other text (DeepSeek V3 and R1). Most write an object
as JSON, or go through its items (Hermes, Qwen, Llama 3.1, Mistral). A template is tried with an object that no conversation has: one that
wants text raises an error, or writes the object as Python spells it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config.checks import brief
from ..errors import RequestError

Message = dict[str, Any]
Render = Callable[[list[Message]], str]


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a call in both spellings.

    Attributes:
        key: of the field.
        text: as the client wrote them, or the JSON of their object.
        parsed: their object; None: the text is no JSON object.
    """

    key: str
    text: str
    parsed: dict[str, Any] | None


def check_calls(key: str, calls: Any) -> list[Message]:
    """The calls of a message, each with :class:`Arguments`.

    Args:
        key: of the field.
        calls: ``{"function": {"name": ..., "arguments": ...}}`` each. The arguments are an object or its text; None and an empty text are
            no arguments.

    Raises:
        RequestError: something else.
    """
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes) or not calls:
        raise RequestError(key, "a list of at least one call", brief(calls))
    found = []
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{key}[{place}]", '{"function": {"name": ..., "arguments": ...}}', brief(call))
        arguments = _arguments(f"{key}[{place}].function.arguments", function.get("arguments"))
        found.append({**call, "function": {"name": function["name"], "arguments": arguments}})
    return found


def _arguments(key: str, given: Any) -> Arguments:
    if given is None or (isinstance(given, str) and not given.strip()):
        return Arguments(key, "{}", {})
    try:
        if isinstance(given, str):
            parsed = json.loads(given, parse_constant=_refuse)
            return Arguments(key, given, parsed if isinstance(parsed, dict) else None)
        if isinstance(given, Mapping):
            text = json.dumps(dict(given), ensure_ascii=False, allow_nan=False)
            return Arguments(key, text, json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(given, str):
            return Arguments(key, given, None)
        raise RequestError(key, "a JSON object", brief(given)) from error
    raise RequestError(key, "a JSON object, or its text", brief(given))


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def render_calls(messages: list[Message], render: Render) -> str:
    """The text of a conversation whose calls have the spelling that the template wants.

    Args:
        messages: checked ones.
        render: the template.

    Raises:
        RequestError: the template wants objects, and the arguments of a call are none.
        Exception: the template's own.
    """
    calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]
    if not calls:
        return render(messages)
    strange = f"q{secrets.token_hex(8)}"
    try:
        probe = render(_with(messages, lambda _: {strange: strange}))
    except Exception as reason:  # noqa: BLE001  the template's own, and why is not known yet
        return _either(messages, calls, render, reason)
    if str({strange: strange}) in probe:
        return render(_with(messages, lambda arguments: arguments.text))
    for arguments in calls:
        if arguments.parsed is None:
            raise RequestError(arguments.key, "a JSON object, which the chat template writes itself", "something else")
    return render(_with(messages, lambda arguments: arguments.parsed))


def _either(messages: list[Message], calls: list[Arguments], render: Render, reason: Exception) -> str:
    """The text of a conversation with objects, or with texts where the template does not take these; ``reason`` why it took no others."""
    if all(arguments.parsed is not None for arguments in calls):
        try:
            return render(_with(messages, lambda arguments: arguments.parsed))
        except Exception as own:  # noqa: BLE001  the template's own
            reason = own
    try:
        return render(_with(messages, lambda arguments: arguments.text))
    except Exception:  # noqa: BLE001  it takes neither, and text is no better
        raise reason from None


def _with(messages: list[Message], spelled: Callable[[Arguments], Any]) -> list[Message]:
    return [
        message
        if "tool_calls" not in message
        else {
            **message,
            "tool_calls": [
                {**call, "function": {**call["function"], "arguments": spelled(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ],
        }
        for message in messages
    ]

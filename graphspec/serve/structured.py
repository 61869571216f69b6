"""The required format of an output: ``response_format``, ``structured_outputs``, and the calls that ``tool_choice`` requires."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import RequestError
from ..text.structured import Structured
from .errors import bad_field
from .protocol import Body
from .tools import Tools

FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Structured | None]] = {
    "text": lambda given: None,
    "json_object": lambda given: Structured(json_object=True),
    "json_schema": lambda given: Structured(json_schema=_schema(given)),
    "structural_tag": lambda given: Structured(structural_tag=dict(given)),
}
"""``response_format`` by its type."""
KINDS = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}
"""Fields of vLLM's ``structured_outputs``, and their names in :class:`Structured`."""


def structured_of(body: Body, tools: Tools | None = None) -> Structured | None:
    """The required format of a request's output; None: free.

    Raises:
        ApiError: 400, no such format, or several.
        RequestError: an invalid grammar.
    """
    found: dict[str, Structured] = {}
    if body.response_format is not None:
        form = _response_format(body.response_format)
        found |= {"response_format": form} if form is not None else {}
    if body.structured_outputs is not None:
        found["structured_outputs"] = _structured_outputs(body.structured_outputs)
    if tools is not None and tools.form is not None:
        found["tool_choice"] = Structured(structural_tag=tools.form)
    if len(found) > 1:
        raise bad_field(next(iter(found)), "one form for the answer", " and ".join(found))
    return next(iter(found.values()), None)


def _response_format(given: object) -> Structured | None:
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(kind, str) or kind not in FORMATS:
        raise bad_field("response_format.type", "one of " + ", ".join(FORMATS), "something else")
    return FORMATS[kind](given)


def _schema(given: Mapping[str, Any]) -> Any:
    described = given.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if schema is None:
        raise bad_field("response_format.json_schema.schema", "a JSON schema", "nothing")
    return schema


def _structured_outputs(given: Mapping[str, Any]) -> Structured:
    # vLLM's clients send all fields, null where they are not used; json_object is a switch.
    named = {name: value for name, value in given.items() if value is not None and not (name == "json_object" and value is False)}
    if unknown := [name for name in named if name not in KINDS]:
        raise bad_field("structured_outputs", "one of " + ", ".join(KINDS), ", ".join(unknown))
    if len(named) != 1:
        found = ", ".join(named) or ", ".join(f"{name}: {json.dumps(value)}" for name, value in given.items()) or "an empty object"
        raise bad_field("structured_outputs", "exactly one of " + ", ".join(KINDS), found)
    [(name, value)] = named.items()
    try:
        return Structured(**{KINDS[name]: value})
    except RequestError as error:
        raise bad_field(f"structured_outputs.{name}", str(error.expected), error.found) from error

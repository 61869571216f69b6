"""The source that xgrammar compiles for a required format, with its schemas and expressions checked and written as xgrammar reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ..config.checks import brief
from ..errors import RequestError
from .patterns import written
from .schemas import check_schema
from .structured import KEY, Structured

OBJECT = '{"type": "object"}'


def prepared(structured: Structured) -> str:
    """The source of a grammar, in the notation of its kind.

    Raises:
        RequestError: a schema or an expression that can't be enforced; the key names the place.
    """
    kind = structured.kind
    key, given = f"{KEY}.{kind}", getattr(structured, kind)
    if kind == "json_object":
        return OBJECT
    if kind == "choice":
        return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in given)
    if kind == "regex":
        return written(key, given, json=False)
    if kind == "json_schema":
        return json.dumps(check_schema(key, json.loads(given)))
    return json.dumps(_in_tag(key, json.loads(given))) if kind == "structural_tag" else str(given)


def _ordered(key: str, given: Any) -> Any:
    if given is not False:
        raise RequestError(key, "false: xgrammar doesn't check required properties otherwise", brief(given))
    return given


_IN_TAGS: dict[str, Callable[[str, Any], Any]] = {
    "json_schema": check_schema,
    # Of tags in the older notation.
    "schema": check_schema,
    "any_order": _ordered,
    "pattern": lambda key, given: written(key, given, json=False) if isinstance(given, str) else given,
}
"""Keys of a structural tag, at any depth, whose values are checked and written."""


def _in_tag(key: str, part: Any) -> Any:
    if isinstance(part, list):
        return [_in_tag(f"{key}[{place}]", inner) for place, inner in enumerate(part)]
    if not isinstance(part, dict):
        return part
    return {name: _IN_TAGS.get(name, _in_tag)(f"{key}.{name}", inner) for name, inner in part.items()}

"""Structured output: JSON schema, regular expression, grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config.checks import brief, check_text, conform, typed
from ..errors import RequestError

KINDS = ("json_schema", "json_object", "regex", "grammar", "structural_tag", "choice")
KEY = "sampling.structured"
MAX_TEXT = 1 << 20
"""Characters of a grammar; far above real use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Structured:
    """A constraint on the whole output. Exactly one of the first six is set.

    Attributes:
        json_schema: a JSON schema, as an object or as JSON text; stored as text.
        json_object: any JSON object.
        regex: a regular expression that the whole output must match.
        grammar: a grammar in llama.cpp's GBNF notation; the start rule is ``root``.
        structural_tag: text that is free until a trigger and constrained after it, as an object or as JSON text; stored as text.
        choice: the output is one of these strings.
        any_whitespace: allow any whitespace between JSON tokens. False: only one space after ``:`` and ``,``.

    Raises:
        RequestError: none or several of the six, or a value of another type.
    """

    json_schema: str | dict[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    choice: Sequence[str] | None = None
    any_whitespace: bool = True

    def __post_init__(self) -> None:
        for name in ("json_object", "any_whitespace"):
            conform(f"{KEY}.{name}", getattr(self, name), bool, RequestError)
        given = self._given()
        if len(given) != 1:
            raise RequestError(KEY, "exactly one of " + ", ".join(KINDS), ", ".join(given) or "none of them")
        for name in ("regex", "grammar"):
            if (text := getattr(self, name)) is not None:
                _check_text(f"{KEY}.{name}", text)
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _as_json(f"{KEY}.json_schema", self.json_schema, (dict, bool)))
        if self.structural_tag is not None:
            object.__setattr__(self, "structural_tag", _as_json(f"{KEY}.structural_tag", self.structural_tag, (dict,)))
        if self.choice is not None:
            if isinstance(self.choice, str):
                raise RequestError(f"{KEY}.choice", "a list of texts", typed(self.choice))
            texts: tuple[str, ...] = conform(f"{KEY}.choice", self.choice, Sequence[str], RequestError)
            if not texts:
                raise RequestError(f"{KEY}.choice", "at least one text", "none")
            for place, text in enumerate(texts):
                _check_text(f"{KEY}.choice[{place}]", text)
            object.__setattr__(self, "choice", texts)

    @property
    def kind(self) -> str:
        """Which of the six is set."""
        return self._given()[0]

    @property
    def size(self) -> str:
        """Its kind and length, in words."""
        given = getattr(self, self.kind)
        return f"{sum(map(len, given)) if isinstance(given, str | tuple) else 0} characters"

    def _given(self) -> list[str]:
        return [name for name in KINDS if getattr(self, name) is not (False if name == "json_object" else None)]


def _check_text(key: str, text: str) -> None:
    if not 0 < len(check_text(key, text)) <= MAX_TEXT:
        raise RequestError(key, f"a text of 1 to {MAX_TEXT} characters", f"{len(text)} of them")


def _as_json(key: str, value: Any, kinds: tuple[type, ...]) -> str:
    """JSON text of an object that was given as one or as text; its keys stay in their order, which is the order of the output."""
    try:
        if isinstance(value, str):
            _check_text(key, value)
            parsed = json.loads(value)
        else:
            parsed, value = value, json.dumps(value, allow_nan=False)
    except RequestError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        found = f"{brief(value)}: {type(error).__name__}: {brief(str(error))}"
        raise RequestError(key, "JSON, as text or as an object", found) from error
    if not isinstance(parsed, kinds):
        raise RequestError(key, "a JSON object", typed(parsed))
    _check_text(key, value)
    return str(value)

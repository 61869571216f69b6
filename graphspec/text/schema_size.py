"""About how much work a grammar is, without compiling it."""

from __future__ import annotations

import json
from typing import Any

from .structured import Structured


def compile_steps(structured: Structured) -> int:
    """About the steps that compiling takes, as far as that is known without doing it.

    Every optional property of a JSON object may follow every other one before it, so an object takes the square of their number.
    """
    text = structured.json_schema or structured.structural_tag
    return _steps(json.loads(str(text))) if text is not None else 0


def _steps(document: Any) -> int:
    steps, left = 0, [document]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            properties, required = part.get("properties"), part.get("required")
            if isinstance(properties, dict):
                named = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
                steps += len(properties.keys() - named) ** 2
            left += part.values()
        elif isinstance(part, list):
            left += part
    return steps

"""JSON schemas as far as xgrammar enforces them: what it would overlook is refused, so that every complete output is valid.

Measured with xgrammar 0.2.8; ``tests/engine/test_schemas.py`` asks for each of these whether it is still so.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from ..checks import brief
from ..errors import RequestError

OVERLOOKED = frozenset(
    (
        "uniqueItems", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies", "not",
        "if", "then", "else", "$dynamicRef", "$recursiveRef",
    )
)  # fmt: skip
"""Keywords without any effect."""
TYPED = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), ("integer", "number")),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), ("string",)),
    **dict.fromkeys(("minItems", "maxItems", "prefixItems", "unevaluatedItems"), ("array",)),
    **dict.fromkeys(("minProperties", "maxProperties", "patternProperties", "propertyNames", "required"), ("object",)),
}
"""Keywords that have an effect next to one of these as ``type``."""
ALONE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
"""Keywords next to which other assertions have no effect."""
ASSERTIONS = frozenset((*TYPED, *ALONE, "type", "properties", "additionalProperties", "items", "unevaluatedProperties"))
TYPES = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
DEEPEST = 200
"""Levels of a schema, far above real use; xgrammar recurses into each."""


def check_schema(key: str, schema: Any, depth: int = 0) -> None:
    """Check a parsed schema and all schemas in it.

    Raises:
        RequestError: a keyword that has no effect where it stands, or a schema that is too deep; the key names the place.
    """
    if depth > DEEPEST:
        raise RequestError(key, f"a schema of at most {DEEPEST} levels", "a deeper one")
    if not isinstance(schema, dict):
        # What is no schema is refused by xgrammar.
        return
    for name in schema:
        if name in OVERLOOKED and not (name == "uniqueItems" and schema[name] is False):
            raise RequestError(f"{key}.{name}", "keywords that xgrammar enforces", name)
    kind = schema.get("type")
    asserted = ASSERTIONS.intersection(schema)
    for name in sorted(asserted & TYPED.keys()):
        if kind not in TYPED[name]:
            raise RequestError(f"{key}.{name}", f"type {' or '.join(TYPED[name])} next to it", brief(kind))
    _check_alone(key, schema, asserted)
    if "pattern" in asserted and (others := asserted & {"minLength", "maxLength", "format"}):
        raise RequestError(f"{key}.pattern", "no other limit of a text next to it", ", ".join(sorted(others)))
    if "format" in asserted and (others := asserted & {"minLength", "maxLength"}):
        raise RequestError(f"{key}.format", "no length next to it", ", ".join(sorted(others)))
    properties = schema.get("properties")
    if isinstance(schema.get("required"), list):
        unknown = [name for name in schema["required"] if not isinstance(properties, dict) or name not in properties]
        if unknown:
            raise RequestError(f"{key}.required", "names that are in properties", brief(unknown))
    for place, inner in _inner(schema):
        check_schema(f"{key}.{place}", inner, depth + 1)


def _check_alone(key: str, schema: dict[str, Any], asserted: frozenset[str]) -> None:
    for name in ALONE:
        if name not in asserted:
            continue
        others = asserted - {name}
        if name in ("enum", "const"):
            values = schema[name] if name == "enum" and isinstance(schema[name], list) else [schema[name]]
            if "type" in others and all(_is(value, schema["type"]) for value in values):
                others -= {"type"}
        if name == "allOf" and isinstance(schema[name], list) and len(schema[name]) > 1:
            raise RequestError(f"{key}.allOf", "one schema; xgrammar does not intersect several", f"{len(schema[name])} of them")
        if others:
            raise RequestError(f"{key}.{name}", "no other assertion next to it", ", ".join(sorted(others)))
        if name == "oneOf" and isinstance(schema[name], list):
            for (first, one), (second, other) in combinations(enumerate(schema[name]), 2):
                if not _disjoint(one, other):
                    expected = "alternatives of different types, or a required property that differs by const or enum (else write anyOf)"
                    raise RequestError(f"{key}.oneOf", expected, f"alternatives {first} and {second}")


def _is(value: Any, kind: Any) -> bool:
    """A JSON value is of a type, or of one of several."""
    if isinstance(kind, list):
        return any(_is(value, each) for each in kind)
    if kind in ("integer", "number"):
        return isinstance(value, int if kind == "integer" else int | float) and not isinstance(value, bool)
    return kind in TYPES and isinstance(value, TYPES[kind])


def _disjoint(one: Any, other: Any) -> bool:
    """No value fits both, as far as that is easy to see."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return False
    values = [_values(schema) for schema in (one, other)]
    if values[0] is not None and values[1] is not None:
        return not any(value in values[1] for value in values[0])
    kinds = [{"number"} if schema.get("type") == "integer" else {str(schema.get("type"))} for schema in (one, other)]
    if all(isinstance(schema.get("type"), str) for schema in (one, other)) and not kinds[0] & kinds[1]:
        return True
    shared = [name for name in one.get("required") or () if name in (other.get("required") or ())]
    properties = [schema.get("properties") or {} for schema in (one, other)]
    for name in shared:
        found = [_values(each.get(name)) for each in properties]
        if found[0] is not None and found[1] is not None and not any(value in found[1] for value in found[0]):
            return True
    return False


def _values(schema: Any) -> list[Any] | None:
    """The only values that fit; None: they are not listed."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    return list(schema["enum"]) if isinstance(schema.get("enum"), list) else None


def _inner(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Schemas inside a schema, with their places."""
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(schema.get(name), dict):
            yield from ((f"{name}.{brief(entry)}", inner) for entry, inner in schema[name].items())
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(schema.get(name), list):
            yield from ((f"{name}[{place}]", inner) for place, inner in enumerate(schema[name]))
    for name in ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties"):
        if name in schema:
            yield name, schema[name]

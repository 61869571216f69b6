"""JSON schemas as far as xgrammar enforces them: what it would overlook is refused, so that every complete output is valid.

Measured with xgrammar 0.2.8; ``tests/engine/test_schemas.py`` asks for each of these whether it is still so.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

from ..config.checks import brief
from ..errors import RequestError
from .patterns import first_match, written
from .references import References, is_resource

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
DEFINITIONS = ("$defs", "definitions")
NAMED = ("properties", "patternProperties")
"""Keywords with a schema for each name, or each expression."""
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
TYPES = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
DEEPEST = 200
"""Levels of a schema, far above real use; xgrammar recurses into each."""


def check_schema(key: str, schema: Any) -> Any:
    """Check a parsed schema and every part of it that counts; returns it as xgrammar has to get it.

    Its references are resolved, and its expressions are written as xgrammar reads them (:mod:`graphspec.text.patterns`).

    Raises:
        RequestError: a keyword that has no effect where it stands, a reference to nothing, an expression that can't be enforced, or one
            that is too deep; the key names the place.
    """
    if not isinstance(schema, dict):
        return schema
    checker = _Checker(schema)
    found = checker.written(key, schema)
    defined: dict[str, Any] = {}
    # The list grows while its parts are written.
    for name, part in checker.references.targets:
        defined[name] = checker.written(f"{key}.$defs.{name}", part)
    return {**found, "$defs": defined} if defined else found


def object_schema(key: str, schema: Any) -> dict[str, Any]:
    """The objects that fit a schema, as a schema: that of a function's arguments, for example.

    Raises:
        RequestError: it allows no object.
    """
    found = _objects(key, schema, References(schema), 0)
    given = schema if isinstance(schema, dict) else {}
    # References still lead to the parts of the whole schema.
    rest = {name: value for name, value in given.items() if name in DEFINITIONS or name not in (*found, "$ref")}
    return found | rest


def _objects(key: str, schema: Any, references: References, depth: int) -> dict[str, Any]:
    if schema is True:
        return {"type": "object"}
    kind = schema.get("type", "object") if isinstance(schema, dict) and depth <= DEEPEST else None
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise RequestError(key, "a schema of objects", brief(schema))
    if "$ref" in schema:
        if others := ASSERTIONS.intersection(schema) - {"$ref"}:
            raise RequestError(f"{key}.$ref", "no other assertion next to it", ", ".join(sorted(others)))
        return _objects(key, references.target(f"{key}.$ref", schema["$ref"]), references, depth + 1)
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(name), list):
            found = []
            for place, part in enumerate(parts):
                try:
                    found.append(_objects(f"{key}.{name}[{place}]", part, references, depth + 1))
                except RequestError:
                    # An alternative without objects goes; all parts of allOf have to have some.
                    if name == "allOf" or (not found and place == len(parts) - 1):
                        raise
            return {**schema, name: found}
    for name, values in (("const", [schema.get("const")]), ("enum", schema.get("enum"))):
        if name in schema and isinstance(values, list):
            if not (left := [value for value in values if isinstance(value, dict)]):
                raise RequestError(f"{key}.{name}", "an object", brief(schema[name]))
            return {**schema, **({"enum": left} if name == "enum" else {})}
    return {**schema, "type": "object"}


def _check_values(key: str, schema: dict[str, Any]) -> None:
    """Refuse limits of a text that exclude each other, and keys that are required and have no schema."""
    asserted = ASSERTIONS.intersection(schema)
    if "pattern" in asserted and (others := asserted & {"minLength", "maxLength", "format"}):
        raise RequestError(f"{key}.pattern", "no other limit of a text next to it", ", ".join(sorted(others)))
    if "format" in asserted and (others := asserted & {"minLength", "maxLength"}):
        raise RequestError(f"{key}.format", "no length next to it", ", ".join(sorted(others)))
    properties = schema.get("properties")
    if isinstance(schema.get("required"), list):
        unknown = [name for name in schema["required"] if not isinstance(properties, dict) or name not in properties]
        if unknown:
            raise RequestError(f"{key}.required", "names that are in properties", brief(unknown))


class _Checker:
    """Checks and writes the parts of one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self.references = References(root)

    def written(self, key: str, schema: Any, depth: int = 0) -> Any:
        """A part of the schema, checked, as xgrammar has to get it."""
        if depth > DEEPEST:
            raise RequestError(key, f"a schema of at most {DEEPEST} levels", "a deeper one")
        if not isinstance(schema, dict):
            # What is no schema is refused by xgrammar.
            return schema
        self._check_keywords(key, schema)
        if "$ref" in schema:
            return self.references.spelled(f"{key}.$ref", schema["$ref"])
        _check_values(key, schema)
        _check_keys(key, schema)
        found = {name: value for name, value in schema.items() if name not in DEFINITIONS}
        if isinstance(pattern := schema.get("pattern"), str):
            found["pattern"] = written(f"{key}.pattern", pattern, json=True)
        for name in NAMED:
            if isinstance(schema.get(name), dict):
                found[name] = {
                    entry if name == "properties" else written(f"{key}.{name}", entry, json=True): self.written(
                        f"{key}.{name}.{brief(entry)}", inner, depth + 1
                    )
                    for entry, inner in schema[name].items()
                }
        for name in LISTED:
            if isinstance(schema.get(name), list):
                found[name] = [self.written(f"{key}.{name}[{place}]", inner, depth + 1) for place, inner in enumerate(schema[name])]
        for name in SINGLE:
            if name in schema:
                found[name] = self.written(f"{key}.{name}", schema[name], depth + 1)
        return found

    def _check_keywords(self, key: str, schema: dict[str, Any]) -> None:
        """Refuse keywords that xgrammar overlooks, or reads as another schema than theirs because of what stands next to them."""
        for name, value in schema.items():
            if name in OVERLOOKED and not (name == "uniqueItems" and value is False):
                raise RequestError(f"{key}.{name}", "keywords that xgrammar enforces", name)
        kind = schema.get("type")
        asserted = ASSERTIONS.intersection(schema)
        for name in sorted(asserted & TYPED.keys()):
            if kind not in TYPED[name]:
                raise RequestError(f"{key}.{name}", f"type {' or '.join(TYPED[name])} next to it", brief(kind))
        self._check_alone(key, schema, asserted)
        if schema is not self._root and is_resource(schema) and "$ref" in str(schema):
            raise RequestError(f"{key}.$id", "no name of its own for a schema with references", brief(schema["$id"]))

    def _check_alone(self, key: str, schema: dict[str, Any], asserted: frozenset[str]) -> None:
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
                found = [self._resolved(f"{key}.oneOf[{place}]", each) for place, each in enumerate(schema[name])]
                for (first, one), (second, other) in combinations(enumerate(found), 2):
                    if not _disjoint(one, other):
                        expected = (
                            "alternatives of different types, or a required property that differs by const or enum (else write anyOf)"
                        )
                        raise RequestError(f"{key}.oneOf", expected, f"alternatives {first} and {second}")

    def _resolved(self, key: str, schema: Any) -> Any:
        return self.references.target(f"{key}.$ref", schema["$ref"]) if isinstance(schema, dict) and "$ref" in schema else schema


def _check_keys(key: str, schema: dict[str, Any]) -> None:
    """Check that no key of an object falls under two rules; xgrammar would apply one of them."""
    patterns = schema.get("patternProperties")
    if not isinstance(patterns, dict) or not patterns:
        return
    where = f"{key}.patternProperties"
    if len(patterns) > 1:
        raise RequestError(where, "one expression, as a key may match several", f"{len(patterns)} of them")
    if schema.get("additionalProperties", False) is not False or schema.get("unevaluatedProperties", False) is not False:
        raise RequestError(where, "additionalProperties false next to it, as other keys may match it", "another value")
    for name in schema.get("properties") or ():
        if (matched := first_match(list(patterns), name)) is not None:
            raise RequestError(where, "no property that matches it", f"{brief(name)}, which matches {brief(matched)}")


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

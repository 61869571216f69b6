"""References inside schemas, grammars that have no text, and one check for every way in."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from graphspec.api.grammar import compile_grammar
from graphspec.errors import RequestError
from graphspec.text.structured import Structured
from tests.engine.test_patterns import compiler, walk

if TYPE_CHECKING:
    import xgrammar

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
FLAG = {"type": "boolean"}


def compiled(**given: Any) -> xgrammar.CompiledGrammar:
    return compile_grammar(compiler(), Structured(any_whitespace=False, **given))


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": sorted(properties), "additionalProperties": False}


REFERENCES: list[dict[str, Any]] = [
    {"$ref": "#/$defs/a", "$defs": {"a": DIGIT}},
    {"$ref": "#/definitions/a", "definitions": {"a": {"type": "array", "items": FLAG, "maxItems": 2}}},
    {"$ref": "#foo", "$defs": {"a": {"$anchor": "foo", **DIGIT}}},
    {"$ref": "#foo", "definitions": {"a": {"$id": "#foo", **DIGIT}}},
    {"$id": "http://x/y", "$ref": "http://x/y#/$defs/a", "$defs": {"a": DIGIT}},
    {**obj(a={"$ref": "#/properties/b"}, b=DIGIT)},
    {**obj(a={"$ref": "#/$defs/a~1b"}), "$defs": {"a/b": FLAG}},
    {**obj(a={"$ref": "#/$defs/a%20b"}), "$defs": {"a b": FLAG}},
    {**obj(a={"$ref": "#/$defs/0/anyOf/1"}), "$defs": {"0": {"anyOf": [FLAG, DIGIT]}}},
    {**obj(a={"$ref": "#/$defs/x"}), "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/z"}, "z": DIGIT}},
    {**obj(a=DIGIT, next={"anyOf": [{"type": "null"}, {"$ref": "#"}]})},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}}},
]


@pytest.mark.parametrize("schema", REFERENCES, ids=lambda schema: json.dumps(schema)[:60])
def test_outputs_of_schemas_with_references_are_valid(schema: dict[str, Any]) -> None:
    grammar, rng = compiled(json_schema=schema), random.Random(2)
    # An anchor named by $id is of draft 6, as jsonschema reads it.
    kind = jsonschema.Draft6Validator if "#foo" in json.dumps(schema.get("definitions", {})) else jsonschema.Draft202012Validator
    found = [text for _ in range(15) if (text := walk(grammar, rng, 80)) is not None]
    assert found
    for text in found:
        kind(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"$ref": "http://x/y"}, r"\$ref: expected a reference to a part of the same schema"),
        (obj(a={"$ref": "item.json"}), r"properties\.'a'\.\$ref: expected a reference to a part"),
        ({"$ref": "#/$defs/b", "$defs": {"a": DIGIT}}, "which leads nowhere"),
        ({"$ref": "#nobody"}, "expected a reference to a part of the same schema"),
        ({"$ref": 3}, "expected a reference to a part of the same schema"),
        ({"$ref": "#"}, "which leads back to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "which leads back to itself"),
        (obj(next={"$ref": "#"}), "a text for each of its parts"),
        (
            {**obj(a={"$ref": "#/$defs/a"}), "$defs": {"a": obj(b={"$ref": "#/$defs/b"}), "b": obj(a={"$ref": "#/$defs/a"})}},
            "a text for each",
        ),
        ({**obj(a={"$ref": "#/$defs/a"}), "$defs": {"a": {"type": "integer", "not": {"const": 4}}}}, "keywords that xgrammar enforces"),
        ({"$dynamicRef": "#a"}, "keywords that xgrammar enforces"),
    ],
)
def test_a_reference_that_leads_nowhere_is_refused(schema: dict[str, Any], part: str) -> None:
    with pytest.raises(RequestError, match=part):
        compiled(json_schema=schema)


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= a\na ::= b\nb ::= a",
        "root ::= a",
        "root ::= root",
        'root ::= "x" root',
        "a ::= b",
        "root ::= ",
        'root ::= "a" |',
        "root ::= (",
    ],
)
def test_a_grammar_without_a_text_is_one_error(grammar: str) -> None:
    """Some of them are texts to xgrammar: an empty one, at least."""
    try:
        found = compiled(grammar=grammar)
    except RequestError as error:
        assert str(error).startswith("sampling.structured.grammar: expected a ")
    else:
        assert all(walk(found, random.Random(seed)) in ("", "a") for seed in range(8))


def test_a_tag_in_any_order_is_refused() -> None:
    """With it xgrammar takes an object without its required properties."""
    schema = {"type": "object", "properties": {"a": DIGIT, "b": DIGIT}, "required": ["a"]}
    content = {"type": "json_schema", "json_schema": schema, "any_order": True}
    with pytest.raises(RequestError, match=r"structural_tag\.format\.any_order: expected false"):
        compiled(structural_tag={"type": "structural_tag", "format": content})


@pytest.mark.parametrize("keyword", [{"not": {"const": 4}}, {"uniqueItems": True}, {"$ref": "other.json"}, {"pattern": 'a"b'}])
def test_every_way_in_has_the_same_check(keyword: dict[str, Any]) -> None:
    kind = "array" if "uniqueItems" in keyword else "string"
    schema = keyword if "$ref" in keyword else {"type": kind, **keyword}
    [name] = keyword
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</a>"}
    ways: list[dict[str, Any]] = [
        {"json_schema": schema},
        {"json_schema": obj(inner=schema)},
        {"structural_tag": {"type": "structural_tag", "format": tag}},
        {"structural_tag": {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<a"], "tags": [tag]}}},
        {
            "structural_tag": {
                "type": "structural_tag",
                "structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}],
                "triggers": ["<a"],
            }
        },
    ]
    for given in ways:
        with pytest.raises(RequestError, match=name.replace("$", r"\$")):
            compiled(**given)

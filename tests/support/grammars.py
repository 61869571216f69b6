"""Random grammars of short texts, and a check of texts against them by json, jsonschema and re, not by xgrammar."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING, Any

import jsonschema

from graphspec.text.structured import Structured

if TYPE_CHECKING:
    from pathlib import Path

CHARACTERS = "".join(map(chr, range(97, 123))) + "0123456789" + ' "{}[]:,-()_.'
PAIRS = (("a", "b"), ("c", "d"), ("n", "a"), ("m", "e"), ("na", "me"), ("1", "2"), ('"', ":"), ("{", '"'), ("x", "x"))
WORDS = ("name", "age", "x", "id", "def", "self", "value", "a b", "é", "tab\t")


def random_regex(rng: random.Random, depth: int = 2) -> str:
    """Bounded: no star, no plus."""
    kind = rng.randrange(6 if depth else 3)
    if kind == 0:
        return re.escape(rng.choice(("def", "self.", "x = ", "(", "return", "#")))
    if kind == 1:
        return rng.choice(("[a-f]", r"[^a-z\n]", "[0-9]", r"\d", r"\w", "[_A-Z]"))
    if kind == 2:
        return rng.choice("abcxyz") + rng.choice(("", "?", "{2}", "{1,3}"))
    if kind == 3:
        return f"({random_regex(rng, depth - 1)}|{random_regex(rng, depth - 1)})"
    if kind == 4:
        return f"({random_regex(rng, depth - 1)}){rng.choice(('?', '{2}', '{0,2}'))}"
    return random_regex(rng, depth - 1) + random_regex(rng, depth - 1)


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Bounded lengths, numbers and items."""
    kind = rng.randrange(10 if depth else 6)
    if kind == 0:
        minimum = rng.randrange(-20, 20)
        return {"type": "integer", "minimum": minimum, "maximum": minimum + rng.randrange(40)}
    if kind == 1:
        return {"type": "string", "minLength": rng.randrange(2), "maxLength": rng.randrange(1, 6)}
    if kind == 2:
        return {"enum": rng.sample([1, "two", None, True, 2.5, "é", [1]], rng.randrange(1, 4))}
    if kind == 3:
        return {"type": rng.choice(("boolean", "null"))}
    if kind == 4:
        return {"const": rng.choice(["fixed", 17, {"a": [1, {"b": "c"}]}])}
    if kind == 5:
        return {"type": "string", **rng.choice(({"format": "uuid"}, {"pattern": "^[a-c]{1,4}$"}))}
    if kind == 6:
        minimum = rng.randrange(2)
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": minimum, "maxItems": minimum + rng.randrange(2)}
    if kind == 7:
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]}
    names = rng.sample(WORDS, rng.randrange(1, 4))
    required = [name for name in names if rng.random() < 0.6]
    properties = {name: random_schema(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def random_structured(rng: random.Random) -> Structured:
    """A grammar of a random kind."""
    kind = rng.randrange(5)
    if kind < 2:
        return Structured(regex=random_regex(rng))
    if kind < 4:
        return Structured(json_schema=random_schema(rng), any_whitespace=False)
    return Structured(choice=rng.sample(WORDS, rng.randrange(1, 4)))


def parses(structured: Structured, text: str) -> bool:
    """Whether the grammar accepts a whole text."""
    if structured.choice is not None:
        return text in structured.choice
    if structured.regex is not None:
        return re.fullmatch(structured.regex, text) is not None
    try:
        value = json.loads(text)
        jsonschema.validate(value, json.loads(str(structured.json_schema)), format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def add_characters(folder: Path, size: int, end: int) -> None:
    """A byte-level tokenizer of single characters and a few longer tokens, for a checkpoint without one.

    Args:
        folder: of the checkpoint.
        size: of its vocabulary, at least room for all of them.
        end: id of the end-of-text token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def spelled(text: str) -> str:
        return text.replace(" ", "\u0120")

    texts = iter([*map(spelled, CHARACTERS), *(first + second for first, second in PAIRS)])
    special = {0: "<unk>", 1: "<s>", end: "</s>"}
    words = {special.get(token) or next(texts, f"<{token}>"): token for token in range(size)}
    assert next(texts, None) is None, f"{size} ids are too few"
    model = Tokenizer(models.BPE(words, list(PAIRS)))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", bos_token="<s>", eos_token="</s>").save_pretrained(folder)

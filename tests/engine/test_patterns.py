"""Regular expressions of schemas: whatever a compiled one lets through is JSON, and the string in it matches by Python."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import pytest
import torch
import xgrammar

from graphspec.errors import RequestError
from graphspec.text.schemas import check_schema
from graphspec.text.structured import Structured
from graphspec.text.structured_source import prepared

END = 0
TEXTS = ["", *(chr(code) for code in range(1, 127)), "é", "ß", "\u00a0", "\u2028", "\u017f", "\u212a", "中", "😀"]
"""Tokens of one character, control characters among them, and an end."""
ATOMS = (
    "a", "b", "Z", "7", "_", "-", " ", r"\.", r"\-", r"\/", ".", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "[a-f]", "[^a-z]",
    r"[^\d]", r"[\w.-]", r'["\\]', r'[^"]', '"', r"\\", r"\n", r"\t", r"[\x00-\x40]", r"\u00e9", "[a-]", r"[\]x]", "é", "😀", "[^😀]",
)  # fmt: skip
COUNTS = ("", "", "", "?", "*", "+", "{2}", "{0,2}", "{1,}", "{3}")


@cache
def compiler() -> xgrammar.GrammarCompiler:
    info = xgrammar.TokenizerInfo(TEXTS, xgrammar.VocabType.RAW, vocab_size=len(TEXTS), stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def random_pattern(rng: random.Random, depth: int = 2) -> str:
    kind = rng.randrange(5 if depth else 2)
    if kind < 2:
        return rng.choice(ATOMS) + rng.choice(COUNTS)
    if kind == 2:
        return f"{rng.choice(('(', '(?:', '(?P<n>' if depth == 2 else '('))}{random_pattern(rng, depth - 1)}){rng.choice(COUNTS)}"
    if kind == 3:
        return f"({random_pattern(rng, depth - 1)}|{random_pattern(rng, depth - 1)})"
    return random_pattern(rng, depth - 1) + random_pattern(rng, depth - 1)


def walk(grammar: xgrammar.CompiledGrammar, rng: random.Random, maximum: int = 40) -> str | None:
    """A random output that is complete; None: it was not, after so many tokens."""
    matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=[END])
    mask, text = xgrammar.allocate_token_bitmask(1, len(TEXTS)), ""
    for _ in range(maximum):
        matcher.fill_next_token_bitmask(mask)
        bits = [token for token in range(len(TEXTS)) if int(mask[0, token // 32]) & 0xFFFFFFFF & 1 << token % 32]
        assert bits, "an output that can't be continued or ended"
        # Ends are preferred, or a star goes on for long.
        token = END if END in bits and rng.random() < 0.5 else rng.choice(bits)
        if token == END:
            return text
        assert matcher.accept_token(token)
        text += TEXTS[token]
    return None


def compiled(schema: dict[str, Any]) -> xgrammar.CompiledGrammar:
    return compiler().compile_json_schema(prepared(Structured(json_schema=schema)), any_whitespace=False)


def test_every_complete_output_is_json_whose_string_matches() -> None:
    rng = random.Random(5)
    refused = complete = 0
    for _ in range(200):
        pattern = random_pattern(rng)
        try:
            re.compile(pattern)
        except re.error:
            continue
        try:
            grammar = compiled({"type": "string", "pattern": f"^({pattern})$"})
        except RequestError as error:
            assert "sampling.structured.json_schema.pattern" in str(error)
            refused += 1
            continue
        for _ in range(3):
            if (text := walk(grammar, rng)) is not None:
                complete += 1
                assert re.fullmatch(pattern, json.loads(text)), (pattern, text)
    assert complete > 200 and refused < 60, (complete, refused)


def test_xgrammar_alone_lets_text_through_that_is_no_json() -> None:
    grammar = compiler().compile_json_schema(json.dumps({"type": "string", "pattern": '^a"b$'}), any_whitespace=False)
    assert walk(grammar, random.Random(0)) == '"a"b"'
    assert walk(compiled({"type": "string", "pattern": '^a("|c)b$'}), random.Random(0)) == '"acb"'


@pytest.mark.parametrize("pattern", ['^a"b$', r"^a\nb$", r"^\\d$", r"^\x07$", r"^[\x00-\x1f]+$"])
def test_a_character_that_json_escapes_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(RequestError, match=r"key\.pattern: expected characters that a JSON string holds without an escape, found"):
        check_schema("key", {"type": "string", "pattern": pattern})


@pytest.mark.parametrize(
    ("pattern", "part"),
    [
        ("(?=a)b", "groups that only match"),
        ("(?<!a)b", "groups that only match"),
        (r"(a)\1", "escapes that Python and ECMA 262 share"),
        (r"\bword\b", "escapes that Python and ECMA 262 share"),
        ("a^b", r"\^ at the beginning only"),
        ("a$b", r"\$ at the end only"),
        ("a**", "one repetition of a part"),
        ("a{3,1}", "repetitions in ascending order"),
        ("[z-a]", "ranges in ascending order"),
        ("[]", "a class of at least one character"),
        ("(a", "a closing parenthesis"),
        ("a)", "an opening parenthesis"),
        ("*a", "something to repeat"),
        ("(((a{99}){99}){99})", "repetitions written out"),
        ("(" * 60 + "a" + ")" * 60, "groups in groups"),
        (r"\u12", "hexadecimal digits"),
        ("[a", "a closing bracket"),
    ],
)
def test_what_can_not_be_enforced_is_refused(pattern: str, part: str) -> None:
    for given in ({"regex": pattern}, {"json_schema": {"type": "string", "pattern": pattern}}):
        with pytest.raises(RequestError, match=part):
            prepared(Structured(**given))


def test_expressions_outside_of_json_keep_quotes_and_line_breaks() -> None:
    for pattern, text in ((r'"a\n\\b"', '"a\n\\b"'), ("(?i)ab[c-e]", "aBD"), ("(?s)a.b", "a\nb"), (r"\d+(?:\.\d+)?", "12.5")):
        matcher = xgrammar.GrammarMatcher(compiler().compile_regex(prepared(Structured(regex=pattern))), override_stop_tokens=[END])
        assert matcher.accept_string(text) and matcher.is_completed(), pattern


def test_keys_by_expression_are_json_too() -> None:
    schema = {
        "type": "object",
        "patternProperties": {"^[^x]{1,3}$": {"type": "integer", "minimum": 0, "maximum": 9}},
        "additionalProperties": False,
    }
    grammar, rng = compiled(schema), random.Random(1)
    texts = [text for _ in range(40) if (text := walk(grammar, rng)) is not None]
    assert len(texts) > 20
    for text in texts:
        assert all(re.fullmatch("[^x]{1,3}", name) for name in json.loads(text)), text


def test_masks_have_no_dead_end() -> None:
    """The test's own reading of bit masks, against xgrammar's."""
    matcher = xgrammar.GrammarMatcher(compiler().compile_regex("a"), override_stop_tokens=[END])
    mask = xgrammar.allocate_token_bitmask(1, len(TEXTS))
    matcher.fill_next_token_bitmask(mask)
    logits = torch.zeros(1, len(TEXTS))
    xgrammar.apply_token_bitmask_inplace(logits, mask)
    assert [TEXTS[token] for token in logits.isfinite().nonzero()[:, 1]] == ["a"]

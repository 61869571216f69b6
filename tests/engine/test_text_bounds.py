"""Texts that are refused by their length: the bound holds for every text, and is only stated where it does."""

from __future__ import annotations

import json
import re
import unicodedata
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from graphspec.api.prompts import make_requests
from graphspec.errors import RequestError
from graphspec.facts.folders import DEMO, model_folder
from graphspec.text.bounds import NFC_SHRINKS, check_fits, fewest_tokens, longest_token
from tests.support.plans import plan

FOLDER = model_folder(DEMO, None)
DOCUMENT: dict[str, Any] = json.loads((FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
FALLBACK = {
    "model": {"type": "BPE", "byte_fallback": True, "vocab": {f"<0x{byte:02X}>": byte for byte in range(256)}, "merges": []},
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
    "pre_tokenizer": None,
    "added_tokens": [],
}


def changed(**steps: Any) -> dict[str, Any]:
    return deepcopy(DOCUMENT) | steps


BOUNDED = [
    (Tokenizer.from_str(json.dumps({"version": "1.0"} | document)), longest_token(document))
    for document in (DOCUMENT, changed(normalizer={"type": "NFC"}), FALLBACK)
]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_no_text_has_fewer_tokens(text: str) -> None:
    for tokenizer, longest in BOUNDED:
        assert longest is not None
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) * longest >= len(text.encode())


def test_it_is_reached() -> None:
    """A text of the longest token alone has as few tokens as the bound says."""
    tokenizer, longest = Tokenizer.from_str(json.dumps(DOCUMENT)), longest_token(DOCUMENT)
    token = max(DOCUMENT["model"]["vocab"], key=len)
    text = tokenizer.decoder.decode([token])
    assert len(text.encode()) == longest and fewest_tokens(text, FOLDER) == len(tokenizer.encode(text).ids) == 1


def test_a_form_of_unicode_shrinks_no_further() -> None:
    """Every character's longest spelling: of each component, the longest character that is equal to it."""
    spelling: dict[str, int] = {}
    # No character above these has another spelling.
    characters = [chr(code) for code in range(0x30000) if not 0xD800 <= code < 0xE000]
    for character in characters:
        parts = unicodedata.normalize("NFD", character)
        if len(parts) == 1:
            spelling[parts] = max(spelling.get(parts, 0), len(character.encode()))
    maximum = max(
        sum(spelling[part] for part in unicodedata.normalize("NFD", character)) / len(unicodedata.normalize("NFC", character).encode())
        for character in characters
    )
    assert maximum <= NFC_SHRINKS


@pytest.mark.parametrize(
    "document",
    [
        changed(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
        changed(normalizer={"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}),
        changed(normalizer={"type": "Replace", "pattern": {"String": "ab"}, "content": ""}),
        changed(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, DOCUMENT["pre_tokenizer"]]}),
        changed(pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}),
        changed(added_tokens=[{**DOCUMENT["added_tokens"][0], "lstrip": True}]),
        changed(truncation={"max_length": 8, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}),
        changed(model={"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}),
        changed(model={**DOCUMENT["model"], "vocab": {"a": 0}}),
        {**FALLBACK, "model": {**FALLBACK["model"], "byte_fallback": False}},
    ],
    ids=["strip", "regex", "removing", "split", "removed", "lstrip", "cut", "words", "bytes missing", "no fallback"],
)
def test_tokenizers_of_which_nothing_is_known(document: dict[str, Any]) -> None:
    assert longest_token(document) is None


def test_a_file_that_is_missing_or_damaged(tmp_path: Path) -> None:
    assert fewest_tokens("x" * 10**6, tmp_path) == 0
    for content in ("{", "[]", '{"model": 1}', '{"model": {"type": "BPE", "vocab": 3}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        assert fewest_tokens("x" * 10**6, tmp_path) == 0
    (tmp_path / "tokenizer.json").write_text(json.dumps(DOCUMENT))
    assert fewest_tokens("x" * 10**6, tmp_path) > 0, "a file that was changed is read again"


def test_a_text_that_can_not_fit_is_not_encoded() -> None:
    made = plan("none")
    longest = longest_token(DOCUMENT)
    assert longest is not None

    class Tokens:
        folder = FOLDER

    texts: list[str] = []

    def encode(text: Any) -> list[int]:
        texts.append(text)
        return [5]

    fits, too_long = "x" * longest * (made.max_context - 1), "x" * (longest * (made.max_context - 1) + 1)
    [served, refused] = make_requests([fits, too_long], None, made, encode, tokenizer=Tokens)  # type: ignore[arg-type]
    assert texts == [fits] and served.error is None
    assert isinstance(refused.refusal, RequestError) and refused.error == str(refused.refusal)
    message = f"prompt: expected at most {made.max_context - 1} tokens (max_context {made.max_context}, one of them new), found at least"
    assert refused.error.startswith(message)
    with pytest.raises(RequestError, match=re.escape(message)):
        check_fits("prompt", too_long, FOLDER, made.max_context)

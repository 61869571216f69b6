"""Tokens in responses: none is lost, and their bytes are those of the text."""

from __future__ import annotations

import pytest

from graphspec.engine.request import SamplingParams, TokenLogprob
from graphspec.serve.tokens import CompletionLogprobs, chat_logprobs, key_of
from graphspec.text.tokenizer import Tokenizer
from tests.support.tokenizer_forms import write_form


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_form(tmp_path_factory.mktemp("llama2"), "SentencePiece, Llama 2"))


def ids(tokenizer: Tokenizer, *names: str) -> list[int]:
    return [tokenizer.library.token_to_id(name) for name in names]


NAMES = ("\u2581Paris", "Paris", "P", "<0x50>", "<0xF0>", "<0x9F>", "</s>")
KEYS = (" Paris", "Paris", "P", "token_id:{}", "bytes:\\xf0", "bytes:\\x9f", "</s>")


def test_every_alternative_of_a_completion_has_a_key(tokenizer: Tokenizer) -> None:
    tokens = ids(tokenizer, *NAMES)
    top = {token: -float(place) for place, token in enumerate(tokens, 1)}
    writer = CompletionLogprobs(tokenizer, SamplingParams(), tokenizer.words("the"))
    found = writer.of(tokens[:1], [TokenLogprob(tokens[0], -1.0, top)])
    keys = [key.format(tokens[3]) for key in KEYS]
    assert found["top_logprobs"] == [dict(zip(keys, top.values(), strict=True))] and found["tokens"] == [" Paris"]
    # The token that was taken keeps its text, whichever is likelier; it is there too if it is none of the most likely.
    found = writer.of([tokens[3]], [TokenLogprob(tokens[3], -4.0, top)])
    assert found["tokens"] == ["P"] and found["top_logprobs"][0]["P"] == -4.0 and found["top_logprobs"][0][f"token_id:{tokens[2]}"] == -3.0
    found = writer.of([tokens[3]], [TokenLogprob(tokens[3], -9.0, {tokens[2]: -1.0})])
    assert found["top_logprobs"] == [{f"token_id:{tokens[2]}": -1.0, "P": -9.0}]


def test_offsets_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    """With an echo and without, over a character of four tokens."""
    prompt = tokenizer.words("the")
    output = [*ids(tokenizer, "\u2581Paris", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "P")]
    entries: list[TokenLogprob | None] = [TokenLogprob(token, -1.0, {}) for token in output]
    found = CompletionLogprobs(tokenizer, SamplingParams(), prompt).of(output, entries)
    assert found["text_offset"] == [0, 6, 6, 6, 6, 7]
    assert found["tokens"] == [" Paris", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82", "P"]
    echo = CompletionLogprobs(tokenizer, SamplingParams(echo=True), prompt).of([*prompt, *output], [None, *entries])
    assert echo["text_offset"] == [0, 3, 9, 9, 9, 9, 10] and echo["tokens"][:2] == ["the", " Paris"]


def test_bytes_of_a_chat_are_those_of_the_tokens(tokenizer: Tokenizer) -> None:
    tokens = ids(tokenizer, "\u2581Paris", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>")
    top = dict.fromkeys(tokens, -1.0)
    content = chat_logprobs([TokenLogprob(token, -1.0, top) for token in tokens], tokenizer, 5)["content"]
    assert [entry["token"] for entry in content] == [" Paris", *["\ufffd"] * 4]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == " Paris\U0001f642"
    assert [entry["bytes"] for entry in content[0]["top_logprobs"]] == [entry["bytes"] for entry in content]


def test_keys_of_bytes_say_all_of_them() -> None:
    assert [key_of(data) for data in (b" a", b"", b" \xf0\x9f", b"\\\xff", "é".encode())] == [
        " a", "", "bytes: \\xf0\\x9f", "bytes:\\x5c\\xff", "é",
    ]  # fmt: skip

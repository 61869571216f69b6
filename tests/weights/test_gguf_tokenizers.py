"""Tokenizers of GGUF files: how each kind cuts texts, and which tokens end an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from graphspec.facts.gguf import GgufHeader
from graphspec.facts.gguf_tokenizer import PRE_TOKENIZERS, ends_of, read_gguf_tokenizer

TEXT = "It's HTTPServer's camelCase 12345!\r\n\n  x_1=[a,\n]"
CUTS = {
    "gpt-2": "It·'s· HTTPServer·'s· camelCase· 12345·!·\r\n\n · x·_·1·=[·a·,·\n·]",
    "smollm": "It·'s· HTTPServer·'s· camelCase· ·1·2·3·4·5·!·\r\n\n · x·_·1·=[·a·,·\n·]",
    "llama-bpe": "It·'s· HTTPServer·'s· camelCase· ·123·45·!\r\n\n· · x·_·1·=[·a·,\n·]",
    "qwen2": "It·'s· HTTPServer·'s· camelCase· ·1·2·3·4·5·!\r\n\n· · x·_·1·=[·a·,\n·]",
    "seed-coder": "It·'s· HTTPServer·'s· camelCase· ·1·2·3·4·5·!·\r\n\n· · x·_·1·=[·a·,·\n·]",
    "tekken": "It·'s· HTTPServer·'s· camel·Case· ·1·2·3·4·5·!\r\n\n· · x·_·1·=[·a·,\n·]",
    "gpt-4o": "It's· HTTPServer's· camel·Case· ·123·45·!\r\n\n· · x·_·1·=[·a·,\n·]",
}
MARKED = "e\u0301t\u0301"
"""Letters with combining marks."""


def cut(name: str, text: str) -> list[str]:
    model = {"type": "BPE", "vocab": {}, "merges": []}
    library = Tokenizer.from_str(json.dumps({"version": "1.0", "pre_tokenizer": PRE_TOKENIZERS[name].cut, "model": model}))
    assert library.pre_tokenizer is not None
    return [text[begin:end] for _, (begin, end) in library.pre_tokenizer.pre_tokenize_str(text)]


def header(**metadata: Any) -> GgufHeader:
    return GgufHeader(Path("model.gguf"), {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}, {})


@pytest.mark.parametrize("name", CUTS)
def test_texts_are_cut(name: str) -> None:
    assert cut(name, TEXT) == CUTS[name].split("·")


def test_marks_belong_to_their_letters_in_qwen35() -> None:
    assert cut("qwen35", MARKED) == [MARKED] and len(cut("qwen2", MARKED)) > 1


def test_patterns_are_those_of_transformers() -> None:
    shared = [name for name in PRE_TOKENIZERS if name in GGUF_PRE_TOKENIZER_SPLITS]
    assert len(shared) > 10
    for name in shared:
        assert PRE_TOKENIZERS[name].cut["pretokenizers"][0]["pattern"]["Regex"] == GGUF_PRE_TOKENIZER_SPLITS[name]


@pytest.mark.parametrize(("pre", "whole", "begins"), [("tekken", True, True), ("glm4", True, False), ("dbrx", False, False)])
def test_what_a_kind_says_beyond_its_pattern(pre: str, whole: bool, begins: bool) -> None:
    found = read_gguf_tokenizer(header(model="gpt2", pre=pre, tokens=["a", "<s>"], merges=[], token_type=[1, 3], bos_token_id=1))
    assert found is not None
    assert found[0]["model"]["ignore_merges"] == whole and (found[0]["post_processor"] is not None) == begins


def test_a_message_of_gpt_oss_ends_with_return_or_call() -> None:
    """Not with the token that ends a channel, which the file names as the end of a turn."""
    tokens = ["a", "<|endoftext|>", "<|return|>", "<|call|>", "<|end|>"]
    assert ends_of(header(tokens=tokens, eos_token_id=2, eot_token_id=4)) == [2, 3]
    assert ends_of(header(tokens=tokens, eos_token_id=1, eot_token_id=4)) == [1, 2, 3]
    assert ends_of(header(tokens=tokens[:3], eos_token_id=1, eot_token_id=2)) == [1, 2]

"""A real model: 49,152 tokens of byte-level BPE under chat, stop texts, streams, grammars, a server and a long prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library

from graphspec import LLM, SamplingParams, Structured
from tests.support.serving import serving

GREEDY = SamplingParams(max_tokens=24, temperature=0)
QUESTIONS = ("What is a hash map?", "日本の首都はどこですか。", "Answer with emoji only: 🙂🎉👩‍👩‍👧")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("text", ["naïve café", "日本語のテキスト", "👩‍👩‍👧🇨🇭🙂", "def f(x):\n\treturn x  # ∑", "\u202eabc\u0000"])
def test_text_streams_byte_by_byte_as_it_decodes(chain: LLM, real: Path, text: str) -> None:
    """What is streamed for its tokens, one by one, is the text; no half of a character shows."""
    from graphspec.api.outputs import OutputText

    library = Library.from_file(str(real / "tokenizer.json"))
    tokens = library.encode(text, add_special_tokens=False).ids
    assert chain.tokenizer.words(text) == tokens
    output = OutputText(chain.tokenizer, GREEDY)
    pieces = [output.push([token]) for token in tokens] + [output.push([], last=True)]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


def test_plain_and_drafted_tokens_are_equal_and_streams_are_the_text(chain: LLM) -> None:
    """Greedy and seeded: the same request, drafted and decoded plainly."""
    for question in QUESTIONS:
        for sampling in ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 7}):
            drafted, plain = (SamplingParams(max_tokens=20, speculate=speculate, **sampling) for speculate in (True, False))
            [first], [second] = chain.chat(asked(question), drafted), chain.chat(asked(question), plain)
            assert first.token_ids == second.token_ids
            assert "".join(event.text for event in chain.stream_chat(asked(question), drafted)) == first.text


def test_a_stop_text_ends_between_and_inside_tokens(chain: LLM) -> None:
    [whole] = chain.chat(asked(QUESTIONS[0]), GREEDY)
    for length in (1, 3, 7):
        stop = whole.text[20 : 20 + length]
        [output] = chain.chat(asked(QUESTIONS[0]), SamplingParams(max_tokens=24, temperature=0, stop=[stop]))
        assert output.text == whole.text[: whole.text.index(stop)] and (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_a_schema_masks_the_real_vocabulary(chain: LLM) -> None:
    pytest.importorskip("xgrammar")
    params = SamplingParams(max_tokens=60, temperature=0, structured=Structured(json_schema=SCHEMA))
    [output] = chain.chat(asked("Describe a person as JSON with name and age."), params)
    person = json.loads(output.text)
    assert set(person) == {"name", "age"} and isinstance(person["age"], int) and 0 <= person["age"] <= 120


def test_a_prompt_of_four_thousand_tokens_is_read_once(chain: LLM) -> None:
    prompt = chain.tokenizer.words("The quick brown fox jumps over the lazy dog. " * 600)[:4000]
    [first] = chain.generate([prompt], SamplingParams(max_tokens=8, temperature=0))
    [second] = chain.generate([prompt], SamplingParams(max_tokens=8, temperature=0, speculate=False))
    assert first.token_ids == second.token_ids and second.cached_tokens >= 3900


def test_a_chat_over_http(chain: LLM) -> None:
    [direct] = chain.chat(asked(QUESTIONS[1]), GREEDY)
    body = {"model": "tiny", "messages": asked(QUESTIONS[1]), "max_tokens": 24, "temperature": 0}
    with serving(chain) as server:
        assert server.chat(**body)["choices"][0]["message"]["content"] == direct.text
        chunks = server.chunks("/v1/chat/completions", **body)
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]) == direct.text

"""Allowed tokens and bad words: banned tokens are never sampled, along any branch and with any drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphspec.api.llm import SamplingParams
from graphspec.api.outputs import Output
from graphspec.api.prompts import encode_bad_words
from graphspec.errors import RequestError
from graphspec.kernels.sampling.ban_words import ban_words
from graphspec.kernels.sampling.mask_tokens import mask_tokens
from graphspec.text.tokenizer import Tokenizer
from tests.support.engines import CHAIN, MIRROR_VOCAB, TREE, Pair, add_tokenizer, ids, mirror_pair, prompts, words
from tests.support.plans import plan
from tests.support.tokenizer_forms import write_form

PLAIN: dict[str, Any] = {"variant": "none"}
SHAPES = pytest.mark.parametrize(
    "shape",
    [
        PLAIN,
        {**CHAIN, "cycles_in_flight": 3},
        {**TREE, "page_size": 4, "max_rows": 3},
        {**CHAIN, "rule": "rejection"},
        {**TREE, "rule": "target_only"},
    ],
    ids=["none", "chain-ahead", "tree", "rejection", "target-only"],
)
LENGTH = 24


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    made = mirror_pair(tmp_path_factory.mktemp("pair"), noise=0.8)
    add_tokenizer(made.target)
    return made


def bad_words_of(pair: Pair, prompt: list[int]) -> list[list[int]]:
    """Sequences of one to four tokens that greedy decoding would have come to, one of which begins in the prompt."""
    text = [*prompt, *pair.greedy(prompt, LENGTH, ignore_eos=True)]
    begin = len(prompt)
    return [text[begin - 1 : begin + 1], text[begin + 2 : begin + 3], text[begin + 5 : begin + 8], text[begin + 9 : begin + 13]]


def holds(text: list[int], sequence: list[int], begin: int) -> bool:
    """Whether the sequence ends in ``text[begin:]``."""
    size = len(sequence)
    return any(text[end - size : end] == sequence for end in range(max(begin + 1, size), len(text) + 1))


def by_hand(pair: Pair, prompt: list[int], sequences: list[list[int]], allowed: list[int]) -> list[int]:
    """Greedy decoding, one forward per token, without what is banned."""
    text = list(prompt)
    for _ in range(LENGTH):
        with torch.no_grad():
            logits_V = pair.hf(torch.tensor([text])).logits[0, -1]
        if allowed:
            kept_V = torch.full_like(logits_V, -torch.inf)
            kept_V[allowed] = logits_V[allowed]
            logits_V = kept_V
        for *others, end in sequences:
            if text[len(text) - len(others) :] == others:
                logits_V[end] = -torch.inf
        text.append(int(logits_V.argmax()))
    return text[len(prompt) :]


@pytest.fixture(scope="module")
def mixed(pair: Pair) -> tuple[list[list[int]], list[SamplingParams], list[Output]]:
    """Requests of every kind, and what plain decoding of each alone makes of them."""
    prompt_ids = prompts(6, (5, 9, 17, 3))
    kinds: list[dict[str, Any]] = [
        {"bad_words": [words(one) for one in bad_words_of(pair, prompt_ids[0])]},
        {"allowed_token_ids": range(5, 20)},
        {},
        {"bad_words": [words(one) for one in bad_words_of(pair, prompt_ids[3])], "allowed_token_ids": range(43), "logit_bias": {7: 2.0}},
        {"bad_words": ["w5", "w6 w7"], "temperature": 1.0, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2},
        {"allowed_token_ids": (1, 2, 8, 40), "temperature": 1.5, "seed": 4, "min_tokens": 3},
    ]
    params = [SamplingParams(max_tokens=LENGTH, ignore_eos=True, logprobs=1, **kind) for kind in kinds]
    llm = pair.llm(**PLAIN, max_rows=1)
    return prompt_ids, params, [llm.generate(prompt, one)[0] for prompt, one in zip(prompt_ids, params, strict=True)]


def test_greedy_decoding_by_hand(pair: Pair, mixed: tuple[list[list[int]], list[SamplingParams], list[Output]]) -> None:
    prompt_ids, params, outputs = mixed
    for index in (0, 1):
        sequences = [[int(word[1:]) for word in text.split()] for text in params[index].bad_words or ()]
        expected = by_hand(pair, prompt_ids[index], sequences, list(params[index].allowed_token_ids or ()))
        assert outputs[index].token_ids == expected
        assert expected != pair.greedy(prompt_ids[index], LENGTH, ignore_eos=True)


def test_bad_words_of_transformers(pair: Pair, mixed: tuple[list[list[int]], list[SamplingParams], list[Output]]) -> None:
    prompt_ids, _, outputs = mixed
    token_BT = torch.tensor([prompt_ids[0]])
    pair.hf.generation_config.eos_token_id = None
    found = pair.hf.generate(
        token_BT, attention_mask=torch.ones_like(token_BT), max_new_tokens=LENGTH, do_sample=False, pad_token_id=0,
        bad_words_ids=bad_words_of(pair, prompt_ids[0]),
    )  # fmt: skip
    pair.hf.generation_config.eos_token_id = MIRROR_VOCAB - 1
    assert outputs[0].token_ids == found[0, len(prompt_ids[0]) :].tolist()


@SHAPES
def test_what_is_banned_never_comes_up(
    pair: Pair, mixed: tuple[list[list[int]], list[SamplingParams], list[Output]], shape: dict[str, Any]
) -> None:
    prompt_ids, params, plain = mixed
    outputs = pair.llm(**shape).generate(prompt_ids, params)
    for output, alone, one in zip(outputs, plain, params, strict=True):
        if "rule" not in shape or one.temperature == 0:
            assert output.token_ids == alone.token_ids
        assert output.finish_reason == "length"
        text, begin = [*output.prompt_token_ids, *output.token_ids], len(output.prompt_token_ids)
        assert one.allowed_token_ids is None or set(output.token_ids) <= set(one.allowed_token_ids)
        assert not any(holds(text, [int(word[1:]) for word in bad.split()], begin) for bad in one.bad_words or ())
    assert max(tokens for output in outputs for tokens in output.timing.cycle_tokens) > 1 or shape == PLAIN


def test_a_row_forgets_what_its_last_request_banned(pair: Pair) -> None:
    """One row, one class: every request finds the row of the one before."""
    llm, prompt_ids = pair.llm(**CHAIN, max_rows=1), prompts(4)
    banned = SamplingParams(max_tokens=8, ignore_eos=True, bad_words=["w5", "w6"], allowed_token_ids=range(20))
    params = [
        banned,
        SamplingParams(max_tokens=8, ignore_eos=True),
        SamplingParams(max_tokens=8, ignore_eos=True, allowed_token_ids=range(40)),
    ]
    outputs = llm.generate(prompt_ids[:3], params)
    assert ids(outputs)[1] == pair.greedy(prompt_ids[1], 8, ignore_eos=True)
    assert ids(outputs) == [llm.generate(prompt, one)[0].token_ids for prompt, one in zip(prompt_ids[:3], params, strict=True)]


def test_preempted_rows_remember_it(pair: Pair) -> None:
    prompt_ids = prompts(4, (9, 16))
    params = [SamplingParams(max_tokens=30, ignore_eos=True, bad_words=[words(w) for w in bad_words_of(pair, p)]) for p in prompt_ids]
    squeezed = pair.llm(**CHAIN, page_size=4, num_pages=26).generate(prompt_ids, params)
    assert ids(squeezed) == ids(pair.llm(**PLAIN).generate(prompt_ids, params))


@given(st.sets(st.integers(0, 129), min_size=1))
def test_bits_of_allowed_tokens(allowed: set[int]) -> None:
    words_U = torch.tensor([sum(1 << (t % 64) for t in allowed if t // 64 == u) for u in range(3)], dtype=torch.uint64).view(torch.int64)
    masked_11V = mask_tokens(torch.zeros(1, 1, 130), torch.tensor([0]), words_U[None], None, None)
    assert masked_11V[0, 0].isfinite().nonzero().flatten().tolist() == sorted(allowed)


def test_ends_of_words() -> None:
    word_11t = torch.tensor([[[-1, -1, 4], [-1, 2, 5], [1, 2, 6], [-1, -1, -1]]])
    before_B3t = torch.tensor([[[0, 2], [1, 2], [2, 1]]])
    found_13V = ban_words(torch.zeros(1, 3, 8), torch.tensor([0]), word_11t, before_B3t)
    assert [row.isinf().nonzero().flatten().tolist() for row in found_13V[0]] == [[4, 5], [4, 5, 6], [4]]


class Spaces:
    """A tokenizer of letters in which a space before a word is part of its first token, with the methods that bad words use."""

    def inside(self, text: str) -> list[int]:
        return [ord(text[1]) + 100, *text[2:].encode()] if text[0] == " " else list(text.encode())


def test_a_word_with_a_space_in_front_and_without() -> None:
    found = encode_bad_words(SamplingParams(bad_words=["ab", " ab", "c"]), plan(), Spaces())  # type: ignore[arg-type]
    assert found == ((97, 98), (197, 98), (99,), (199,))
    for bad, message in (
        (["abcdefghi"], r"^sampling.bad_words\[0\]: expected a word of 1 to runtime.max_bad_word_tokens = 8 tokens, found 9 of them"),
        (
            [chr(97 + i // 8) + chr(97 + i % 8) for i in range(33)],
            r"^sampling.bad_words: expected at most runtime.max_bad_words = 64 .*found 66",
        ),
    ):
        with pytest.raises(RequestError, match=message):
            encode_bad_words(SamplingParams(bad_words=bad), plan(), Spaces())  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["SentencePiece, Llama 2", "SentencePiece, Gemma", "byte-level, Llama 3", "byte-level, GPT-2"])
def test_bad_words_are_those_inside_a_text(tmp_path: Path, form: str) -> None:
    """A tokenizer that puts a space in front of every text has a word without one too."""
    tokenizer = Tokenizer(write_form(tmp_path, form))
    found = encode_bad_words(SamplingParams(bad_words=["Paris"]), plan(), tokenizer)
    assert [b"".join(map(tokenizer.token_bytes, tokens)) for tokens in found] == [b"Paris", b" Paris"]
    assert all(len(tokens) == 1 for tokens in found)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"allowed_token_ids": []}, "sampling.allowed_token_ids: expected null, or at least one token id"),
        (
            {"allowed_token_ids": [MIRROR_VOCAB]},
            f"sampling.allowed_token_ids: expected token ids from 0 to {MIRROR_VOCAB - 1}, found {MIRROR_VOCAB}",
        ),
        ({"allowed_token_ids": [MIRROR_VOCAB - 1], "min_tokens": 2}, "sampling.allowed_token_ids: expected a token that ends nothing"),
        ({"allowed_token_ids": [3], "bad_words": ["w3"]}, "sampling.bad_words: expected words that leave a token to sample"),
        ({"bad_words": [" "]}, r"sampling.bad_words\[0\]: expected text that is not empty"),
    ],
)
def test_a_ban_of_everything_is_refused(pair: Pair, params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        pair.llm(**PLAIN).generate([1, 2], SamplingParams(**params))

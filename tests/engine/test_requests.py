"""Validation of requests, before any engine: prompts, parameters, seeds. Every refusal names key, expected and found."""

from __future__ import annotations

import copy
import math
import pickle
import re
import struct
from collections import UserList
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphspec.api.prompts import make_requests, read_params, read_prompt, split_prompts
from graphspec.config.schema import SamplingConfig
from graphspec.engine.admission import _join
from graphspec.engine.request import LogitBias, Request, SamplingParams, configured_params
from graphspec.errors import CheckpointError, ConfigError, RequestError
from graphspec.graphs.stages.mailbox import MailLayout
from tests.support.plans import plan

NAN, INF = float("nan"), float("inf")
PLAN = plan()
VOCAB = PLAN.target.vocab_size
LAYOUT = MailLayout.of(PLAN)


def encode(text: str) -> list[int]:
    """A word for every id."""
    return [int(word[1:]) for word in text.split()]


class Evil(Sequence[Any]):
    """A sequence that can't be read."""

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("no")

    def __getitem__(self, place: Any) -> Any:
        raise RuntimeError("no")

    def __len__(self) -> int:
        return 3


class UnreadableMapping(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("no")


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("prompts", "single", "read"),
    [
        ("w1 w2", True, [[1, 2]]),
        ([1, 2], True, [[1, 2]]),
        ((1, 2), True, [[1, 2]]),
        (range(3), True, [[0, 1, 2]]),
        (np.array([1, 2]), True, [[1, 2]]),
        (torch.tensor([1, 2]), True, [[1, 2]]),
        ([np.int64(1), np.uint8(2)], True, [[1, 2]]),
        ({"prompt": "w1 w2"}, True, [[1, 2]]),
        ({"prompt_token_ids": (1, 2)}, True, [[1, 2]]),
        (UserList([1, 2]), True, [[1, 2]]),
        ([], False, []),
        (
            ["w1 w2", [3], (4, 5), range(2), {"prompt": "w6"}, {"prompt_token_ids": np.array([7])}],
            False,
            [[1, 2], [3], [4, 5], [0, 1], [6], [7]],
        ),
        (np.array([[1, 2], [3, 4]]), False, [[1, 2], [3, 4]]),
        (torch.tensor([[1, 2], [3, 4]]), False, [[1, 2], [3, 4]]),
        (UserList(["w1", [2]]), False, [[1], [2]]),
    ],
)  # fmt: skip
def test_spellings_of_prompts(prompts: Any, single: bool, read: list[list[int]]) -> None:
    alone, many = split_prompts(prompts)
    assert alone == single
    found = [read_prompt(prompt, encode) for prompt in many]
    assert found == read
    assert all(type(token) is int for prompt in found for token in prompt)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts: expected a text, .*, or a list of these, found None"),
        (5, r"found 5 \(int\)"),
        (b"w1", r"found b'w1' \(bytes\)"),
        ({1, 2}, r"found \{1, 2\} \(set\)"),
        ((i for i in [1]), "generator"),
        (object(), "object"),
        (Unspeakable(), "Unspeakable"),
        (Evil(), "Evil that can't be read: RuntimeError: 'no'"),
        (np.broadcast_to(1, (10**9, 1)), "at most 16777216 of them, found 1000000000"),
        ([1, "w2"], r"a list that mixes them: prompts\[0\] = 1 \(int\), prompts\[1\] = 'w2' \(str\)"),
        (["w2", [1], 1.5], r"prompts\[0\] = 'w2' \(str\), prompts\[2\] = 1.5 \(float\)"),
    ],
)
def test_arguments_that_are_no_prompt(prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        split_prompts(prompts)
    assert caught.value.key == "prompts"


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "float": ([1, 2.0], r"^prompt\[1\]: expected a token id, found 2\.0 \(float\)"),
    "bool": ([True, False], r"^prompt\[0\]: expected a token id, found True \(bool\)"),
    "complex": ([1 + 2j], r"^prompt\[0\]: expected a token id"),
    "float array": (np.array([1.0]), r"^prompt\[0\]: expected a token id, found 1\.0"),
    "bool array": (np.array([True]), r"^prompt\[0\]: expected a token id, found True"),
    "text of ids": ({"prompt_token_ids": "12"}, r"^prompt\['prompt_token_ids'\]: expected a list of token ids, found '12'"),
    "ids of text": ({"prompt": [1]}, r"^prompt\['prompt'\]: expected a text .*found \[1\] \(list\)"),
    "no key": ({}, "nothing else .* found no key"),
    "both keys": ({"prompt": "w1", "prompt_token_ids": [1]}, "found both"),
    "a message": ({"role": "user", "content": "w1"}, r"'role', 'content' \(messages go to LLM\.chat\)"),
    "pictures": ({"prompt": "w1", "multi_modal_data": {}}, r"\(text only\), found other keys: 'multi_modal_data'"),
    "unreadable by the tokenizer": ("x", "text that the tokenizer reads, found 'x': ValueError"),
    "empty": ("", "at least one token"),
    "out of the vocabulary": ([VOCAB], rf"^prompt\[0\]: expected a token id from 0 to {VOCAB - 1}, found {VOCAB}"),
    "far out of it": ([10**5000], "a value that can't be shown"),
    "too long": (range(10**12), "at most 16777216 entries, found 1000000000000"),
    "longer than the context": ([1] * PLAN.max_context, f"at most {PLAN.max_context - 1} tokens"),
}
ONLY_IN_LISTS: dict[str, tuple[Any, str]] = {
    "None": (None, "^prompt: expected a text, .*, found None"),
    "bytes": (b"w1", r"^prompt: expected a text, .*, found b'w1' \(bytes\)"),
    "generator": ((i for i in [1]), "^prompt: expected a text, .*generator"),
    "evil": (Evil(), "^prompt: .*Evil that can't be read"),
    "nested": ([[1]], r"^prompt\[0\]: expected a token id, found \[1\] \(list\)"),
    "matrix": (np.array([[1]]), "one-dimensional"),
    "number without dimensions": (torch.tensor(1), "one-dimensional"),
}


@pytest.mark.parametrize("name", [*BAD_PROMPTS, *ONLY_IN_LISTS])
def test_a_bad_prompt_fails_alone(name: str) -> None:
    bad, message = {**BAD_PROMPTS, **ONLY_IN_LISTS}[name]
    requests = make_requests([[1, 2], bad, "w3"], None, PLAN, encode)
    assert [(r.prompt, r.finish_reason, r.error, r.budget > 0) for r in (requests[0], requests[2])] == [
        ([1, 2], None, None, True),
        ([3], None, None, True),
    ]
    assert requests[1].finish_reason == "error"
    assert requests[1].error is not None
    assert re.search(message, requests[1].error), requests[1].error
    assert re.match(r"prompt.*: expected .*, found ", requests[1].error)


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_alone_raises(name: str) -> None:
    bad, message = BAD_PROMPTS[name]
    with pytest.raises(RequestError, match=message):
        make_requests(bad, None, PLAN, encode)


def test_text_without_a_tokenizer_fails_alone_too() -> None:
    def missing(text: str) -> list[int]:
        raise CheckpointError("folder", "tokenizer files", "none")

    with pytest.raises(CheckpointError):
        make_requests("w1", None, PLAN, missing)
    requests = make_requests(["w1", [1]], None, PLAN, missing)
    assert [r.error for r in requests] == ["folder: expected tokenizer files, found none", None]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, r"^sampling.max_tokens: expected an integer >= 1"),
        (
            {"max_new_tokens": 3},
            r"^sampling.max_new_tokens: .*found max_new_tokens=3 \(here it is max_tokens, as in vLLM\), expected one of max_tokens",
        ),
        ({3: 3}, r"^sampling.3: expected one of max_tokens, .*, found 3=3$"),
        ([{}, {"temprature": 1}], r"^sampling.temprature: .*\(did you mean temperature\?\), expected one of max_tokens"),
        (UnreadableMapping(), "^params: expected a mapping of the fields of SamplingParams, found UnreadableMapping that can't be read"),
        (3, r"^params: .*found 3 \(int\)"),
        (SamplingParams, "^params: .*type"),
        ("x", "^params: "),
        ([SamplingParams(), None], r"^params\[1\]: expected a SamplingParams, or a mapping of its fields, found None"),
        ([SamplingParams()], "one for each of the 2 prompts, found 1 of them"),
        ([], "one for each of the 2 prompts, found 0 of them"),
        ((SamplingParams() for _ in range(2)), "^params: .*generator"),
    ],
)
def test_what_are_no_parameters(params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_requests([[1], [2]], params, PLAN, encode)


def test_parameters_for_all_and_for_each() -> None:
    one, other = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    assert read_params(None, 2) == [SamplingParams()] * 2
    assert read_params(one, 2) == [one, one]
    assert read_params((one, other), 2) == [one, other]
    assert read_params({"max_tokens": 1}, 2) == [one, one]
    assert read_params([{"max_tokens": 1}, other, {}], 3) == [one, other, SamplingParams()]


def test_one_prompt_where_one_is_required() -> None:
    for prompts, count in (([[1], [2]], 2), ([], 0)):
        with pytest.raises(RequestError, match=f"prompt: expected one prompt, found {count} of them"):
            make_requests(prompts, None, PLAN, encode, one=True)
    with pytest.raises(RequestError, match=r"prompt\[0\]"):
        make_requests([[-1]], None, PLAN, encode, one=True)
    assert make_requests([[1]], None, PLAN, encode, one=True)[0].prompt == [1]


NUMBERS = {"max_tokens", "seed", "top_k", "min_tokens", "logprobs"}
REALS = {"temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
WRONG_EVERYWHERE = ["5", "", b"5", [], {}, True, NAN, 1j, 10**5000, torch.tensor(1), object(), Unspeakable()]
BAD_FIELDS: list[tuple[str, Any, str]] = [
    *[(name, value, "an integer") for name in sorted(NUMBERS) for value in (*WRONG_EVERYWHERE[:8], INF, np.float64(2), np.bool_(True))],
    *[(name, value, "number") for name in sorted(REALS) for value in (*WRONG_EVERYWHERE, INF, -INF, 10**400, np.bool_(True))],
    ("min_tokens", None, "an integer"),
    *[(name, value, ">=") for name in ("max_tokens", "top_k", "logprobs") for value in (-2, 10**30)],
    ("max_tokens", 0, ">= 1"), ("max_tokens", 2**63, r"at most 2\^63 - 1"), ("top_k", 2**63, r"at most 2\^63 - 1"),
    ("seed", 2**64, "64-bit"), ("seed", -(2**63) - 1, "64-bit"),
    ("temperature", -0.5, "a number >= 0"), ("temperature", -1e-45, ">= 0"), ("temperature", 1e39, "100000"),
    ("repetition_penalty", 1e-45, "0.01"), ("repetition_penalty", 0, "0.01"), ("repetition_penalty", 1e39, "100"),
    ("presence_penalty", 2.01, "at most 2"), ("frequency_penalty", -2.01, ">= -2"),
    ("top_p", 2, "at most 1"), ("top_p", 0, "above 0"), ("top_p", 1e-45, "above 0"), ("min_p", -0.1, "0, or"), ("min_p", 1e-45, "0, or"),
    ("min_tokens", 129, "at most 128 = max_tokens"), ("min_tokens", -1, ">= 0"),
    ("ignore_eos", 1, "true or false"), ("ignore_eos", None, "true or false"), ("ignore_eos", np.bool_(True), "true or false"),
    *[("stop_token_ids", value, "a list of integers") for value in ("abc", b"a", {1}, {1: 2}, 5, None, iter([1]), np.array([[1]]), Evil())],
    *[("stop_token_ids", value, r"stop_token_ids\[0\]") for value in ([1.5], [True], ["1"], [None], [NAN], [-1], np.array([1.0]))],
    *[("logit_bias", value, "a mapping") for value in ([(1, 1.0)], "x", 5, {1}, [])],
    *[("logit_bias", {key: 1.0}, "an integer") for key in ("1", 1.5, True, None)],
    *[("logit_bias", {1: value}, r"logit_bias\[1\]") for value in (NAN, INF, None, "1", True, 101, -100.5, torch.tensor(1.0))],
    ("logit_bias", {-1: 1.0}, ">= 0"), ("stop_token_ids", range(10**15), "at most 65536 entries"),
    *[("n", value, "an integer") for value in ("2", 1.5, True, None)], ("n", 0, ">= 1"),
    *[(name, value, "a list of texts") for name in ("stop", "bad_words") for value in (b"a", 5, {"a": 1}, {"a"}, iter("a"))],
    *[(name, [value], rf"{name}\[0\]: expected text") for name in ("stop", "bad_words") for value in (5, None, b"a", "")],
    ("stop", "", "not empty"), ("bad_words", [" "], "not empty"),
    *[("allowed_token_ids", value, "a list of integers|at least one") for value in ("abc", 5, {1}, [])],
    ("allowed_token_ids", [-1], ">= 0"),
    *[(name, 1, "true or false") for name in ("speculate", "echo", "detokenize", "skip_special_tokens", "include_stop_str_in_output")],
    *[(name, value, "an integer") for name in ("num_steps", "prompt_logprobs") for value in ("1", 0.5, True)],
    *[(name, -1, ">= 0") for name in ("num_steps", "prompt_logprobs")],
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), BAD_FIELDS, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(BAD_FIELDS)])
def test_a_parameter_is_checked_where_it_is_set(name: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=rf"^sampling\.{name}") as caught:
        SamplingParams(**{name: value})
    assert len(str(caught.value)) < 300
    with pytest.raises(RequestError, match=message):
        replace(SamplingParams(), **{name: value})
    if name in {f.name for f in fields(SamplingConfig)} - {"stop_token_ids", "logit_bias", "allowed_token_ids", "stop", "bad_words"}:
        with pytest.raises(ConfigError, match=rf"^sampling\.{name}"):
            SamplingConfig(**{name: value})


def test_numbers_of_numpy_become_numbers_of_python() -> None:
    params = SamplingParams(
        max_tokens=np.int64(3), temperature=np.float32(0.5), seed=np.uint64(2**63), top_p=1, top_k=np.int8(4),
        stop_token_ids=np.array([1, 2]), logit_bias={np.int32(4): np.float16(0.5)}, logprobs=np.int8(1),
    )  # fmt: skip
    plain = SamplingParams(
        max_tokens=3, temperature=0.5, seed=2**63, top_p=1.0, top_k=4, stop_token_ids=(1, 2), logit_bias={4: 0.5}, logprobs=1
    )
    assert params == plain
    assert [type(getattr(params, f.name)) for f in fields(params)] == [type(getattr(plain, f.name)) for f in fields(plain)]


def test_parameters_are_values() -> None:
    bias, stops = {3: 1}, [1, 2]
    params = SamplingParams(logit_bias=bias, stop_token_ids=stops)
    bias[4], stops[0] = 2, 9
    assert (params.logit_bias, params.stop_token_ids) == ({3: 1.0}, (1, 2))
    assert isinstance(params.logit_bias, LogitBias)
    for change in (
        lambda b: b.update({1: 2}),
        lambda b: b.clear(),
        lambda b: b.pop(3),
        lambda b: b.__setitem__(3, NAN),
        lambda b: b.__ior__({}),
    ):
        with pytest.raises(TypeError, match="replace"):
            change(params.logit_bias)
    assert params == copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == SamplingParams(**asdict(params)) == replace(params)
    assert hash(params) == hash(copy.deepcopy(params))
    assert replace(params, seed=3).seed == 3
    assert configured_params(SamplingConfig(logit_bias={3: 1.0}, stop_token_ids=[1, 2])) == params
    texts = SamplingParams(logit_bias={}, stop="a", bad_words=("b",), allowed_token_ids=[1])
    assert texts == configured_params(SamplingConfig(stop=["a"], bad_words=["b"], allowed_token_ids=[1])) == replace(texts)
    assert SamplingParams(stop=None, bad_words=None) == SamplingParams()


@given(
    st.builds(
        SamplingParams,
        max_tokens=st.none() | st.integers(1, 2**63 - 1),
        temperature=st.none() | st.just(5e-324) | st.floats(0, 1e5, allow_subnormal=False),
        seed=st.none() | st.integers(-(2**63), 2**64 - 1),
        stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=7),
        top_k=st.none() | st.integers(-1, 2**63 - 1),
        top_p=st.none() | st.floats(2.0**-126, 1),
        min_p=st.none() | st.just(0.0) | st.floats(2.0**-126, 1),
        repetition_penalty=st.none() | st.floats(0.01, 100),
        presence_penalty=st.floats(-2, 2, allow_subnormal=False),
        frequency_penalty=st.floats(-2, 2, allow_subnormal=False),
        logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, allow_subnormal=False), max_size=300),
    )
)
def test_what_is_taken_fits_the_message(params: SamplingParams) -> None:
    """Every number of a request has a place in the words that go to the device, and means the same there."""
    [request] = make_requests([[1]], params, PLAN, encode)
    assert request.error is None
    join = _join(PLAN, request, 0)
    words = np.zeros(LAYOUT.size, dtype=np.int64)
    LAYOUT._encode_join(join, words)
    for value in (join.temperature, join.top_p, join.min_p, join.repetition):
        reported = struct.unpack("<f", struct.pack("<f", value))[0]
        assert math.isfinite(reported)
        assert (reported > 0) == (value > 0)
        assert reported == 0 or reported >= 2.0**-126, "no denormal"


def test_no_finite_logit_becomes_infinite() -> None:
    """Up to the largest logits that a checkpoint in half precision can have, and far beyond."""
    for logit in (1e-30, 1.0, 65504.0, 1e36):
        for penalty in (0.01, 100.0):
            assert math.isfinite(struct.unpack("<f", struct.pack("<f", logit * penalty))[0])
            assert math.isfinite(struct.unpack("<f", struct.pack("<f", logit / penalty))[0])


def test_a_seed_is_drawn_for_each_request() -> None:
    shared = SamplingParams(temperature=1.0)
    requests = make_requests([[1]] * 50, shared, PLAN, encode)
    assert len({request.seed for request in requests}) == 50
    assert all(0 <= request.seed < 2**64 for request in requests)
    assert max(request.seed for request in requests) >= 2**56, "all 64 bits are drawn"
    for seed in (0, -(2**63), 2**64 - 1):
        assert Request(index=0, prompt=[1], params=SamplingParams(seed=seed), stop_ids=(), budget=1).seed == seed

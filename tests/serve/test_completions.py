"""Completions equal ``LLM.generate``, whole and in chunks."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from graphspec import SamplingParams
from graphspec.serve.protocol import COMPLETION_TOKENS
from tests.support.engines import CHAIN
from tests.support.serving import serving

if TYPE_CHECKING:
    from pathlib import Path

    from graphspec.api.llm import LLM
    from tests.support.engines import Pair
    from tests.support.serving import Served

PATH = "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def joined(chunks: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


@pytest.mark.parametrize("prompt", ["w7 w8", ["w7 w8", "w9"], [5, 7, 8], [[5, 7, 8], [5, 9]]], ids=["text", "texts", "ids", "lists of ids"])
def test_prompts_in_every_form(server: Served, llm: LLM, prompt: Any) -> None:
    outputs = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    answer = server.complete(prompt=prompt, return_token_ids=True, **GREEDY)
    assert [choice["text"] for choice in answer["choices"]] == [output.text for output in outputs]
    assert [choice["token_ids"] for choice in answer["choices"]] == [output.token_ids for output in outputs]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [output.prompt_token_ids for output in outputs]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    read = sum(len(output.prompt_token_ids) for output in outputs)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (read, 12 * len(outputs))
    assert usage["total_tokens"] == read + 12 * len(outputs)
    assert joined(server.chunks(PATH, prompt=prompt, **GREEDY)) == {i: output.text for i, output in enumerate(outputs)}


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 3, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"seed": 4, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"seed": 5, "logit_bias": {"9": 2.5, "10": -100}, "min_tokens": 4},
        {"seed": 6, "allowed_token_ids": [7, 8, 9]},
        {"seed": 7, "bad_words": ["w9"]},
        {"seed": 8, "speculate": False},
        {"seed": 9, "num_steps": 1},
        {"temperature": 0, "stop_token_ids": [8]},
        {"seed": -1, "ignore_eos": True},
    ],
    ids="+".join,
)
def test_fields_are_those_of_sampling_params(server: Served, llm: LLM, fields: dict[str, Any]) -> None:
    values = {"temperature": 1.0, "max_tokens": 10, **fields}
    bias = {int(token): value for token, value in values.get("logit_bias", {}).items()} or None
    [output] = llm.generate("w7 w8", SamplingParams(**{**values, "logit_bias": bias}))
    [choice] = server.complete(prompt="w7 w8", **values)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (output.text, output.finish_reason, output.stop_reason)


def test_several_samples_have_the_seeds_of_several_requests(server: Served, llm: LLM) -> None:
    answer = server.complete(prompt=["w7", "w8"], n=2, seed=11, max_tokens=8, ignore_eos=True)
    found = [choice["text"] for choice in answer["choices"]]
    params = SamplingParams(temperature=1.0, n=2, seed=11, max_tokens=8, ignore_eos=True)
    assert found == [output.text for output in llm.generate(["w7", "w8"], params)]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    # A prompt counts once.
    assert answer["usage"]["prompt_tokens"] == 4


def test_a_stop_text_is_cut_off_and_named(server: Served) -> None:
    [whole] = server.complete(prompt="w7 w8", **GREEDY)["choices"]
    stop = whole["text"].split()[5]
    [choice] = server.complete(prompt="w7 w8", stop=stop, **GREEDY)["choices"]
    assert choice["text"] == whole["text"][: whole["text"].index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    streamed = server.chunks(PATH, prompt="w7 w8", stop=[stop], **GREEDY)
    assert joined(streamed) == {0: choice["text"]}
    [kept] = server.complete(prompt="w7 w8", stop=stop, include_stop_str_in_output=True, **GREEDY)["choices"]
    assert kept["text"] == choice["text"] + stop


def test_a_completion_without_a_length_has_openais(server: Served) -> None:
    assert server.complete(prompt="w7", ignore_eos=True)["usage"]["completion_tokens"] == COMPLETION_TOKENS


def test_echo_and_logprobs_as_lm_eval_reads_them(server: Served, llm: LLM) -> None:
    """The prompt's tokens first, the first of them without a value; offsets point into the text."""
    params = SamplingParams(temperature=0, max_tokens=3, echo=True, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    [output] = llm.generate("w7 w8 w9", params)
    body = {"prompt": "w7 w8 w9", "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    [choice] = server.complete(**body)["choices"]
    assert choice["text"] == output.text
    assert output.prompt_logprobs is not None and output.logprobs is not None
    entries = [*output.prompt_logprobs, *output.logprobs]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None if entry is None else entry.logprob for entry in entries]
    assert logprobs["tokens"][0] == "w5" and "".join(logprobs["tokens"][1:]) == choice["text"]
    assert logprobs["top_logprobs"][0] is None
    for entry, top, token in zip(entries, logprobs["top_logprobs"], logprobs["tokens"], strict=True):
        assert entry is None or (top[token] == entry.logprob and max(top.values()) == max(entry.top.values()))
    # The first token is special, and no part of the text.
    assert logprobs["text_offset"][:2] == [0, 0]
    for token, offset in [*zip(logprobs["tokens"], logprobs["text_offset"], strict=True)][1:]:
        assert choice["text"][offset:].startswith(token)
    assert "prompt_logprobs" not in choice
    pieces = [chunk["choices"][0]["logprobs"] for chunk in server.chunks(PATH, **body)]
    assert [value for piece in pieces for value in piece["token_logprobs"]] == logprobs["token_logprobs"]
    assert [value for piece in pieces for value in piece["text_offset"]] == logprobs["text_offset"]


def test_a_prompt_is_scored_without_a_new_token(server: Served, llm: LLM) -> None:
    body = {"prompt": "w7 w8 w9", "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = server.complete(**body)
    [scored] = answer["choices"]
    [longer] = server.complete(**{**body, "max_tokens": 1, "temperature": 0})["choices"]
    assert scored["text"] == llm.tokenizer.decode([5, 7, 8, 9], skip_special_tokens=True) and scored["finish_reason"] == "length"
    assert scored["logprobs"]["token_logprobs"] == longer["logprobs"]["token_logprobs"][:-1] and len(scored["logprobs"]["tokens"]) == 4
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (4, 0)
    assert joined(server.chunks(PATH, **body)) == {0: scored["text"]}
    [alone] = server.complete(prompt="w7 w8", max_tokens=0, prompt_logprobs=1)["choices"]
    assert alone["text"] == "" and len(alone["prompt_logprobs"]) == 3


def test_a_silent_request_follows_the_checkpoint(pair: Pair, llm: LLM, tmp_path: Path) -> None:
    folder = shutil.copytree(pair.target, tmp_path / "target")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.7, "top_k": 5, "eos_token_id": 43}))
    silent = {"prompt": "w7 w8", "seed": 3, "max_tokens": 16, "ignore_eos": True}
    wanted = {"seed": 3, "max_tokens": 16, "ignore_eos": True}
    with replace(pair, target=folder).llm(**CHAIN, max_rows=4) as sampled, serving(sampled) as server:
        for said in ({}, {"temperature": 1.5}, {"top_k": -1}, {"temperature": 0}):
            [output] = llm.generate("w7 w8", SamplingParams(**{**wanted, "temperature": 0.7, "top_k": 5, **said}))
            assert server.complete(**silent, **said)["choices"][0]["text"] == output.text, said
    with pair.llm(**CHAIN, max_rows=4) as plain, serving(plain) as server:
        [output] = llm.generate("w7 w8", SamplingParams(**wanted, temperature=1.0))
        assert server.complete(**silent)["choices"][0]["text"] == output.text, "OpenAI's default where the checkpoint states none"


def test_prompt_logprobs_as_vllm_has_them(server: Served, llm: LLM) -> None:
    [choice] = server.complete(prompt="w7 w8", max_tokens=1, temperature=0, prompt_logprobs=1)["choices"]
    [output] = llm.generate("w7 w8", SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    assert output.prompt_logprobs is not None and choice["prompt_logprobs"][0] is None
    for token, entry, found in zip(output.prompt_token_ids, output.prompt_logprobs, choice["prompt_logprobs"], strict=True):
        assert entry is None or found[str(token)]["logprob"] == entry.logprob


def test_usage_once_in_every_chunk_and_not_at_all(server: Served) -> None:
    silent = server.chunks(PATH, prompt="w7", **GREEDY)
    assert not any("usage" in chunk for chunk in silent)
    once = server.chunks(PATH, prompt="w7", stream_options={"include_usage": True}, **GREEDY)
    assert [chunk for chunk in once if "usage" in chunk] == once[-1:] and once[-1]["choices"] == []
    assert once[-1]["usage"]["completion_tokens"] == 12
    every = server.chunks(PATH, prompt="w7", stream_options={"include_usage": True, "continuous_usage_stats": True}, **GREEDY)
    counts = [chunk["usage"]["completion_tokens"] for chunk in every]
    assert counts == sorted(counts) and counts[-1] == 12
    # A chunk may carry a whole accepted run.
    assert any(after - before > 1 for before, after in zip([0, *counts], counts, strict=False))


def test_a_prompt_that_was_seen_is_found_again(server: Served) -> None:
    prompt = " ".join(f"w{7 + i % 3}" for i in range(40))
    server.complete(prompt=prompt, max_tokens=2, temperature=0)
    again = server.complete(prompt=prompt, max_tokens=2, temperature=0)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_text_that_has_its_special_tokens_gets_no_others(server: Served) -> None:
    """As one that a client put through a chat template."""
    body = {"prompt": ["w5 w7", [5, 8]], "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    for add, wanted in ((True, [5, 5, 7]), (False, [5, 7])):
        choices = server.complete(**body, add_special_tokens=add)["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == [wanted, [5, 8]]


def test_tokens_and_back(server: Served, llm: LLM) -> None:
    found = server.post("/tokenize", {"prompt": "w7 w8", "return_token_strs": True}).json()
    assert found == {"count": 3, "max_model_len": llm.plan.max_context, "tokens": [5, 7, 8], "token_strs": ["w5", " w7", " w8"]}
    assert server.post("/tokenize", {"prompt": "w7", "add_special_tokens": False}).json()["tokens"] == [7]
    assert server.post("/tokenize", {"messages": [{"role": "user", "content": "w7"}]}).json()["tokens"] == [5, 1, 7, 4, 3]
    assert server.post("/detokenize", {"tokens": [7, 8]}).json() == {"prompt": "w7 w8"}


def test_the_model_is_listed(server: Served, llm: LLM) -> None:
    [model] = server.client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", llm.plan.max_context)
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/version").json().keys() == {"version"}


def test_pages_are_shared_only_with_the_same_salt(server: Served) -> None:
    def cached(**fields: str) -> int:
        usage = server.complete(prompt=[7, 9, 8, 11] * 20, temperature=0, max_tokens=1, **fields)["usage"]
        tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
        return tokens

    again = [cached(), cached()][1]
    assert again > 0
    assert [cached(cache_salt="a"), cached(cache_salt="b"), cached(cache_salt="a"), cached()] == [0, 0, again, again]
    response = server.post(PATH, {"prompt": "w7", "cache_salt": ""})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_salt")

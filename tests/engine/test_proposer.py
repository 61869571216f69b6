"""The drafter on the host: the tokens it passes to the trie, and a corpus inserted at load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphspec.api.llm import LLM, SamplingParams
from graphspec.config.schema import NgramSettings
from graphspec.drafters.ngram_trie.proposer import TrieProposer
from graphspec.engine.request import Request
from graphspec.errors import ConfigError
from tests.support.plans import plan

PROMPT = "def is_even(number):"
PARAMS = SamplingParams(max_tokens=48, ignore_eos=True)


def request(prompt: list[int], output: list[int]) -> Request:
    return Request(index=0, prompt=prompt, params=SamplingParams(), stop_ids=(), budget=100, output=output)


def test_a_request_is_drafted_for_from_another_ones_tokens() -> None:
    proposer = TrieProposer(plan("ngram_trie"))
    first, second = request([1, 2, 3], [4]), request([9, 2, 3], [])
    assert proposer.propose([first]) == [([], [])]
    proposer.admit(first)
    proposer.observe(first, 1)
    for token in (5, 6, 7):
        first.output.append(token)
        proposer.observe(first, 1)
    proposer.propose([first])
    tokens, parents = proposer.propose([second])[0]
    assert tokens[:4] == [4, 5, 6, 7]
    assert parents[:4] == [-1, 0, 1, 2]


def test_no_token_is_counted_twice() -> None:
    """However an output is cut into runs, the trie ends up the same."""
    trees = []
    for cuts in ([1, 3, 2, 1], [1, 1, 1, 1, 1, 1, 1], [7]):
        proposer = TrieProposer(plan("ngram_trie"))
        grown, tokens = request([1, 2, 1, 2], []), [1, 3, 1, 2, 1, 3, 2]
        proposer.admit(grown)
        for cut in cuts:
            grown.output += tokens[len(grown.output) : len(grown.output) + cut]
            proposer.observe(grown, cut)
        proposer.propose([grown])
        trees.append((proposer.propose([request([1, 2], [])]), proposer._trie.size))
    assert trees[0] == trees[1] == trees[2]


def test_a_prompt_is_known_in_its_first_cycle() -> None:
    proposer = TrieProposer(plan("ngram_trie"))
    req = request([5, 6, 7, 8, 5, 6], [7])
    proposer.admit(request([5, 6, 7, 8, 5, 6], []))
    assert proposer.propose([req])[0][0][:3] == [8, 5, 6]


def test_a_resumed_request_does_not_count_its_prompt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer, inserted = TrieProposer(plan("ngram_trie")), []
    monkeypatch.setattr(proposer._trie, "insert", lambda tokens, new=None: inserted.append((list(tokens), new)))
    req = request([1, 2, 3], [])
    proposer.admit(req)
    req.output.append(4)
    proposer.observe(req, 1)
    proposer.admit(req)
    proposer.propose([req])
    assert inserted == [([1, 2, 3], None), ([1, 2, 3, 4], 1)]


def test_a_corpus_is_known_from_the_start(tmp_path: Path) -> None:
    """The target's own answer as a document: the very first request finds it."""
    plain = LLM(variant="none", runtime="eager", max_context=128).generate(PROMPT, PARAMS)[0]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps("unrelated") + "\n\n" + json.dumps(PROMPT + plain.text) + "\n")
    lengths = []
    for file in (None, str(corpus)):
        llm = LLM(variant="ngram_trie", runtime="eager", max_context=128, ngram=NgramSettings(corpus=file))
        output = llm.generate(PROMPT, PARAMS)[0]
        assert output.token_ids == plain.token_ids
        lengths.append(output.metrics.acceptance_length)
    assert lengths[1] > lengths[0] + 1


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("missing.txt", None, "No such file"),
        ("numbers.jsonl", '"a"\n3\n', "document 2: 3"),
        ("words.jsonl", "words\n", "document 1: words"),
    ],
)
def test_a_bad_corpus_is_named(tmp_path: Path, name: str, text: str | None, found: str) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"variant\.ngram\.corpus") as caught:
        TrieProposer(plan("ngram_trie")).load_corpus(str(file), lambda line: [1] * len(line))
    assert found in str(caught.value.found)

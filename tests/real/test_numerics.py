"""On a CPU the target's logits have the bits of plain decoding, whatever drafts: 0 differing tokens and 0 differing logits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphspec import LLM, SamplingParams
from perf import activations
from perf.committed_logits import committed

pytestmark = pytest.mark.full
WORDS = (
    "the", "river", "runs", "through", "a", "town", "where", "old", "books", "tell", "stories", "of", "light", "and", "stone", "what",
    "does", "a", "hash", "map", "do", "with", "two", "equal", "keys",
)  # fmt: skip
ROWS: dict[str, Any] = {"max_rows": 4, "buckets": [4], "max_context": 256, "prefill_chunks": [16, 64]}
DRAFTERS: dict[str, dict[str, Any]] = {
    "chain": {"variant": "ngram", "num_steps": 3, "topk": 1, "num_draft_tokens": 4},
    "tree": {"variant": "ngram", "num_steps": 4, "topk": 4, "num_draft_tokens": 16, "page_size": 1},
    "trie": {"variant": "ngram_trie", "num_steps": 4, "topk": 4, "num_draft_tokens": 16, "page_size": 64},
}


def requests(llm: LLM, count: int, tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of different lengths, which tells them apart; they repeat themselves, so that drafts are right. Every second is sampled."""
    words = [llm.tokenizer.words(f" {word}") for word in WORDS]
    asked = []
    for index in range(count):
        phrase = [token for place in range(5) for token in words[(5 * index + 3 * place) % len(words)]]
        asked.append((12 * phrase)[: index + 15])
    seeded = ({"temperature": 0.0}, {"temperature": 0.8})
    return asked, [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i, **seeded[i % 2]) for i in range(count)]


@pytest.fixture(scope="module")
def plain(real: Path) -> Iterator[tuple[int, int, list[list[int]], dict[tuple[int, int], str]]]:
    count, tokens = 40, 64
    with LLM(real, variant="none", **ROWS) as llm:
        assert llm.plan.numerics == "batch_invariant", "what auto means here"
        outputs, found = committed(llm, *requests(llm, count, tokens))
    yield count, tokens, [out.token_ids for out in outputs], found


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_change_no_bit_of_a_logit(real: Path, plain: Any, drafter: str) -> None:
    count, tokens, expected, logits = plain
    with LLM(real, **ROWS | DRAFTERS[drafter]) as llm:
        outputs, found = committed(llm, *requests(llm, count, tokens))
        assert llm.metrics is not None and llm.metrics.acceptance_length > 1.1, "some drafts are accepted, or the test shows nothing"
        assert llm.metrics.numerics == "batch_invariant"
    assert [out.token_ids for out in outputs] == expected
    assert len(logits) == count * (tokens - 1)
    assert {place: found.get(place) for place in logits} == logits


@pytest.mark.usefixtures("real")
def test_activations_of_8_bits_change_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert activations.main(["--pieces", "4", "--max-tokens", "16", "--out", str(tmp_path)]) == 0
    [file] = tmp_path.glob("*-activations.jsonl")
    full, rounded = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[2:])
    assert (full["activations"], rounded["activations"]) == ("full", "int8") and full["same"] == 1.0
    assert 0.9 < rounded["same"] < 1.0
    for text in ("answers", "documentation"):
        assert 0 < abs(rounded[text] - full[text]) < 0.03
    assert f"int8: {rounded['documentation']:.4f} nats" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--pieces: at most"):
        activations.main(["--pieces", "100000", "--out", str(tmp_path)])

"""Thousands of random schemas, regular expressions and choices: every text parses and is that of plain decoding, for every drafter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from graphspec import LLM, SamplingParams
from tests.support.grammars import parses, random_structured

pytestmark = pytest.mark.full

DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3 chain": {"variant": "eagle3", "num_steps": 4, "topk": 1, "num_draft_tokens": 5},
    "eagle3 tree": {"variant": "eagle3", "num_steps": 4, "topk": 4, "num_draft_tokens": 16},
    "eagle static": {"variant": "eagle"},
    "eagle tree": {"variant": "eagle", "num_steps": 3, "topk": 3, "num_draft_tokens": 10},
    "mtp": {"variant": "mtp", "num_steps": 4, "topk": 1, "num_draft_tokens": 5},
    "standalone": {"variant": "standalone", "num_steps": 3, "topk": 3, "num_draft_tokens": 10},
    "ngram": {"variant": "ngram"},
    "ngram_trie": {"variant": "ngram_trie"},
    "p_eagle": {"variant": "p_eagle"},
    "dflash": {"variant": "dflash"},
}
COUNT = 2000
PROMPTS = ("def fib(n):\n", "class Stack:", "import re\n", "x = ", '    """')


def engine(**keys: Any) -> LLM:
    return LLM(runtime="eager", max_rows=16, buckets=[16], prefill_chunks=[16], **keys)


def requests() -> Iterator[tuple[str, SamplingParams]]:
    rng = random.Random(20)
    for place in range(COUNT):
        temperature = (0.0, 0.7, 1.3)[place % 3]
        yield PROMPTS[place % 5], SamplingParams(max_tokens=160, seed=place, temperature=temperature, structured=random_structured(rng))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    prompts, params = zip(*requests(), strict=True)
    with engine(variant="none") as llm:
        outputs = llm.generate(list(prompts), list(params))
    for param, out in zip(params, outputs, strict=True):
        assert param.structured is not None
        assert out.finish_reason == "stop" and parses(param.structured, out.text), (param, out.text, out.error)
    return [out.token_ids for out in outputs]


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_text_parses_and_is_that_of_plain_decoding(name: str, expected: list[list[int]]) -> None:
    """Each drafter runs the first hundred requests and its own tenth of the rest."""
    mine = [place for place in range(COUNT) if place < 100 or place % len(DRAFTERS) == list(DRAFTERS).index(name)]
    prompts, params = zip(*requests(), strict=True)
    with engine(**DRAFTERS[name]) as llm:
        outputs = llm.generate([prompts[place] for place in mine], [params[place] for place in mine])
    for place, out in zip(mine, outputs, strict=True):
        assert out.token_ids == expected[place], (name, params[place])

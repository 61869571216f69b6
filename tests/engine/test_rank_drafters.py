"""Every drafter on two ranks, over the demo models: the tokens, and the drafts that are accepted, of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from graphspec import LLM, SamplingParams
from tests.support.rank_pair import RankPair, rank_pair

CHAIN = {"num_steps": 4, "topk": 1, "num_draft_tokens": 5}
TREE = {"num_steps": 4, "topk": 3, "num_draft_tokens": 10}
PATHS = {"num_steps": 5, "topk": 3, "num_draft_tokens": 8}
NETWORKS = ("eagle", "eagle3", "mtp", "standalone", "p_eagle", "dflash")
CASES = [
    *(pytest.param(variant, CHAIN, "replicated", id=f"{variant}-chain") for variant in NETWORKS),
    *(pytest.param(variant, TREE, "sharded", id=f"{variant}-tree-sharded") for variant in NETWORKS),
    *(pytest.param(variant, PATHS, "auto", id=variant) for variant in ("ngram", "ngram_trie")),
    *(pytest.param(variant, CHAIN, "sharded", id=f"{variant}-chain-sharded", marks=pytest.mark.kernels) for variant in NETWORKS),
    *(pytest.param(variant, TREE, "replicated", id=f"{variant}-tree", marks=pytest.mark.kernels) for variant in NETWORKS),
]
ENGINE: dict[str, Any] = {"runtime": "eager", "debug": True, "max_rows": 3, "buckets": [3], "prefill_chunks": [32], "max_context": 96}
PROMPTS = ["def fib(n):\n    if n < 2:\n", "class Stack:\n    def __init__(self):\n", "import os\n\nfor name in os.listdir("]
PARAMS = [
    SamplingParams(max_tokens=20, ignore_eos=True),
    SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.8, seed=7),
    SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.1, seed=3),
]
"""Greedy and seeded in one batch, so that one class of programs serves all."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPair]:
    with rank_pair(tmp_path_factory.mktemp("ranks")) as found:
        yield found


def found(llm: LLM) -> tuple[list[list[int]], list[int]]:
    """Tokens, and the cycles they took: as many only if the same drafts are accepted."""
    with llm:
        outputs = llm.generate(PROMPTS, PARAMS)
    return [out.token_ids for out in outputs], [out.metrics.cycles for out in outputs]


@pytest.mark.parametrize(("variant", "shape", "parallel"), CASES)
def test_two_ranks_draft_and_decode_as_one_does(pair: RankPair, variant: str, shape: dict[str, Any], parallel: str) -> None:
    """With a draft network that each rank has all of, or a part of it each."""
    keys = {"variant": variant, **shape, **ENGINE}
    alone = found(LLM("demo", **keys))
    assert found(pair.engine("demo", **keys, draft_parallel=parallel)) == alone
    assert sum(alone[1]) < 3 * 19, "no draft was ever accepted, so the cycles show nothing"

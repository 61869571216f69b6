"""The full cross of settings that must not change the output: shape, page size, batch, run-ahead, runtime, temperature, draft noise."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from graphspec.api.llm import SamplingParams
from tests.support.checkpoints import VOCAB_SIZE, build_hf
from tests.support.engines import CHAIN, TREE, WIDE, Pair, ids, mirror_pair, prompts, random_pair
from tests.support.features import marked

from .test_equality import FAMILIES, case_name, family_of

pytestmark = pytest.mark.full

LENGTH = 28
SHAPES: list[dict[str, Any]] = [{"variant": "none"}, CHAIN, TREE, WIDE]


@pytest.fixture(scope="module")
def misses(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return mirror_pair(tmp_path_factory.mktemp("misses"), noise=0.8)


@pytest.fixture(scope="module")
def sampled(misses: Pair) -> dict[float, list[list[int]]]:
    """Plain decoding of eight prompts; a batch of fewer gives the same rows."""
    llm = misses.llm(variant="none")
    return {t: ids(llm.generate(prompts(8), params(t, 8))) for t in (0.7, 1.0)}


def params(temperature: float, batch: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=i - 3) for i in range(batch)]


@pytest.mark.parametrize(
    ("runtime", "shape", "page_size", "run_ahead"),
    [
        *itertools.product(["eager"], SHAPES, [1, 16], [0, 1, 3]),
        *itertools.product(["compiled"], SHAPES, [1, 16], [1]),
    ],
    ids=case_name,
)
def test_no_setting_changes_the_output(
    misses: Pair, sampled: dict[float, list[list[int]]], runtime: str, shape: dict[str, Any], page_size: int, run_ahead: int
) -> None:
    # Compiled, each program takes a minute or more: one bucket, whose lanes are padded in smaller batches.
    compiled = runtime == "compiled"
    noises = ["coupled"] if "variant" in shape or compiled else ["coupled", "none"]
    buckets = {"buckets": [8], "max_rows": 8} if compiled else {}
    for noise in noises:
        llm = misses.llm(**shape, page_size=page_size, cycles_in_flight=run_ahead + 1, runtime=runtime, draft_noise=noise, **buckets)
        for batch in range(1, 9):
            prompt_ids = prompts(batch)
            expected = [misses.greedy(prompt, LENGTH) for prompt in prompt_ids]
            assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=LENGTH))) == expected, (batch, noise)
            for temperature, tokens in sampled.items():
                assert ids(llm.generate(prompt_ids, params(temperature, batch))) == tokens[:batch], (batch, noise, temperature)


@pytest.mark.parametrize("name", marked(FAMILIES, family_of, "none", "eagle3", "chain", "tree", "compiled"))
def test_every_family_and_shape_compiled(name: str, tmp_path: Any) -> None:
    family, overrides = FAMILIES[name]
    pair = random_pair(tmp_path, build_hf(family, num_hidden_layers=3, eos_token_id=VOCAB_SIZE - 1, **overrides))
    prompt_ids = prompts(4, (12, 1, 25, 8), VOCAB_SIZE)
    expected = [pair.greedy(prompt, 30) for prompt in prompt_ids]
    for shape in ({"variant": "none"}, CHAIN, WIDE):
        llm = pair.llm(**shape, runtime="compiled", buckets=[4], max_rows=4)
        assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=30))) == expected

"""Compiled cycles of every drafter give the target's own tokens; one small program each, because compiling is slow."""

from __future__ import annotations

from typing import Any

import pytest

from graphspec.api.llm import SamplingParams
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.engines import ids, prompts
from tests.support.variants import Family

from .test_variants import make, name_of, of_llama, variant_of

pytestmark = pytest.mark.kernels

CASES: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {"num_steps": 2, "topk": 3, "num_draft_tokens": 6}),
    ("eagle", {"tree_choices": [[0], [1], [0, 0], [1, 0]]}),
    ("mtp-1", {"num_steps": 2, "topk": 1, "num_draft_tokens": 3}),
    ("mtp-3", {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}),
    ("standalone", {"num_steps": 2, "topk": 2, "num_draft_tokens": 5}),
    ("ngram", {"num_steps": 3, "topk": 2, "num_draft_tokens": 6}),
    ("ngram_trie", {"num_steps": 3, "topk": 2, "num_draft_tokens": 6}),
]


@pytest.mark.parametrize(
    ("name", "shape"),
    [pytest.param(*case, marks=(pytest.mark.covers(variant_of(case[0]), "compiled"), of_llama(*case, "compiled"))) for case in CASES],
    ids=name_of,
)
def test_compiled_cycles_give_the_targets_own_tokens(family: Family, name: str, shape: dict[str, Any]) -> None:
    run_ahead = 0 if name == "ngram_trie" else 1
    llm = make(family, name, shape, runtime="compiled", buckets=[4], max_rows=4, cycles_in_flight=run_ahead + 1)
    prompt_ids = prompts(5, vocab=VOCAB_SIZE)
    assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=20))) == [family.pair.greedy(prompt, 20) for prompt in prompt_ids]
    compiled = llm.cycle.compilations.graphs
    llm.generate(prompt_ids[:3], SamplingParams(max_tokens=20))
    assert llm.cycle.compilations.graphs == compiled, "nothing is compiled after the warm-up"


def test_so_do_single_ops_with_compiled_code_around_them(family: Family) -> None:
    """The path that is compiled as for a GPU, where the choice falls on each op by itself."""
    name, shape = CASES[0]
    single = {"attention": "native", "linear": "native"}
    llm = make(family, name, shape, runtime="compiled", buckets=[2], max_rows=2, cycles_in_flight=2, **single)
    assert set(llm.decoders.values()) == {"op by op: set by kernels.mode, kernels.linear or kernels.attention"}
    prompt_ids = prompts(3, vocab=VOCAB_SIZE)
    assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=20))) == [family.pair.greedy(prompt, 20) for prompt in prompt_ids]

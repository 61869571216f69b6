"""On a CPU by native kernels: tokens and all logits are those of plain decoding, bit for bit, with every drafter (docs/numerics.md).

The output layer has every row twice, so that tokens tie.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from graphspec import LLM
from tests.support.law import CHAIN, NETWORKS, SHAPES, TREE, Found, answered, assert_same, preempting, requests, write_family

KEYS: dict[str, Any] = {
    "runtime": "compiled", "max_rows": 2, "buckets": [1, 2], "max_context": 64, "prefill_chunks": [4, 8], "sampling_classes": ["noise"],
}  # fmt: skip
COUNT, TOKENS = 5, 20


class Family:
    def __init__(self, path: Path) -> None:
        self.folders = write_family(path)
        with self.llm("none", page_size=16) as llm:
            assert llm.plan.numerics == "batch_invariant", "what auto means here"
            self.plain: Found = answered(llm, requests(COUNT, TOKENS))

    def llm(self, variant: str, **keys: Any) -> LLM:
        draft = None if variant == "none" else self.folders[variant]
        return LLM(self.folders["none"], variant=variant, draft=draft, **{**KEYS, **keys})


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp("law"))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "variant",
    ["ngram", "ngram_trie", *NETWORKS],
)
def test_every_drafter_keeps_the_bits(family: Family, variant: str, shape: str) -> None:
    with family.llm(variant, **SHAPES[shape], page_size=1 if shape == "chain" else 64) as llm:
        found = answered(llm, requests(COUNT, TOKENS))
        assert llm.metrics is not None and llm.metrics.numerics == "batch_invariant"
        assert llm.metrics.acceptance_length > 1, "some drafts are accepted, or the test shows nothing"
    assert_same(found, family.plain)


@pytest.mark.parametrize("variant", ["none", "ngram", pytest.param("eagle3", marks=pytest.mark.full)])
def test_preemption_at_every_cycle(family: Family, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read again in other chunks each time."""
    shape = {} if variant == "none" else TREE
    with family.llm(variant, **shape, page_size=4, prefix_cache=False) as llm:
        times = preempting(monkeypatch)
        found = answered(llm, requests(COUNT, TOKENS))
    assert len(times) > TOKENS, "rows were preempted again and again, or the test shows nothing"
    assert_same(found, family.plain)


def test_prefix_hits(family: Family) -> None:
    """The same prompts again, longer by the tokens that followed: their pages are found, and only the rest is read."""
    asked, params = requests(COUNT, TOKENS)
    longer = [[*prompt, *tokens[:9]] for prompt, tokens in zip(asked, family.plain[0], strict=True)]
    found: list[Found] = []
    for shared in (False, True):
        with family.llm("ngram", **TREE, page_size=4, prefix_cache=shared) as llm:
            if shared:
                llm.generate(asked, params)
            found.append(answered(llm, (longer, params)))
            assert llm.metrics is not None and (llm.metrics.cached_tokens > 0) == shared
    assert_same(found[1], found[0])
    assert [tokens[:9] for tokens in found[0][0][::2]] == [tokens[9:18] for tokens in family.plain[0][::2]], "greedy rows go on as they did"


@pytest.mark.parametrize("variant", ["ngram", pytest.param("mtp", marks=pytest.mark.full)])
def test_cycles_in_flight(family: Family, variant: str) -> None:
    with family.llm(variant, **CHAIN, page_size=4, cycles_in_flight=3) as llm:
        assert_same(answered(llm, requests(COUNT, TOKENS)), family.plain)


def test_kv_in_16_bits(family: Family) -> None:
    found = []
    for variant, shape in (("none", {}), ("eagle3", TREE)):
        with family.llm(variant, **shape, page_size=16, kv_dtype="bfloat16") as llm:
            assert llm.plan.numerics == "batch_invariant"
            found.append(answered(llm, requests(COUNT, TOKENS)))
    assert_same(found[1], found[0])
    assert found[0][1] != family.plain[1], "16 bits are other numbers"


def test_the_same_kernels_serve_both_numerics(family: Family) -> None:
    """So the law costs nothing here."""
    with family.llm("ngram", **TREE, numerics="fast") as fast, family.llm("ngram", **TREE) as law:
        assert (fast.plan.numerics, law.plan.numerics) == ("fast", "batch_invariant") and fast.decoders == law.decoders
        kernels = [{one.name: getattr(llm.cycle.kernels, one.name) for one in fields(llm.cycle.kernels)} for llm in (fast, law)]
        assert kernels[0] == kernels[1]
        assert_same(answered(fast, requests(COUNT, TOKENS)), family.plain)

"""Grammars with one-pass drafters and hybrid targets: tokens are those of plain decoding with the same grammar and seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from graphspec import SamplingParams, Structured
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.engines import CHAIN, TREE, Pair, prompts, random_pair
from tests.support.grammars import add_characters, parses
from tests.support.hybrid_checkpoints import EOS, build_hybrid
from tests.support.parallel_checkpoints import ParallelDraft, favouring_target, parallel_drafts

if TYPE_CHECKING:
    from graphspec import LLM

RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-f]{1,5}$"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
NESTED = Structured(grammar='root ::= "(" root ")" | "x"')
KINDS = (
    Structured(json_schema=RECORD, any_whitespace=False), None, Structured(regex="(ab|cd){3,6}x"), NESTED,
    Structured(choice=["name", "named", "me too"]), Structured(regex="[a-z]{4,9}[.]"),
)  # fmt: skip
Found = list[tuple[list[int], str, str]]


def run(llm: LLM) -> Found:
    """Every kind greedy and sampled, filtered and penalised, in one batch."""
    params = [
        SamplingParams(max_tokens=40, seed=9 + place, temperature=heat, top_p=0.95, repetition_penalty=penalty, structured=kind)
        for heat, penalty in ((0.0, 1.0), (0.9, 1.0), (0.9, 1.2))
        for place, kind in enumerate(KINDS)
    ]
    with llm:
        outputs = llm.generate(prompts(len(params), (3, 9, 17, 5), VOCAB_SIZE), params)
    for param, out in zip(params, outputs, strict=True):
        assert out.error is None, (param, out.error)
        if param.structured is not None and param.structured is not NESTED:
            assert out.finish_reason == "stop" and parses(param.structured, out.text), (param, out.text)
    return [(out.token_ids, out.text, out.finish_reason) for out in outputs]


@pytest.fixture(scope="module")
def favouring(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    made = favouring_target(tmp_path_factory.mktemp("favouring"))
    add_characters(made.target, VOCAB_SIZE, VOCAB_SIZE - 2)
    return made


@pytest.fixture(scope="module")
def drafts(favouring: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ParallelDraft]:
    return parallel_drafts(favouring, tmp_path_factory.mktemp("drafts"))


@pytest.fixture(scope="module")
def expected(favouring: Pair) -> Found:
    return run(favouring.llm(variant="none", max_rows=8))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("jetspec", TREE), ("sliding", CHAIN), ("speculators", TREE), ("reduced", TREE), ("full", CHAIN)],
    ids=["dflash-tree", "dflash-chain", "dflash-own-vocabulary", "p_eagle-tree", "p_eagle-chain"],
)
def test_drafters_of_one_pass_give_the_tokens_of_plain_decoding(
    favouring: Pair, drafts: dict[str, ParallelDraft], expected: Found, name: str, shape: dict[str, int]
) -> None:
    assert run(drafts[name].llm(favouring, **shape, max_rows=8)) == expected


@pytest.mark.parametrize("name", ["jetspec", "reduced"])
def test_forced_text_is_accepted_by_drafters_that_do_not_know_it(favouring: Pair, drafts: dict[str, ParallelDraft], name: str) -> None:
    """One spelling of twelve tokens and an end: as fast as the depth allows, in drafts that know neither token."""
    with drafts[name].llm(favouring, **CHAIN) as llm:
        params = SamplingParams(structured=Structured(regex="(z7){6}"), max_tokens=40)
        [out] = llm.generate([[5, 9, 11]], params)
    assert out.text == "z7" * 6 and len(out.token_ids) == 13
    assert len(out.timing.cycle_tokens) == -(-12 // (CHAIN["num_steps"] + 1))


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_hybrid_targets_give_the_tokens_of_plain_decoding(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """States of recurrent layers are verified over the draft, and committed along what the masks left."""
    made = random_pair(tmp_path_factory.mktemp(family), build_hybrid(family))
    add_characters(made.target, VOCAB_SIZE, EOS)
    ways: list[dict[str, Any]] = [{"variant": "none"}, CHAIN, TREE, {"variant": "ngram", **TREE}, {"variant": "ngram_trie", **TREE}]
    right, *others = (run(made.llm(**keys, max_rows=8, page_size=4)) for keys in ways)
    for keys, found in zip(ways[1:], others, strict=True):
        assert found == right, keys

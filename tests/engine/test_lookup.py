"""Cycles that are as deep as what there is to copy: what the host knows of it, and that no token changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphspec.api.llm import LLM, SamplingParams
from graphspec.config.schema import NgramSettings
from graphspec.engine.lookup import RepeatIndex
from graphspec.kernels.tree.ngram_match import match_rows
from tests.support.engines import ids, prompts
from tests.support.variants import Family

DEPTH, DEPTHS = 4, [0, 1, 2]
CHAIN = {"num_steps": DEPTH, "topk": 1, "num_draft_tokens": DEPTH + 1}


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=24),
    st.integers(1, 23),
    st.lists(st.integers(1, 5), max_size=8),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_the_host_knows_what_the_device_finds(text: list[int], prompt: int, steps: list[int], window: int, depth: int, paths: int) -> None:
    """However the text grew: nothing is drafted exactly where the index says so, and never more than it says."""
    cut = min(prompt, len(text))
    index, output = RepeatIndex(window), list[int]()
    for step in [0, *steps, len(text)]:
        output += text[cut + len(output) :][:step]
        drafts = index.follow(text[:cut], output)
        tokens = torch.tensor([[*text[:cut], *output]])
        score, _, _ = match_rows(tokens, torch.tensor([tokens.shape[1]]), paths, depth, window, window + 2)
        found = max((entry // paths + 1 for entry, value in enumerate(score[0].tolist()) if value > float("-inf")), default=0)
        assert (drafts > 0) == (found > 0) and found <= drafts


def repeating(count: int) -> list[list[int]]:
    """Prompts that hold the same tokens twice, and one that does not."""
    return [[*(part := [5 + 7 * i + j for j in range(6)]), *part] for i in range(count - 1)] + prompts(1, vocab=40)


@pytest.mark.parametrize("name", ["ngram", "ngram_trie"])
@pytest.mark.parametrize("shape", [CHAIN, {"num_steps": DEPTH, "topk": 3, "num_draft_tokens": 9}], ids=["chain", "tree"])
def test_no_token_changes_and_no_cycle_is_wider_than_it_must_be(family: Family, name: str, shape: dict[str, Any]) -> None:
    params = [SamplingParams(max_tokens=20, ignore_eos=True, temperature=t, seed=3) for t in (0.0, 0.9, 0.0)]
    given_ids = repeating(3)
    expected = ids(family.llm("none").generate(given_ids, params))
    llm = family.llm(name, **shape, depths=DEPTHS, max_rows=3, buckets=[1, 3])
    assert ids(llm.generate(given_ids, params)) == expected
    fresh = family.llm(name, **shape, depths=DEPTHS, max_rows=1, buckets=[1])
    fresh.depth_policy = Deepest()
    ngram = NgramSettings()
    seen = set()
    for prompt, one, tokens in zip(given_ids, params, expected, strict=True):
        [output] = fresh.generate([prompt], one)
        assert output.token_ids == tokens
        assert output.timing is not None
        place = 1
        for length, depth in zip(output.timing.cycle_tokens, output.timing.cycle_depths, strict=True):
            if name == "ngram":
                drafts = min(RepeatIndex(ngram.min_window).follow(prompt, tokens[:place]), DEPTH)
                assert depth == min(some for some in (*DEPTHS, DEPTH) if some >= drafts)
            assert length <= depth + 1
            seen.add(depth)
            place += length
    assert {0, DEPTH} <= seen


class Deepest:
    """Always as deep as there is something to draft; never learns."""

    def choose(self, bucket: int, lanes: int, drafts: int | None) -> int:
        assert drafts is not None
        return min(some for some in (*DEPTHS, DEPTH) if some >= min(drafts, DEPTH))

    def observe(self, bucket: int, depth: int, accepted: Any) -> None:
        assert all(run <= depth for run in accepted)


def test_cycles_in_flight_hide_what_there_is_to_draft(family: Family) -> None:
    """The host is then a cycle behind: every cycle has the depth that the policy chooses."""

    class Told(Deepest):
        def choose(self, bucket: int, lanes: int, drafts: int | None) -> int:
            assert drafts is None
            return DEPTH

    llm = family.llm("ngram", **CHAIN, depths=DEPTHS, max_rows=1, buckets=[1], cycles_in_flight=2)
    llm.depth_policy = Told()
    [output] = llm.generate(repeating(2)[:1], SamplingParams(max_tokens=12, ignore_eos=True))
    assert output.timing is not None and set(output.timing.cycle_depths) == {DEPTH}


def test_a_policy_that_comes_later_meets_no_older_count(family: Family) -> None:
    """Lanes come and go while no policy asks: what an earlier one was told is of other lanes."""
    llm = family.llm("ngram", **CHAIN, depths=DEPTHS, max_rows=3, buckets=[1, 3])
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = ids(llm.generate(repeating(3), params))
    for policy in (Deepest(), None, Deepest()):
        llm.depth_policy = policy
        llm.draft_tree(repeating(2)[0])
        assert llm._engine.scheduler._found is None
        assert ids(llm.generate(repeating(3)[: 1 if policy is None else 3], params)) == expected[: 1 if policy is None else 3]


def test_a_request_that_drafts_less_gets_shallower_cycles(family: Family) -> None:
    llm = family.llm("ngram", **CHAIN, depths=DEPTHS, max_rows=1, buckets=[1])
    llm.depth_policy = Deepest()
    [output] = llm.generate(repeating(2)[:1], SamplingParams(max_tokens=16, ignore_eos=True, num_steps=1))
    assert output.timing is not None and set(output.timing.cycle_depths) <= {0, 1}


def test_shares_are_those_of_drafts_that_were_found(family: Family) -> None:
    """Cycles without anything to draft teach the policy nothing, and a lane with fewer drafts than the cycle has room for neither."""
    learned: list[tuple[int, list[int]]] = []

    class Learner(Deepest):
        def observe(self, bucket: int, depth: int, accepted: Any) -> None:
            learned.append((depth, list(accepted)))

    llm = family.llm("ngram", **CHAIN, depths=DEPTHS, max_rows=1, buckets=[1])
    llm.depth_policy = Learner()
    [output] = llm.generate(prompts(1, vocab=40), SamplingParams(max_tokens=20, ignore_eos=True))
    assert output.timing is not None
    depths = output.timing.cycle_depths
    assert 0 in depths and [depth for depth, _ in learned] == [depth for depth in depths if depth]


def test_a_trie_drafts_in_cycles_of_any_depth(tmp_path: Path) -> None:
    """On the demo model, where the second request repeats the first."""
    keys: dict[str, Any] = {"runtime": "eager", "max_context": 256, "max_rows": 1, "buckets": [1]}
    prompt, params = "def is_even(number):", SamplingParams(max_tokens=40, ignore_eos=True)
    plain = LLM(variant="none", **keys).generate(prompt, params)[0].token_ids
    with LLM(variant="ngram_trie", num_steps=6, topk=1, depths=[0, 1, 3], **keys) as llm:
        first, second = (llm.generate(prompt, params)[0] for _ in range(2))
    assert first.token_ids == second.token_ids == plain
    assert first.timing is not None and second.timing is not None
    assert 0 in first.timing.cycle_depths and len(second.timing.cycle_depths) < len(first.timing.cycle_depths)

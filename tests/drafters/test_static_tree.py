"""Static trees (EAGLE-1): which trees are valid, and that every node holds the continuation of its path of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphspec.api.llm import LLM, SamplingParams
from graphspec.errors import ConfigError
from graphspec.plan.static_tree import StaticTree
from graphspec.shapes import CycleShape
from tests.support.engines import Pair, ids, mirror_pair, prompts

# The 25 nodes of EAGLE-1's default tree, without the root.
MC_SIM = [
    [0], [1], [2], [3], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [2, 1], [3, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0],
    [0, 1, 1], [0, 2, 0], [0, 2, 1], [1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1],
]  # fmt: skip
GAPS = [[2], [0], [0, 1], [2, 0], [2, 0, 3]]
CHAIN = [[0], [0, 0], [0, 0, 0]]


@pytest.fixture(scope="module")
def misses(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return mirror_pair(tmp_path_factory.mktemp("misses"), noise=0.8)


def test_shape_and_numbering():
    tree = StaticTree.of(MC_SIM)
    assert tree.shape == CycleShape(5, 4, 26, "nodes")
    assert [len(tree.level(d)) for d in range(1, 6)] == [4, 8, 8, 3, 2]
    assert [len(tree.expanded(d)) for d in range(1, 5)] == [4, 4, 1, 1]
    for node, path in enumerate(tree.choices):
        assert tree.parent(node) < node
        assert tree.rank(node) == path[-1]
    assert StaticTree.of(reversed(MC_SIM)) == tree
    assert StaticTree.of(CHAIN).shape == CycleShape(3, 1, 4)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "non-empty"),
        ([[]], "non-empty"),
        ([[0], [0]], "twice"),
        ([[0], [0, -1]], "ranks from 0"),
        ([[0], [1, 0]], r"\[1\], parent of \[1, 0\]"),
    ],
)
def test_what_is_no_tree(choices: list[list[int]], message: str):
    with pytest.raises(ConfigError, match=message):
        StaticTree.of(choices)


@pytest.mark.covers("eagle3", "static tree")
@pytest.mark.parametrize("choices", [MC_SIM, GAPS, CHAIN], ids=["eagle-1", "gaps", "chain"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_output_is_the_targets_own(misses: Pair, choices: list[list[int]], page_size: int):
    llm = misses.llm(tree_choices=choices, page_size=page_size, cycles_in_flight=2)
    prompt_ids = prompts(5)
    assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=20))) == [misses.greedy(prompt, 20) for prompt in prompt_ids]
    plain = misses.llm(variant="none")
    params = [SamplingParams(max_tokens=20, temperature=1.0, seed=i) for i in range(5)]
    assert ids(llm.generate(prompt_ids, params)) == ids(plain.generate(prompt_ids, params))


def test_nodes_hold_the_ranks_of_a_tree_that_has_them_all(misses: Pair):
    """A dynamic tree of the same depth and fan-out that keeps every candidate must contain the static one, path by path."""
    dynamic = misses.llm(num_steps=2, topk=4, num_draft_tokens=21)
    static = misses.llm(tree_choices=[path for path in MC_SIM if len(path) <= 2])
    prompt = prompts(1, (9,))[0]

    def paths(llm: LLM) -> set[tuple[int, ...]]:
        tree = llm.draft_tree(prompt)
        found: list[tuple[int, ...]] = []
        for token, parent in zip(tree.token_N, tree.parent_N, strict=True):
            found.append((*found[parent], token) if parent >= 0 else (token,))
        return set(found)

    assert len(paths(dynamic)) == 21
    assert len(paths(static)) == 13
    assert paths(static) < paths(dynamic)


def test_a_draft_equal_to_its_target_is_accepted_to_the_end(tmp_path: Path):
    pair = mirror_pair(tmp_path)
    llm = pair.llm(tree_choices=MC_SIM)
    llm.generate(prompts(3, (9, 4)), SamplingParams(max_tokens=36, ignore_eos=True))
    assert llm.metrics is not None
    assert llm.metrics.acceptance_length == 6


def test_settings_that_contradict_a_static_tree(misses: Pair):
    with pytest.raises(ConfigError, match="the tree says them"):
        misses.llm(tree_choices=CHAIN, num_steps=3)
    with pytest.raises(ConfigError, match="only a drafter with one network"):
        misses.llm(variant="ngram", tree_choices=CHAIN)

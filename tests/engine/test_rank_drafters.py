"""Every drafter on two ranks, over the demo models: the tokens, and the drafts that are accepted, of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rank_pair import CHAIN, NETWORKS, PATHS, TREE, RankPair, assert_same_drafts, rank_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPair]:
    with rank_pair(tmp_path_factory.mktemp("ranks")) as found:
        yield found


@pytest.mark.parametrize("variant", NETWORKS)
def test_a_chain_by_a_network_that_each_rank_has_all_of(pair: RankPair, variant: str) -> None:
    assert_same_drafts(pair, variant, CHAIN, draft_parallel="replicated")


@pytest.mark.parametrize("variant", NETWORKS)
def test_a_tree_by_a_network_of_which_each_rank_has_a_part(pair: RankPair, variant: str) -> None:
    assert_same_drafts(pair, variant, TREE, draft_parallel="sharded")


@pytest.mark.parametrize("variant", ["ngram", "ngram_trie"])
def test_drafters_without_a_network(pair: RankPair, variant: str) -> None:
    assert_same_drafts(pair, variant, PATHS)

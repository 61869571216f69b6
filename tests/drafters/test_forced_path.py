"""The run that a grammar forces, in the pool of the device matcher, against sets of paths."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphspec.kernels.groups import Candidates
from graphspec.kernels.native.cycle import forced_run as native_forced_run
from graphspec.kernels.tree.forced_run import forced_run
from graphspec.kernels.tree.ngram_match import match_rows
from graphspec.kernels.tree.tree_build import tree_build
from tests.kernels.test_ngram_match import Path, batch, problems

Pool = tuple[Tensor, Tensor, Tensor]


def scores_of(pool: Pool, lane: int, num_paths: int) -> dict[Path, tuple[float, int]]:
    """Score and column of every used entry, by its tokens from the root on; checks that entries hang one level below their parents."""
    score_M, token_M, parent_M = (x[lane].tolist() for x in pool)
    paths: dict[int, Path] = {-1: ()}
    found: dict[Path, tuple[float, int]] = {}
    for place, (score, token, parent) in enumerate(zip(score_M, token_M, parent_M, strict=True)):
        assert (token >= 0) == (score > -math.inf)
        if token < 0:
            assert parent == -1
            continue
        paths[place] = (*paths[parent], token)
        assert len(paths[place]) == place // num_paths + 1
        assert paths[place] not in found, "siblings differ"
        found[paths[place]] = score, place % num_paths
    return found


@st.composite
def runs(draw: Any, pool: Pool, lane: int, num_paths: int, depth: int) -> Path:
    """Nothing, any tokens, or what begins as the pool does."""
    known = sorted(scores_of(pool, lane, num_paths))
    begin = draw(st.sampled_from([(), *known]))
    rest = draw(st.lists(st.integers(0, 3), max_size=depth - len(begin)))
    return (*begin, *rest)


@given(problems(), st.data())
@settings(max_examples=300, deadline=None)
def test_the_run_comes_first_and_what_it_does_not_displace_stays(
    problem: tuple[list[list[int]], int, int, int, int, int], data: Any
) -> None:
    histories, width, num_paths, depth, low, high = problem
    history, length = batch(histories, width, 1)
    pool = match_rows(history, length, num_paths, depth, low, high)
    forced_runs = [data.draw(runs(pool, lane, num_paths, depth)) for lane in range(len(histories))]
    forced_BS = torch.tensor([[*run, *[-1] * (depth - len(run))] for run in forced_runs])
    found = forced_run(*pool, forced_BS)
    native = Candidates(*(x.clone() for x in pool))
    native_forced_run(forced_BS, native)
    assert all(torch.equal(x, y) for x, y in zip(found, native, strict=True))
    assert [x.dtype for x in found] == [x.dtype for x in pool] and [x.shape for x in found] == [x.shape for x in pool]
    nodes = data.draw(st.integers(1, num_paths * depth + 1))
    token_BN, parent_BN, _, _ = tree_build(*found, torch.zeros(len(histories), dtype=torch.int64), nodes, 1, depth)
    for lane, run in enumerate(forced_runs):
        before, after = (scores_of(each, lane, num_paths) for each in (pool, found))
        if not run:
            assert after == before
            continue
        prefixes = {run[:d]: -float(d - 1) for d in range(1, len(run) + 1)}
        kept = {path for path, (_, column) in before.items() if run in before or column < num_paths - 1} - set(prefixes)
        assert {path: score for path, (score, _) in after.items()} == prefixes | {path: before[path][0] - depth for path in kept}
        # The run is in the tree, as far as the tree has nodes.
        at = 0
        for token in run[: nodes - 1]:
            at = next(node for node in range(1, nodes) if int(parent_BN[lane, node]) == at and int(token_BN[lane, node]) == token)


def test_a_chain_goes_on_after_a_run_that_it_begins_with() -> None:
    """And gives way to one that it does not begin with."""
    pool = (torch.tensor([[0.0, -1.0, -2.0]] * 3), torch.tensor([[7, 8, 9]] * 3), torch.tensor([[-1, 0, 1]] * 3))
    score, token, parent = forced_run(*pool, torch.tensor([[7, 8, -1], [7, 5, -1], [-1, -1, -1]]))
    assert token.tolist() == [[7, 8, 9], [7, 5, -1], [7, 8, 9]]
    assert parent.tolist() == [[-1, 0, 1], [-1, 0, -1], [-1, 0, 1]]
    assert score.tolist() == [[0.0, -1.0, -5.0], [0.0, -1.0, -math.inf], [0.0, -1.0, -2.0]]

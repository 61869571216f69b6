"""The device matcher against lists and tuples, alone and through ``tree_build``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphspec.kernels.groups import Candidates
from graphspec.kernels.native.cycle import ngram_match as native_match
from graphspec.kernels.tree.ngram_match import match_rows
from graphspec.kernels.tree.tree_build import tree_build
from graphspec.plan.buffers import Status

Path = tuple[int, ...]
Entry = tuple[float, int, int]
NOTHING: Entry = (-math.inf, -1, -1)


def occurrences(history: list[int], depth: int, min_match: int, max_match: int) -> list[tuple[int, int, Path]]:
    """(matched tokens, place, continuation) of every place that counts."""
    found = []
    for place in range(len(history) - 1):
        matched = 0
        while matched < min(max_match, place + 1) and history[place - matched] == history[-1 - matched]:
            matched += 1
        if matched >= min_match:
            found.append((matched, place, tuple(history[place + 1 :][:depth])))
    return found


def best_paths(history: list[int], num_paths: int, depth: int, min_match: int, max_match: int) -> list[Path]:
    found = occurrences(history, depth, min_match, max_match)
    paths: list[Path] = []
    for _, _, start in sorted(found, reverse=True):
        if len(paths) < num_paths and not any(path[: len(start)] == start for path in paths):
            paths.append(max((len(c), matched, place, c) for matched, place, c in found if c[: len(start)] == start)[-1])
    return paths


def pool_of(paths: list[Path], num_paths: int, depth: int) -> list[Entry]:
    index: dict[Path, int] = {}
    pool = [NOTHING] * (num_paths * depth)
    for k, path in enumerate(paths):
        for d in range(1, len(path) + 1):
            if path[:d] not in index:
                index[path[:d]] = (d - 1) * num_paths + k
                pool[index[path[:d]]] = (-float(d - 1 + 4 * k), path[d - 1], index.get(path[: d - 1], -1))
    return pool


def as_entries(result: tuple[Tensor, Tensor, Tensor], lane: int) -> list[Entry]:
    return list(zip(*(x[lane].tolist() for x in result), strict=True))


def batch(histories: list[list[int]], width: int, garbage: int) -> tuple[Tensor, Tensor]:
    """Histories side by side; after each, values that look like tokens or like nothing at all."""
    rows = [[*h, *((garbage * (i + 1)) % 7 - 2 for i in range(width - len(h)))] for h in histories]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width), torch.tensor([len(h) for h in histories])


@st.composite
def problems(draw: Any) -> tuple[list[list[int]], int, int, int, int, int]:
    width, vocab = draw(st.integers(1, 24)), draw(st.integers(1, 4))
    tokens = st.lists(st.integers(0, vocab - 1), max_size=width)
    loops = st.builds(lambda unit, times: (unit * times)[:width], st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, 9))
    histories = draw(st.lists(st.one_of(tokens, loops), min_size=1, max_size=3))
    low, high = sorted((draw(st.integers(1, 5)), draw(st.integers(1, 30))))
    return histories, width, draw(st.integers(1, 5)), draw(st.integers(1, 6)), low, high


@given(problems(), st.integers(0, 50))
@settings(max_examples=300, deadline=None)
def test_pool_is_that_of_the_oracle(problem: tuple[list[list[int]], int, int, int, int, int], garbage: int) -> None:
    histories, width, num_paths, depth, low, high = problem
    history, length = batch(histories, width, garbage)
    result = match_rows(history, length, num_paths, depth, low, high)
    assert [x.dtype for x in result] == [torch.float32, torch.int64, torch.int64]
    assert all(x.shape == (len(histories), num_paths * depth) for x in result)
    for lane, tokens in enumerate(histories):
        paths = best_paths(tokens, num_paths, depth, low, high)
        assert not any(a != b and a[: len(b)] == b for a in paths for b in paths) and len(set(paths)) == len(paths)
        assert as_entries(result, lane) == pool_of(paths, num_paths, depth)


@given(problems(), st.integers(0, 50))
@settings(max_examples=300, deadline=None)
def test_pool_in_cpp_is_that_of_the_oracle(problem: tuple[list[list[int]], int, int, int, int, int], garbage: int) -> None:
    """Rows in another order than lanes, and one that is not live."""
    histories, width, num_paths, depth, low, high = problem
    history, length = batch([*histories, []], width, garbage)
    lanes = len(histories) + 1
    pool = (torch.full((lanes, num_paths * depth), fill) for fill in (math.nan, 99, 99))
    candidates = Candidates(*pool)
    status = torch.where(length > 0, int(Status.LIVE), int(Status.FREE))
    native_match(history, torch.arange(lanes - 1, -1, -1), status, length - 1, candidates, num_paths, depth, low, high)
    for lane, tokens in enumerate([[], *reversed(histories)]):
        assert as_entries(tuple(candidates), lane) == pool_of(best_paths(tokens, num_paths, depth, low, high), num_paths, depth)


@given(problems(), st.data())
@settings(max_examples=150, deadline=None)
def test_every_path_of_the_tree_followed_the_suffix_before(problem: tuple[list[list[int]], int, int, int, int, int], data: Any) -> None:
    histories, width, num_paths, depth, low, high = problem
    histories = [h or [0] for h in histories]
    history, length = batch(histories, width, 3)
    score, token, parent = match_rows(history, length, num_paths, depth, low, high)
    num_nodes = data.draw(st.integers(1, num_paths * depth + 1))
    root = history.gather(1, length[:, None] - 1)[:, 0]
    tokens, parents, depths, _ = tree_build(score, token, parent, root, num_nodes, 1, depth)
    for lane, known in enumerate(histories):
        followed = {c[:d] for _, _, c in occurrences(known, depth, low, high) for d in range(1, depth + 1)}
        paths: dict[int, Path] = {0: ()}
        for node in range(1, num_nodes):
            if int(parents[lane, node]) >= 0:
                paths[node] = (*paths[int(parents[lane, node])], int(tokens[lane, node]))
                assert len(paths[node]) == int(depths[lane, node])
        assert set(paths.values()) - {()} <= followed
        assert len(set(paths.values())) == len(paths), "siblings differ"
        # A candidate never outranks its parent, so the N - 1 best of the pool hang together and no place is lost.
        assert len(paths) - 1 == min(num_nodes - 1, int((score[lane] > -math.inf).sum()))


def paths_of(history: list[int], num_paths: int, depth: int, low: int, high: int) -> list[Path]:
    _, token, parent = match_rows(torch.tensor([history]), torch.tensor([len(history)]), num_paths, depth, low, high)
    paths: dict[int, Path] = {-1: ()}
    for m in range(num_paths * depth):
        if int(token[0, m]) >= 0:
            paths[m] = (*paths[int(parent[0, m])], int(token[0, m]))
    return [p for p in paths.values() if p and not any(q[: len(p)] == p and q != p for q in paths.values())]


def test_longer_matches_win_then_recent_ones() -> None:
    #          |1 2 3| 4     |9 3| 5     |8 3| 6
    history = [1, 2, 3, 4, 0, 9, 3, 5, 0, 8, 3, 6, 0, 1, 2, 3]
    assert [paths_of(history, k, 1, 1, 3) for k in (1, 2, 3, 9)] == [[(4,)], [(4,), (6,)], [(4,), (6,), (5,)], [(4,), (6,), (5,)]]
    assert paths_of(history, 9, 1, 2, 3) == [(4,)]
    assert paths_of(history, 1, 1, 1, 1) == [(6,)], "counted up to max_match, the three matches are equals"


def test_copies_take_one_path_and_a_loop_fills_it() -> None:
    assert paths_of([5, 1, 2, 3] * 3 + [5], 2, 3, 1, 4) == [(1, 2, 3)]
    assert paths_of([7] * 10, 1, 6, 1, 3) == [(7,) * 6]
    assert paths_of([4, 6] * 5, 1, 7, 2, 3) == [(4, 6, 4, 6, 4, 6, 4)]
    assert paths_of([1, 8, 9, 1, 8, 7, 0, 1], 4, 3, 1, 4) == [(8, 7, 0), (8, 9, 1)]


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_too_little_history_is_no_match(length: int) -> None:
    """Known tokens and garbage are all the same value: only the length says that there is nothing to match."""
    result = match_rows(torch.zeros(1, 6, dtype=torch.int64), torch.tensor([length]), 2, 3, 3, 4)
    assert as_entries(result, 0) == [NOTHING] * 6


def test_memory_grows_with_the_history_not_with_its_square() -> None:
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
            return result

    lanes, width, depth = 2, 512, 4
    with Largest() as watch:
        match_rows(torch.randint(0, 3, (lanes, width)), torch.tensor([width, 100]), 5, depth, 1, 8)
    assert 0 < watch.elements <= lanes * (width + depth) * depth

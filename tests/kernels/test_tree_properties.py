"""Tree stages against slow oracles written from the contract alone."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphspec.kernels import op_of
from graphspec.kernels.attention.kv_move import kv_move
from graphspec.kernels.tree.tree_build import causal_words, tree_build
from graphspec.kernels.tree.tree_walk import tree_walk
from tests.kernels.cases import cases_of
from tests.kernels.cases.tree import candidate_pool
from tests.support.tree_forms import links_from_parents

KV_MOVE = op_of("kv_move")

Node = tuple[int, int, int, set[int]]


def build_oracle(score: list[float], token: list[int], parent: list[int], root: int, num_nodes: int, max_depth: int) -> list[Node]:
    """(token, parent, depth, ancestors) of every node, by dictionaries and recursion."""
    clean = [-math.inf if math.isnan(s) else s for s in score]
    chosen = sorted(sorted(range(len(score)), key=lambda i: (-clean[i], i))[: num_nodes - 1])
    node_of = {pool: node for node, pool in enumerate(chosen, 1)}

    def path(pool: int) -> list[int] | None:
        """Nodes from the root down to this candidate, or None when it can't hang in the tree."""
        if pool not in node_of or clean[pool] == -math.inf or token[pool] < 0:
            return None
        if parent[pool] == -1:
            return [0, node_of[pool]]
        above = path(parent[pool]) if 0 <= parent[pool] < pool else None
        return None if above is None else [*above, node_of[pool]]

    nodes: list[Node] = [(root, -1, 0, {0})]
    for node, pool in enumerate(chosen, 1):
        way = path(pool)
        if way is None or len(way) - 1 > max_depth:
            nodes.append((-1, -1, 0, {node}))
        else:
            nodes.append((token[pool], way[-2], len(way) - 1, set(way)))
    return nodes


def bits(words: list[int]) -> set[int]:
    return {64 * i + j for i, word in enumerate(words) for j in range(64) if word >> j & 1}


def assert_build(score: Tensor, token: Tensor, parent: Tensor, root: Tensor, num_nodes: int, max_depth: int) -> tuple[Tensor, ...]:
    words = math.ceil(num_nodes / 64)
    tree = tree_build(score, token, parent, root, num_nodes, words, max_depth)
    for lane in range(score.shape[0]):
        expected = build_oracle(score[lane].tolist(), token[lane].tolist(), parent[lane].tolist(), int(root[lane]), num_nodes, max_depth)
        got = zip(tree[0][lane].tolist(), tree[1][lane].tolist(), tree[2][lane].tolist(), map(bits, tree[3][lane].tolist()), strict=True)
        assert list(got) == expected
    return tree


NODE_COUNTS = [1, 2, 3, 8, 16, 31, 32, 33, 63, 64, 65, 100]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tree_build_equals_oracle_on_draft_pools(data: st.DataObject) -> None:
    num_steps, topk = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    pool = candidate_pool(
        torch.Generator().manual_seed(data.draw(st.integers(0, 10**6))), 2, num_steps, topk, coarse=data.draw(st.booleans())
    )
    maximum = pool["score_BM"].shape[1] + 1
    num_nodes = data.draw(st.sampled_from([n for n in {*NODE_COUNTS, maximum} if n <= min(maximum, 128)]))
    harm = data.draw(
        st.lists(st.tuples(st.integers(0, 1), st.integers(0, maximum - 2), st.sampled_from(["nan", "-inf", "token"])), max_size=8)
    )
    for lane, at, how in harm:
        if how == "token":
            pool["token_BM"][lane, at] = -1
        else:
            pool["score_BM"][lane, at] = float(how)
    assert_build(pool["score_BM"], pool["token_BM"], pool["parent_BM"], torch.tensor([7, 9]), num_nodes, num_steps)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_tree_build_equals_oracle_on_any_pool(data: st.DataObject) -> None:
    """Parents anywhere, out of range and after their children included; many equal scores; depths beyond the limit."""
    size = data.draw(st.integers(1, 24))
    scores = data.draw(st.lists(st.sampled_from([0.0, -0.0, -1.0, -2.0, math.nan, -math.inf]), min_size=size, max_size=size))
    tokens = data.draw(st.lists(st.integers(-1, 5), min_size=size, max_size=size))
    parents = data.draw(st.lists(st.integers(-1, size + 2), min_size=size, max_size=size))
    if data.draw(st.booleans()):
        parents = [min(p, i - 1) for i, p in enumerate(parents)]
    num_nodes, depth = data.draw(st.integers(1, size + 1)), data.draw(st.integers(1, 6))
    assert_build(torch.tensor([scores]), torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([3]), num_nodes, depth)


@pytest.mark.parametrize("num_nodes", NODE_COUNTS)
def test_tree_build_at_word_boundaries(num_nodes: int) -> None:
    pool = candidate_pool(torch.Generator().manual_seed(num_nodes), 3, 4, 6)
    assert_build(pool["score_BM"], pool["token_BM"], pool["parent_BM"], torch.arange(3), num_nodes, 4)


def test_tree_build_of_one_long_chain_uses_both_words() -> None:
    size = 99
    tree = assert_build(
        -torch.arange(size)[None].float(), torch.arange(size)[None], torch.arange(-1, size - 1)[None], torch.tensor([5]), 100, 99
    )
    assert tree[2][0].tolist() == list(range(100))
    assert bits(tree[3][0, 99].tolist()) == set(range(100))


def cut(emitted: list[int], budget: int, stops: list[int]) -> tuple[int, int]:
    """(accept_len, reason): tokens leave one by one."""
    if budget <= 0:
        return 0, 2
    for count, token in enumerate(emitted, 1):
        if token in [s for s in stops if s >= 0]:
            return count, 1
        if count == budget:
            return count, 2
    return len(emitted), 0


def walk_recursive(token: list[int], parent: list[int], sample: list[int], cap: int) -> list[int]:
    """The accepted path by following children, from (token, parent) alone."""

    def down(node: int, depth: int) -> list[int]:
        if depth < cap:
            for child in range(1, len(token)):
                if parent[child] == node and token[child] >= 0 and token[child] == sample[node]:
                    return [node, *down(child, depth + 1)]
        return [node]

    return down(0, 0)


def walk_links(token: list[int], first: list[int], sibling: list[int], sample: list[int], cap: int) -> list[int]:
    """The accepted path by the linked lists of children: a bounded loop over levels, an inner one over siblings."""
    path = [0]
    for _ in range(max(cap, 0)):
        child = first[path[-1]]
        while child != -1 and token[child] != sample[path[-1]]:
            child = sibling[child]
        if child == -1:
            break
        path.append(child)
    return path


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_tree_walk_equals_both_walks(data: st.DataObject) -> None:
    num_steps, topk = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    seed = data.draw(st.integers(0, 10**6))
    generator, vocab, lanes = torch.Generator().manual_seed(seed), topk + data.draw(st.integers(0, 2)), 4
    pool = candidate_pool(generator, lanes, num_steps, topk, vocab=vocab)
    if data.draw(st.booleans()):
        pool["score_BM"][0, :: data.draw(st.integers(1, 4))] = -torch.inf
    maximum = pool["score_BM"].shape[1] + 1
    num_nodes = data.draw(st.sampled_from([n for n in {*NODE_COUNTS, maximum} if n <= min(maximum, 128)]))
    words, width = math.ceil(num_nodes / 64), num_steps + 1 + data.draw(st.integers(0, 2))
    token, parent, depth, ancestors = tree_build(
        **pool, root_B=torch.zeros(lanes, dtype=torch.int64), num_nodes=num_nodes, num_words=words, max_depth=num_steps
    )
    sample = torch.randint(0, vocab, (lanes, num_nodes), generator=generator)
    # Make long runs likely: most parents sample the token of one of their children.
    for lane in range(lanes):
        for node in torch.randperm(num_nodes, generator=generator).tolist():
            if parent[lane, node] >= 0 and node % 5:
                sample[lane, parent[lane, node]] = token[lane, node]
    cap = torch.tensor(data.draw(st.lists(st.integers(-1, num_steps + 1), min_size=lanes, max_size=lanes)))
    budget = torch.tensor(data.draw(st.lists(st.integers(-1, num_steps + 3), min_size=lanes, max_size=lanes)))
    stop = torch.tensor(data.draw(st.lists(st.lists(st.integers(-1, 2 * vocab), min_size=3, max_size=3), min_size=lanes, max_size=lanes)))
    path, accept_len, reason = tree_walk(token, parent, depth, ancestors, sample, cap, budget, stop, width)
    _, first, sibling = links_from_parents(parent)
    for lane in range(lanes):
        limit, drawn = min(int(cap[lane]), width - 1), sample[lane].tolist()
        expected = walk_recursive(token[lane].tolist(), parent[lane].tolist(), drawn, limit)
        assert walk_links(token[lane].tolist(), first[lane].tolist(), sibling[lane].tolist(), drawn, limit) == expected
        assert path[lane].tolist() == expected + [0] * (width - len(expected))
        run = [drawn[node] for node in expected]
        assert (int(accept_len[lane]), int(reason[lane])) == cut(run, int(budget[lane]), stop[lane].tolist())


def test_tree_walk_stop_wins_over_budget_on_the_same_token() -> None:
    chain = tree_build(
        torch.zeros(4, 2), torch.tensor([[5, 6]] * 4), torch.tensor([[-1, 0]] * 4), torch.zeros(4, dtype=torch.int64), 3, 1, 2
    )
    sample, cap, budget = torch.tensor([[5, 6, 7]] * 4), torch.full((4,), 2), torch.tensor([2, 3, 2, 0])
    stop = torch.tensor([[6, -1], [-1, -1], [-1, 7], [5, 6]])
    path, accept_len, reason = tree_walk(*chain, sample, cap, budget, stop, 3)
    assert path.tolist() == [[0, 1, 2]] * 4
    assert accept_len.tolist() == [2, 3, 2, 0]
    assert reason.tolist() == [1, 2, 2, 2]


def move_by_programs(case: dict[str, Any], order: random.Random | None) -> Tensor:
    """One program per (lane, layer, side, channel chunk) owns all A rows: it loads them all, then stores; programs run in any order."""
    pool: Tensor = case["kv_pool"].clone()
    layers, sides, _, size, heads, _ = pool.shape
    lanes = case["path_BA"].shape[0]
    programs = [(b, n, c, h) for b in range(lanes) for n in range(layers) for c in range(sides) for h in range(heads)]
    if order is None:
        programs.reverse()
    else:
        order.shuffle(programs)
    for lane, layer, side, head in programs:
        row = lane if case.get("lane_row_B") is None else int(case["lane_row_B"][lane])
        start, count, table = int(case["seq_len_R"][row]), int(case["accept_len_B"][lane]), case["table_RP"][row].tolist()

        def at(slot: int, table: list[int] = table) -> tuple[int, int]:
            return table[slot // size], slot % size

        rows = [pool[layer, side, *at(start + node), head].clone() for node in case["path_BA"][lane, :count].tolist()]
        stores = list(enumerate(rows))
        (order or random.Random(0)).shuffle(stores)
        for step, row in stores:
            pool[layer, side, *at(start + step), head] = row
    return pool


@pytest.mark.parametrize("seed", range(6))
def test_kv_move_equals_programs_in_any_order(seed: int) -> None:
    for case in cases_of(KV_MOVE, torch.Generator().manual_seed(seed)):
        expected = case["kv_pool"].clone()
        kv_move(**{**case, "kv_pool": expected})
        for order in (None, random.Random(seed), random.Random(seed + 100)):
            assert torch.equal(move_by_programs(case, order)[:, :, 1:], expected[:, :, 1:])


def test_kv_move_with_overlapping_ranges_is_a_parallel_copy() -> None:
    pool = torch.arange(8.0).view(1, 1, 8, 1, 1, 1).expand(2, 2, 8, 1, 1, 1).clone()
    table = torch.arange(1, 8, dtype=torch.int32)[None]
    kv_move(pool, table, torch.tensor([1]), torch.tensor([[0, 2, 1, 4, 3]]), torch.tensor([4]))
    assert pool[1, 1, 1:].flatten().tolist() == [1, 2, 4, 3, 6, 6, 7]


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 127, 128])
def test_causal_words_have_a_bit_for_every_entry_up_to_their_own(length: int) -> None:
    words = -(-length // 64)
    found = causal_words(length, words, torch.device("cpu"))
    assert [[entry for entry in range(64 * words) if row[entry // 64] >> entry % 64 & 1] for row in found.tolist()] == [
        list(range(entry + 1)) for entry in range(length)
    ]

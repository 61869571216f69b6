"""The fused walk against its reference: word boundaries, ends of runs, rows that are not live."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from graphspec.kernels import op_of
from graphspec.kernels.tree.tree_build import tree_build
from graphspec.kernels.tree.tree_walk import LIVE, OUT_OF_BUDGET, ROW_FAILED, ROW_LIVE, STOPPED
from graphspec.plan.buffers import POISON, Status
from tests.kernels.cases.tree import candidate_pool

from ._programs import ORDERS, program_order

OP = op_of("tree_walk")

NODES = ("node_token_BN", "node_parent_BN", "node_depth_BN", "node_ancestors_BNX")
ROWS = ("status_R", "seq_len_R", "draft_len_R", "budget_R", "stop_id_RE")


def run(name: str, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    own = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in case.items()}
    OP.call(OP.implementation(name), own)
    return {slot: own[slot] for slot in OP.mutates}


def assert_equal(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    found, expected = run("fused", case), run("reference", case)
    for slot, e in expected.items():
        assert torch.equal(found[slot], e), slot
    return found


def limits(lanes: int, width: int, nodes: int, **changes: Any) -> dict[str, Any]:
    """Rows without limits, and the slots that are written, full of what must not survive."""
    case = {
        "finite_BN": torch.ones(lanes, nodes, dtype=torch.bool),
        "depth_cap_B": None,
        "lane_row_B": torch.arange(lanes),
        "status_R": torch.full((lanes,), ROW_LIVE),
        "seq_len_R": torch.full((lanes,), 7),
        "draft_len_R": torch.full((lanes,), 128),
        "budget_R": torch.full((lanes,), 1000),
        "stop_id_RE": torch.full((lanes, 4), -1),
        "draft_context": 10**6,
        "sample_BN": torch.full((lanes, nodes), POISON),
        "path_BA": torch.full((lanes, width), POISON),
        "accept_len_B": torch.full((lanes,), POISON),
        "outcome_B": torch.full((lanes,), POISON),
    }
    return {**case, **changes}


def grown(seed: int, lanes: int, steps: int, topk: int, nodes: int, width: int) -> dict[str, Any]:
    """Trees most of whose nodes draw one of their children's tokens, under all kinds of limits."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    pool = candidate_pool(generator, lanes, steps, topk, vocab=topk + 1)
    pool["score_BM"][0, :: 2 + seed % 3] = -torch.inf
    tree = tree_build(**pool, root_B=draw(0, topk, lanes), num_nodes=nodes, num_words=math.ceil(nodes / 64), max_depth=steps)
    drawn = draw(0, topk + 1, lanes, nodes)
    for lane in range(lanes):
        for node in torch.randperm(nodes, generator=generator).tolist():
            if tree[1][lane, node] >= 0 and node % 5:
                drawn[lane, tree[1][lane, node]] = tree[0][lane, node]
    rows = lanes + 1
    stop = draw(0, 9 * topk, rows, 3)
    return {
        **dict(zip(NODES, tree, strict=True)),
        **limits(
            lanes, width, nodes,
            finite_BN=draw(0, 16, lanes, nodes) > 0,
            depth_cap_B=draw(-1, steps + 2, lanes) if seed % 2 else None,
            lane_row_B=torch.randperm(rows, generator=generator)[:lanes],
            status_R=torch.where(draw(0, 6, rows) > 0, ROW_LIVE, draw(0, 5, rows)),
            seq_len_R=draw(0, 110, rows),
            draft_len_R=draw(0, 2 * steps, rows),
            budget_R=draw(-1, 2 * steps + 2, rows),
            stop_id_RE=torch.where(stop > topk, -1, stop),
            draft_context=100,
        ),
        "drawn_BN": drawn,
    }  # fmt: skip


@pytest.mark.parametrize("nodes", [31, 32, 33, 63, 64, 65, 128])
def test_trees_at_word_boundaries(nodes: int) -> None:
    longest = 0
    for seed, (steps, topk, width) in enumerate(((5, 8, 6), (9, 4, 12))):
        found = assert_equal(grown(nodes + 1000 * seed, 8, steps, topk, nodes, width))
        longest = max(longest, int(found["accept_len_B"].max()))
    assert longest > 2


def chain(lanes: int, size: int, **changes: Any) -> dict[str, Any]:
    """Chains of tokens 1, 2, .. that are all drawn; the last node draws one more."""
    nodes = size + 1
    tree = tree_build(
        torch.zeros(lanes, size), torch.arange(1, nodes).repeat(lanes, 1), torch.arange(-1, size - 1).repeat(lanes, 1),
        torch.zeros(lanes, dtype=torch.int64), nodes, math.ceil(nodes / 64), size,
    )  # fmt: skip
    return {**dict(zip(NODES, tree, strict=True)), **limits(lanes, nodes, nodes, **changes), "drawn_BN": tree[0] + 1}


def test_how_a_run_ends() -> None:
    """Stop id, budget, both on one token, a failure before and after them, a cap, no budget at all."""
    cases: list[tuple[dict[str, Any], int, int]] = [
        ({}, 5, Status.LIVE),
        ({"budget_R": 3}, 3, Status.LENGTH),
        ({"budget_R": 5}, 5, Status.LENGTH),
        ({"budget_R": 0}, 0, Status.LENGTH),
        ({"budget_R": -4}, 0, Status.LENGTH),
        ({"stop_id_RE": 2}, 2, Status.STOPPED),
        ({"stop_id_RE": 2, "budget_R": 2}, 2, Status.STOPPED),
        ({"stop_id_RE": 3, "budget_R": 2}, 2, Status.LENGTH),
        ({"draft_len_R": 2, "stop_id_RE": 4}, 3, Status.LIVE),
        ({"draft_len_R": 0}, 1, Status.LIVE),
        ({"broken": 0}, 0, Status.FAILED),
        ({"broken": 2}, 2, Status.FAILED),
        ({"broken": 2, "budget_R": 2}, 2, Status.LENGTH),
        ({"broken": 3, "stop_id_RE": 4}, 3, Status.FAILED),
        ({"broken": 4, "draft_len_R": 3}, 4, Status.LIVE),
        ({"seq_len_R": 10**6 - 2}, 3, Status.LIVE),
        ({"seq_len_R": 10**6 + 9}, 1, Status.LIVE),
        ({"status_R": Status.STOPPED, "broken": 0}, 0, Status.STOPPED),
        ({"status_R": Status.FREE}, 0, Status.FREE),
        ({"status_R": Status.FAILED}, 0, Status.FAILED),
    ]
    case = chain(len(cases), 4)
    for lane, (changes, _, _) in enumerate(cases):
        for key, value in changes.items():
            if key == "broken":
                case["finite_BN"][lane, value] = False
            elif key == "stop_id_RE":
                case[key][lane, 1] = value
            else:
                case[key][lane] = value
    found = assert_equal(case)
    ends = list(zip(found["accept_len_B"].tolist(), found["outcome_B"].tolist(), strict=True))
    assert ends == [(length, outcome) for _, length, outcome in cases]
    assert torch.equal(found["sample_BN"], case["drawn_BN"])


def test_a_path_of_128_nodes() -> None:
    case = chain(2, 127)
    case["stop_id_RE"][1, 3] = 100
    found = assert_equal(case)
    assert found["path_BA"].tolist() == [list(range(128))] * 2
    assert found["accept_len_B"].tolist() == [128, 100]


def test_plain_decoding_without_stop_ids() -> None:
    found = assert_equal(chain(3, 0, stop_id_RE=torch.empty(3, 0, dtype=torch.int64), budget_R=torch.tensor([1, 2, 0])))
    assert found["accept_len_B"].tolist() == [1, 1, 0]


def test_outcomes_are_the_states_of_rows() -> None:
    assert (ROW_LIVE, ROW_FAILED) == (Status.LIVE, Status.FAILED)
    assert [ROW_LIVE + reason for reason in (LIVE, STOPPED, OUT_OF_BUDGET)] == [Status.LIVE, Status.STOPPED, Status.LENGTH]


@ORDERS
def test_poisoned_rows_change_nothing_for_others(order: int | None) -> None:
    """Padded lanes share a dummy row full of values that fit nowhere; their nodes hold anything."""
    case = grown(5, 6, 4, 3, 20, 5)
    case["lane_row_B"] = torch.tensor([2, 6, 0, 6, 5, 6])
    case["status_R"][:6], case["status_R"][6] = ROW_LIVE, Status.FREE
    clean = run("fused", case)
    for name in ROWS[1:]:
        case[name][6] = POISON
    for name in ("node_token_BN", "node_depth_BN", "node_ancestors_BNX", "drawn_BN"):
        case[name][1::2] = POISON
    with program_order(order):
        poisoned = run("fused", case)
    for slot in ("path_BA", "accept_len_B", "outcome_B"):
        assert torch.equal(clean[slot], poisoned[slot]), slot
    assert poisoned["accept_len_B"][1::2].eq(0).all() and poisoned["path_BA"][1::2].eq(0).all()
    assert poisoned["outcome_B"][1::2].eq(Status.FREE).all()
    again = run("fused", case)
    assert all(torch.equal(again[slot], poisoned[slot]) for slot in OP.mutates)


def test_broken_trees() -> None:
    """Siblings with one token, tokens that were never drawn, nodes without a parent: results equal the reference's."""
    generator = torch.Generator().manual_seed(1)
    case = grown(11, 6, 5, 4, 33, 6)
    case["node_token_BN"] = torch.randint(-1, 3, (6, 33), generator=generator)
    case["drawn_BN"] = torch.randint(0, 3, (6, 33), generator=generator)
    case["node_parent_BN"][:, ::7] = -1
    assert_equal(case)

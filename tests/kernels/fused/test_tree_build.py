"""The fused tree and chain against their references: word boundaries, invalid pools, sizes near register limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.errors import ConfigError
from graphspec.kernels import op_of
from graphspec.kernels.op import KernelOp
from tests.kernels.cases import cases_of
from tests.kernels.cases.tree import candidate_pool, node_slots, window_case

CHAIN = op_of("chain_layout")
OP = op_of("tree_build")

NODE_SLOTS = OP.mutates


def run(op: KernelOp, name: str, case: dict[str, Any], lanes: slice = slice(None)) -> list[torch.Tensor]:
    """What one implementation leaves in the slots of the nodes, for some of the lanes."""
    own = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in case.items()}
    own = {k: v[lanes] if isinstance(v, torch.Tensor) and "_B" in k else v for k, v in own.items()}
    op.call(op.implementation(name), own)
    return [own[slot] for slot in NODE_SLOTS]


def assert_equal(op: KernelOp, case: dict[str, Any]) -> list[torch.Tensor]:
    found, expected = run(op, "fused", case), run(op, "reference", case)
    for slot, f, e in zip(NODE_SLOTS, found, expected, strict=True):
        assert torch.equal(f, e), slot
    return found


def tree_case(seed: int, lanes: int, steps: int, topk: int, nodes: int, *, coarse: bool = True) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    pool = candidate_pool(generator, lanes, steps, topk, coarse=coarse)
    return {**pool, **window_case(generator, lanes), **node_slots(lanes, nodes, math.ceil(nodes / 64)), "max_depth": steps}


def harm(case: dict[str, Any], seed: int) -> None:
    """NaN and -inf scores, tokens that were never drawn, parents that are out of range, after their children, or themselves."""
    generator = torch.Generator().manual_seed(seed)
    dice = torch.randint(0, 24, case["score_BM"].shape, generator=generator)
    case["score_BM"][dice == 0] = torch.nan
    case["score_BM"][dice == 1] = -torch.inf
    case["score_BM"][dice == 2] = -0.0
    case["token_BM"][dice == 3] = -1
    candidates = dice.shape[1]
    case["parent_BM"][dice == 4] = torch.randint(-3, candidates + 3, (int((dice == 4).sum()),), generator=generator)
    case["parent_BM"][dice == 5] = (2**40, -(2**40))[seed % 2]


@pytest.mark.parametrize("nodes", [31, 32, 33, 63, 64, 65, 128])
def test_trees_at_word_boundaries(nodes: int) -> None:
    whole, broken = tree_case(nodes, 4, 5, 8, nodes), tree_case(97 + nodes, 4, 9, 4, nodes, coarse=False)
    assert_equal(OP, whole)
    harm(broken, nodes)
    assert_equal(OP, broken)


@settings(max_examples=12)
@given(st.data())
def test_any_pool(data: st.DataObject) -> None:
    size, lanes = data.draw(st.integers(1, 70)), 3
    nodes, depth = data.draw(st.integers(1, size + 1)), data.draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    levels = torch.tensor([0.0, -0.0, -1.0, -2.5, torch.nan, -torch.inf, torch.inf])
    case = {
        "score_BM": levels[torch.randint(0, len(levels), (lanes, size), generator=generator)],
        "token_BM": torch.randint(-1, 9, (lanes, size), generator=generator),
        "parent_BM": torch.minimum(torch.randint(-1, size + 2, (lanes, size), generator=generator), torch.arange(size) // 2),
        **window_case(generator, lanes),
        **node_slots(lanes, nodes, math.ceil(nodes / 64)),
        "max_depth": depth,
    }
    assert_equal(OP, case)


@pytest.mark.parametrize(("steps", "topk"), [(5, 32), (2, 90)])
def test_large_pools(steps: int, topk: int) -> None:
    case = tree_case(steps, 1, steps, topk, 128)
    assert_equal(OP, case)
    case["score_BM"].fill_(-1.0)
    assert_equal(OP, case)


def test_a_tree_as_deep_as_it_has_nodes() -> None:
    size = 127
    case = {
        "score_BM": -torch.arange(size)[None].float(),
        "token_BM": torch.arange(size)[None],
        "parent_BM": torch.arange(-1, size - 1)[None],
        **window_case(torch.Generator(), 1),
        **node_slots(1, 128, 2),
        "max_depth": 127,
    }
    depth = assert_equal(OP, case)[2]
    assert depth[0].tolist() == list(range(128))
    case["max_depth"] = 64
    assert assert_equal(OP, case)[0][0, 65:].tolist() == [-1] * 63


def test_a_lane_alone_and_a_second_run_give_the_same() -> None:
    case = tree_case(3, 4, 5, 6, 40)
    together = run(OP, "fused", case)
    assert all(map(torch.equal, together, run(OP, "fused", case)))
    for lane in range(4):
        alone = run(OP, "fused", case, slice(lane, lane + 1))
        assert all(torch.equal(one[0], all_of[lane]) for one, all_of in zip(alone, together, strict=True))


def test_more_candidates_than_registers_is_an_error() -> None:
    case = tree_case(0, 1, 2, 3, 4)
    for name in ("score_BM", "token_BM", "parent_BM"):
        case[name] = case[name][:, :1].expand(1, 2**15 + 1).contiguous()
    with pytest.raises(ConfigError, match="at most 32768 candidates"):
        run(OP, "fused", case)


@pytest.mark.parametrize("nodes", [1, 2, 8, 31, 32, 33, 63, 64, 65, 127, 128])
def test_chains_at_word_boundaries(nodes: int) -> None:
    generator = torch.Generator().manual_seed(nodes)
    score = -torch.rand(3, nodes - 1, generator=generator)
    score[0, 1::4], score[1, 2:], score[2, :] = torch.nan, -torch.inf, torch.nan
    case = {
        "score_BM": score if nodes > 1 else None,
        "token_BM": torch.randint(-1, 9, score.shape, generator=generator) if nodes > 1 else None,
        **window_case(generator, 3),
        **node_slots(3, nodes, math.ceil(nodes / 64)),
    }
    token, parent, depth, ancestors = assert_equal(CHAIN, case)
    assert parent[0].tolist() == list(range(-1, nodes - 1)) and depth[0].tolist() == list(range(nodes))
    for node in range(nodes):
        assert sum((word % 2**64) << 64 * i for i, word in enumerate(ancestors[0, node].tolist())) == 2 ** (node + 1) - 1
    assert token[2, 1:].eq(-1).all()


def test_windows_wider_than_their_words() -> None:
    """Words past the nodes exist where the drafter's window is wider than the tree."""
    for op, case in ((OP, tree_case(1, 2, 3, 3, 9)), (CHAIN, cases_of(CHAIN, torch.Generator())[0])):
        lanes, nodes = case["node_token_BN"].shape
        case["node_ancestors_BNX"] = torch.full((lanes, nodes, 3), -1)
        assert assert_equal(op, case)[3][..., 1:].eq(0).all()

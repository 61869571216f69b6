"""The fused attention on a GPU, in bfloat16 and in the shapes of real models: error against float64, and the same bits again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.kernels import op_of
from graphspec.kernels.op import KernelOp
from tests.kernels.cases.attention import poison_unseen, random_pool, visible_slots
from tests.support.float_law import assert_float_law, widened

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

Case = dict[str, Any]


def tree_case(ends: list[int], tokens: int, *, queries: int, groups: int, dim: int, dtype: torch.dtype) -> Case:
    """Nodes that see their prefix, themselves, and half of the nodes before them."""
    generator = torch.Generator().manual_seed(tokens)
    lanes, words, page_size = len(ends), -(-tokens // 64), 16
    columns = -(-(max(ends) + tokens) // page_size)
    pool, table = random_pool(generator, lanes=lanes, columns=columns, page_size=page_size, heads=groups, dim=dim, layers=2)
    node, place = torch.arange(tokens)[:, None], torch.arange(64 * words)
    bits = (torch.rand(lanes, tokens, 64 * words, generator=generator) < 0.5) & (place < node) | (place == node)
    ancestors = (bits.view(lanes, tokens, words, 64).to(torch.int64) << torch.arange(64)).sum(-1)
    begin, end = torch.zeros(lanes, tokens, dtype=torch.int64), torch.tensor(ends)
    poison_unseen(pool, table, visible_slots(begin, end, ancestors, columns * page_size))
    return {
        "query_BTQD": torch.randn(lanes, tokens, queries, dim, generator=generator).to(dtype).cuda(),
        "kv_pool": pool.to(dtype).cuda(),
        "layer": 1,
        "table_BP": table.cuda(),
        "prefix_begin_BT": begin.cuda(),
        "prefix_end_B": end.cuda(),
        "ancestors_BTX": ancestors.cuda(),
        "scale": dim**-0.5,
    }


def chunk_case(first: int, tokens: int, *, queries: int, groups: int, dim: int, dtype: torch.dtype) -> Case:
    """One chunk after ``first`` slots."""
    case = tree_case([first + tokens], 1, queries=queries, groups=groups, dim=dim, dtype=dtype)
    case["kv_pool"].nan_to_num_(0.0)
    del case["prefix_end_B"], case["ancestors_BTX"]
    slot = torch.arange(first, first + tokens, device="cuda")[None]
    query = torch.randn(1, tokens, queries, dim, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()
    own = {"query_BTQD": query, "prefix_begin_BT": torch.zeros_like(slot), "slot_BT": slot, "valid_BT": torch.ones_like(slot).bool()}
    return {**case, **own}


def assert_law(op: KernelOp, case: Case) -> None:
    """The law of floats, and the same bits again."""
    found = op.implementation("fused")(**case)
    assert_float_law(found, op.reference(**case), op.reference(**widened(case)))
    for _ in range(10):
        assert torch.equal(op.implementation("fused")(**case), found)


@pytest.mark.references("tree_attention")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("queries", "groups", "dim"), [(32, 8, 128), (32, 8, 64), (6, 2, 80), (8, 2, 256)])
@pytest.mark.parametrize(("ends", "tokens"), [([2000], 1), ([2000], 8), ([2001], 64), ([5, 700, 0, 9000], 32), ([300], 100)])
def test_tree_attention(ends: list[int], tokens: int, queries: int, groups: int, dim: int, dtype: torch.dtype) -> None:
    assert_law(op_of("tree_attention"), tree_case(ends, tokens, queries=queries, groups=groups, dim=dim, dtype=dtype))


def test_a_lane_has_the_same_bits_alone() -> None:
    case = tree_case([2000, 65, 4100, 0], 8, queries=32, groups=8, dim=128, dtype=torch.bfloat16)
    together = op_of("tree_attention").implementation("fused")(**case)
    for lane in range(4):
        alone = {k: v[lane : lane + 1] if isinstance(v, Tensor) and k != "kv_pool" else v for k, v in case.items()}
        assert torch.equal(op_of("tree_attention").implementation("fused")(**alone)[0], together[lane])


def test_a_token_has_the_same_bits_in_a_chain_and_alone() -> None:
    chain = tree_case([2000], 8, queries=32, groups=8, dim=128, dtype=torch.bfloat16)
    chain["ancestors_BTX"][0] = (2 << torch.arange(8, device="cuda")[:, None]) - 1
    together = op_of("tree_attention").implementation("fused")(**chain)
    for token in range(8):
        alone = {**chain, "query_BTQD": chain["query_BTQD"][:, token : token + 1], "prefix_end_B": chain["prefix_end_B"] + token}
        alone |= {"prefix_begin_BT": chain["prefix_begin_BT"][:, :1], "ancestors_BTX": torch.ones_like(chain["ancestors_BTX"][:, :1])}
        assert torch.equal(op_of("tree_attention").implementation("fused")(**alone)[0, 0], together[0, token])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("queries", "groups", "dim"), [(32, 8, 128), (32, 8, 64), (8, 2, 256)])
@pytest.mark.parametrize(("end", "tokens"), [(2000, 32), (2047, 64), (9000, 100)])
def test_by_position_a_node_of_a_tree_has_the_bits_of_plain_decoding(
    end: int, tokens: int, queries: int, groups: int, dim: int, dtype: torch.dtype
) -> None:
    """Each node's ancestors are a random half of those before it; alone, their keys are in the slots of their positions."""
    op, tree = op_of("tree_attention"), tree_case([end], tokens, queries=queries, groups=groups, dim=dim, dtype=dtype)
    together = op.implementation("invariant")(**tree)
    table, words = tree["table_BP"][0].tolist(), tree["ancestors_BTX"][0].tolist()
    for token in range(0, tokens, 5):
        path = [j for j in range(tokens) if words[token][j // 64] >> (j % 64) & 1]
        pool = tree["kv_pool"].clone()
        for depth, node in enumerate(path):
            to, source = (divmod(end + slot, 16) for slot in (depth, node))
            pool[:, :, table[to[0]], to[1]] = tree["kv_pool"][:, :, table[source[0]], source[1]]
        alone = {**tree, "kv_pool": pool, "query_BTQD": tree["query_BTQD"][:, token : token + 1]}
        alone |= {"prefix_end_B": tree["prefix_end_B"] + len(path) - 1, "prefix_begin_BT": tree["prefix_begin_BT"][:, :1]}
        alone["ancestors_BTX"] = torch.ones_like(tree["ancestors_BTX"][:, :1, :1])
        assert torch.equal(op.implementation("invariant")(**alone)[0, 0], together[0, token])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 128])
def test_runs_of_splits_have_the_bits_of_splits(dim: int, dtype: torch.dtype) -> None:
    """32 tokens leave few programs for a tile, so each folds runs of splits over memory; one token leaves a program for a few splits."""
    case = tree_case([9000, 8000, 7000, 6000], 32, queries=32, groups=8, dim=dim, dtype=dtype)
    alone = {k: v[:, :1] if k in ("query_BTQD", "prefix_begin_BT", "ancestors_BTX") else v for k, v in case.items()}
    first = op_of("tree_attention").implementation("fused")(**alone)
    found = op_of("tree_attention").implementation("fused")(**case)
    assert torch.equal(found[:, :1], first)
    for _ in range(200):
        assert torch.equal(op_of("tree_attention").implementation("fused")(**case), found)


@pytest.mark.references("chunk_attention")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("first", "tokens"), [(0, 512), (1500, 512), (37, 100)])
@pytest.mark.parametrize(("queries", "groups", "dim"), [(32, 8, 128), (6, 2, 80), (8, 2, 256)])
def test_chunk_attention(first: int, tokens: int, queries: int, groups: int, dim: int, dtype: torch.dtype) -> None:
    assert_law(op_of("chunk_attention"), chunk_case(first, tokens, queries=queries, groups=groups, dim=dim, dtype=dtype))

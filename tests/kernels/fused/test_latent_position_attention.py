"""Latent attention by position: nodes of a tree and tokens of a chunk have the bits that plain decoding has, whatever is around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.kernels import op_of
from graphspec.kernels.attention.fused import _latent
from graphspec.kernels.attention.fused import latent_attention as by_slot
from graphspec.kernels.attention.fused import latent_position_attention as fused
from tests.kernels.cases.attention import random_latent_pool

from ._programs import ORDERS, program_order
from .test_position_attention import Lane, random_tree, words_of

Case = dict[str, Any]
LATENT, ROPE = 24, 8


@pytest.fixture(autouse=True)
def _small_splits(monkeypatch: pytest.MonkeyPatch, nan_memory: None) -> None:
    """Splits of 32 slots, at most four, so that short tables have many and lengths double them."""
    monkeypatch.setattr(_latent, "SPLIT", 32)
    monkeypatch.setattr(_latent, "SPLITS", 4)


class Row(Lane):
    """Latent rows."""

    def __init__(self, prefix: int, window: int, *, heads: int = 4, page_size: int = 16, dtype: torch.dtype = torch.bfloat16) -> None:
        self.generator = torch.Generator().manual_seed(prefix)
        columns = -(-(prefix + window) // page_size)
        pool, table = random_latent_pool(self.generator, lanes=1, columns=columns, page_size=page_size, dim=LATENT + ROPE, layers=2)
        super().__init__(pool.to(dtype), table, prefix, window)
        self.queries = [torch.randn(1, window, heads, dim, generator=self.generator).to(dtype) for dim in (LATENT, ROPE)]
        self.more: Case = {"layer": 1, "table_BP": self.table, "scale": 0.2}

    def case(self, tokens: slice, pool: Tensor) -> Case:
        latent, rope = (query[:, tokens] for query in self.queries)
        return {**self.more, "query_latent_BTQL": latent, "query_rope_BTQR": rope, "latent_pool": pool}

    def tree(self, paths: list[list[int]], begin: int = 0) -> Case:
        case = self.case(slice(0, len(paths)), self.pool) | {"ancestors_BTX": words_of(paths, -(-len(paths) // 64))[None]}
        return case | {"prefix_begin_BT": torch.full((1, len(paths)), begin), "prefix_end_B": torch.tensor([self.prefix])}

    def plainly(self, path: list[int], begin: int = 0) -> Tensor:
        """The last node of a path as plain decoding has it: its ancestors' rows in the slots of their positions, all of them prefix."""
        pool, end = self.moved(path)
        case = self.case(slice(path[-1], path[-1] + 1), pool) | {"ancestors_BTX": torch.ones(1, 1, 1, dtype=torch.int64)}
        return run(fused.latent_attention, case | {"prefix_begin_BT": torch.tensor([[begin]]), "prefix_end_B": torch.tensor([end])})[0, 0]


def run(launcher: Any, case: Case) -> Tensor:
    out: Tensor = launcher(**case)
    assert out.isfinite().all()
    return out


def assert_bits(row: Row, paths: list[list[int]], begin: int = 0) -> None:
    """Of every third node, the last included."""
    found = run(fused.latent_attention, row.tree(paths, begin))
    for node in range(len(paths) - 1, -1, -3):
        assert torch.equal(found[0, node], row.plainly(paths[node], begin)), f"node {node}, path {paths[node]}"


@pytest.mark.parametrize(("prefix", "page_size"), [(0, 1), (30, 16), (121, 1), (126, 64), (250, 16)])
def test_a_tree_has_the_bits_of_plain_decoding(prefix: int, page_size: int) -> None:
    """126: the window crosses the length at which splits double."""
    row = Row(prefix, 12, page_size=page_size)
    assert_bits(row, random_tree(12, row.generator))


@pytest.mark.parametrize(("heads", "begin", "dtype"), [(65, 0, torch.bfloat16), (1, 40, torch.bfloat16), (17, 0, torch.float32)])
def test_heads_that_no_tile_divides(heads: int, begin: int, dtype: torch.dtype) -> None:
    row = Row(75, 7, heads=heads, dtype=dtype)
    assert_bits(row, random_tree(7, row.generator), begin)


@pytest.mark.full
def test_a_path_over_several_blocks_and_two_words() -> None:
    row = Row(41, 100, heads=2)
    long = [list(range(0, 2 * depth + 1, 2)) for depth in range(45)]
    paths = [long[node // 2] if node % 2 == 0 else [*long[node // 2], node] for node in range(90)]
    found = run(fused.latent_attention, row.tree(paths))
    for node in (0, 35, 64, 88, 89):
        assert torch.equal(found[0, node], row.plainly(paths[node])), node


@pytest.mark.parametrize(("first", "tokens"), [(0, 9), (97, 36)])
def test_a_chunk_has_the_bits_of_plain_decoding(first: int, tokens: int) -> None:
    row = Row(first, tokens, heads=2)
    slot = torch.arange(first, first + tokens)[None]
    more = {"prefix_begin_BT": torch.zeros_like(slot), "slot_BT": slot, "valid_BT": torch.ones_like(slot, dtype=torch.bool)}
    found = run(fused.latent_chunk_attention, row.case(slice(0, tokens), row.pool) | more)
    for token in range(tokens - 1, -1, -9):
        assert torch.equal(found[0, token], row.plainly(list(range(token + 1)))), token


@ORDERS
def test_any_order_of_programs(order: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In groups of two (token, tile) pairs."""
    row = Row(121, 5)
    case = row.tree(random_tree(5, row.generator))
    expected = run(fused.latent_attention, case)
    monkeypatch.setattr(_latent, "SCRATCH", 2 * 4 * 64 * (LATENT + 2) * 4)
    with program_order(order):
        assert torch.equal(run(fused.latent_attention, case), expected)


def test_the_kernel_by_slot_has_other_bits() -> None:
    """Else the tests above would show nothing."""
    row = Row(121, 12)
    case = row.tree(random_tree(12, row.generator))
    assert not torch.equal(run(by_slot.latent_attention, case), run(fused.latent_attention, case))


def test_lanes_of_other_lengths_and_padding_change_nothing() -> None:
    """A second lane, with a prefix that ends before its first slot and a query that sees nothing."""
    row = Row(75, 6)
    paths = random_tree(6, row.generator)
    case, expected = row.tree(paths), run(fused.latent_attention, row.tree(paths))
    doubled = ("query", "table", "prefix", "ancestors")
    both = {key: torch.cat((value, value)) if key.startswith(doubled) else value for key, value in case.items()}
    both["prefix_end_B"] = torch.tensor([75, -5])
    both["ancestors_BTX"][1] = 0
    found = run(fused.latent_attention, both)
    assert torch.equal(found[:1], expected) and not found[1].any()


def test_the_law_takes_these_kernels() -> None:
    assert op_of("latent_attention").implementations["invariant"].endswith("latent_position_attention:OP")
    assert op_of("latent_chunk_attention").implementations["invariant"].endswith("latent_position_attention:CHUNK_OP")

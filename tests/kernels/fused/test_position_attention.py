"""Attention by position: each node of a tree and each token of a chunk has the bits that plain decoding has, whatever is around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.kernels import op_of
from graphspec.kernels.attention.fused import position_attention as fused
from graphspec.kernels.attention.fused import tree_attention as by_slot
from graphspec.kernels.fused.launch import semaphores
from tests.kernels.cases import cases_of
from tests.kernels.cases.attention import random_pool
from tests.support.float_law import assert_float_law, widened

from ._programs import ORDERS, program_order

Case = dict[str, Any]
TREE, CHUNK = op_of("tree_attention"), op_of("chunk_attention")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch, nan_memory: None) -> None:
    """Blocks of 16 slots, runs of two, stretches of eight, so that short tables have many of each."""
    tiled(monkeypatch, 32, 16, multiprocessors=2)


def tiled(monkeypatch: pytest.MonkeyPatch, rows: int, block: int, *, multiprocessors: int) -> None:
    monkeypatch.setattr(by_slot, "RUN", 2 * block)
    monkeypatch.setattr(by_slot, "STRETCH", 8 * block)
    monkeypatch.setattr(by_slot, "tile_shape", lambda dim, dtype: (rows, block, 4))
    for kernel in (by_slot, fused):
        monkeypatch.setattr(kernel, "multiprocessors", lambda device: multiprocessors)


def random_tree(nodes: int, generator: torch.Generator) -> list[list[int]]:
    """Each node's path, root and node included, in level order with siblings of several parents."""
    parents = [-1] + [int(torch.randint(max(0, node - 5), node, (), generator=generator)) for node in range(1, nodes)]
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


def words_of(paths: list[list[int]], words: int) -> Tensor:
    bits = torch.zeros(len(paths), words, 64, dtype=torch.int64)
    for node, path in enumerate(paths):
        for slot in path:
            bits[node, slot // 64, slot % 64] = 1
    return (bits << torch.arange(64)).sum(-1)


class Lane:
    """A prefix, a window of slots, and everything outside that is NaN."""

    def __init__(self, pool: Tensor, table: Tensor, prefix: int, window: int) -> None:
        self.pool, self.table, self.prefix, self.page_size = pool, table, prefix, pool.shape[3]
        self.end_with_nan(pool, prefix + window)
        pool[:, :, 0] = torch.nan

    def at(self, pool: Tensor, slot: int) -> Tensor:
        return pool[:, :, int(self.table[0, slot // self.page_size]), slot % self.page_size]

    def end_with_nan(self, pool: Tensor, first: int) -> None:
        for slot in range(first, self.table.shape[1] * self.page_size):
            self.at(pool, slot)[:] = torch.nan

    def moved(self, path: list[int]) -> tuple[Tensor, int]:
        """The pool with the rows of a path in the slots of their positions, and the slot of the last."""
        pool = self.pool.clone()
        for depth, node in enumerate(path):
            self.at(pool, self.prefix + depth)[:] = self.at(self.pool, self.prefix + node)
        self.end_with_nan(pool, self.prefix + len(path))
        return pool, self.prefix + len(path) - 1


class Row(Lane):
    """Keys and values for several heads."""

    def __init__(
        self, prefix: int, window: int, *, page_size: int = 16, queries: int = 4, groups: int = 2, dim: int = 8, seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        self.generator = torch.Generator().manual_seed(seed)
        columns = -(-(prefix + window) // page_size)
        pool, table = random_pool(self.generator, lanes=1, columns=columns, page_size=page_size, heads=groups, dim=dim, layers=2)
        super().__init__(pool.to(dtype), table, prefix, window)
        self.query = torch.randn(1, window, queries, dim, generator=self.generator).to(dtype)
        self.more: Case = {"layer": 1, "table_BP": self.table, "scale": dim**-0.5}

    def together(self, paths: list[list[int]], begin: int, left: int | None, **more: Any) -> Tensor:
        """All nodes in one call. With ``left`` a node sees that many positions."""
        words = words_of(paths, -(-len(paths) // 64))[None]
        begins = [begin if left is None else max(begin, self.prefix + len(path) - left) for path in paths]
        case = {**self.more, **more, "query_BTQD": self.query[:, : len(paths)], "kv_pool": self.pool, "ancestors_BTX": words}
        case |= {"prefix_begin_BT": torch.tensor([begins]), "prefix_end_B": torch.tensor([self.prefix])}
        return run(fused.tree_attention, case)[0]

    def plainly(self, path: list[int], begin: int, left: int | None, **more: Any) -> Tensor:
        """The last node of a path as plain decoding has it: its ancestors' keys in the slots of their positions, all of them prefix."""
        pool, end = self.moved(path)
        first = begin if left is None else max(begin, end + 1 - left)
        case = {**self.more, **more, "query_BTQD": self.query[:, path[-1] : path[-1] + 1], "kv_pool": pool}
        case |= {"prefix_begin_BT": torch.tensor([[first]]), "prefix_end_B": torch.tensor([end])}
        return run(fused.tree_attention, case | {"ancestors_BTX": torch.ones(1, 1, 1, dtype=torch.int64)})[0, 0]


def run(launcher: Any, case: Case) -> Tensor:
    out: Tensor = launcher(**case)
    assert out.isfinite().all() and not semaphores(out.device, 1).any(), "a counter was left"
    return out


def assert_bits(row: Row, paths: list[list[int]], begin: int = 0, left: int | None = None, **more: Any) -> None:
    """Of every third node, the last included: an interpreted launch takes most of a second."""
    found = row.together(paths, begin, left, **more)
    for node in range(len(paths) - 1, -1, -3):
        path = paths[node]
        assert torch.equal(found[node], row.plainly(path, begin, left, **more)), f"node {node}, path {path}"


@pytest.mark.parametrize(("prefix", "page_size"), [(0, 1), (16, 16), (30, 1), (121, 16), (250, 64)])
def test_a_tree_has_the_bits_of_plain_decoding(prefix: int, page_size: int) -> None:
    row = Row(prefix, 12, page_size=page_size)
    assert_bits(row, random_tree(12, row.generator))


@pytest.mark.parametrize(("queries", "groups"), [(3, 1), (6, 1), (5, 5)])
def test_heads_that_no_tile_divides(queries: int, groups: int) -> None:
    """Rows of one token lie in two tiles."""
    row = Row(44, 13, queries=queries, groups=groups)
    assert_bits(row, random_tree(13, row.generator))


def test_a_path_over_several_blocks_and_two_words() -> None:
    row = Row(41, 100, queries=2, groups=1)
    long = [list(range(0, 2 * depth + 1, 2)) for depth in range(45)]
    paths = [long[node // 2] if node % 2 == 0 else [*long[node // 2], node] for node in range(90)]
    found = row.together(paths, 0, None)
    for node in (0, 35, 64, 88, 89):
        assert torch.equal(found[node], row.plainly(paths[node], 0, None)), node


@pytest.mark.parametrize("left", [12, 40])
def test_sliding_windows(left: int) -> None:
    """They hold a node's whole path, as a plan demands: ``prefix_begin`` cuts the prefix alone."""
    row = Row(121, 12)
    assert_bits(row, random_tree(12, row.generator), left=left)


def test_sinks_and_capped_scores() -> None:
    row = Row(75, 12)
    assert_bits(row, random_tree(12, row.generator), sink_Q=torch.tensor([0.5, -1.0, 2.0, 0.0]), softcap=0.7)


@pytest.mark.parametrize("multiprocessors", [1, 3, 50])
def test_units_of_every_size(multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one multiprocessor stretches, on many blocks: the last run and the window's blocks are units of their own in each."""
    row = Row(600, 12, queries=2, groups=1)
    paths = random_tree(12, row.generator)
    tiled(monkeypatch, 32, 16, multiprocessors=multiprocessors)
    found = row.together(paths, 0, None)
    tiled(monkeypatch, 32, 16, multiprocessors=2)
    for node in (0, 7, 11):
        assert torch.equal(found[node], row.plainly(paths[node], 0, None))


@ORDERS
def test_any_order_of_programs(order: int | None) -> None:
    row = Row(121, 12)
    paths = random_tree(12, row.generator)
    expected = row.together(paths, 0, None)
    with program_order(order):
        assert torch.equal(row.together(paths, 0, None), expected)


@pytest.mark.parametrize("tile", [(16, 32)])
def test_float32(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    tiled(monkeypatch, *tile, multiprocessors=2)
    row = Row(75, 12, dtype=torch.float32)
    assert_bits(row, random_tree(12, row.generator))


def test_the_kernel_by_slot_has_other_bits() -> None:
    """Else the tests above would show nothing."""
    row = Row(121, 12)
    paths = random_tree(12, row.generator)
    expected = row.together(paths, 0, None)
    words = words_of(paths, 1)[None]
    case = {**row.more, "query_BTQD": row.query, "kv_pool": row.pool, "ancestors_BTX": words}
    case |= {"prefix_begin_BT": torch.zeros(1, 12, dtype=torch.int64), "prefix_end_B": torch.tensor([row.prefix])}
    assert not torch.equal(run(by_slot.tree_attention, case)[0], expected)


@pytest.mark.parametrize(("first", "tokens", "left"), [(0, 9, None), (37, 150, None), (37, 20, 11)])
def test_a_chunk_has_the_bits_of_plain_decoding(first: int, tokens: int, left: int | None) -> None:
    row = Row(first, tokens, queries=2, groups=1)
    slot = torch.arange(first, first + tokens)[None]
    begin = torch.zeros_like(slot) if left is None else (slot + 1 - left).clamp(min=0)
    case = {**row.more, "query_BTQD": row.query, "kv_pool": row.pool, "prefix_begin_BT": begin, "slot_BT": slot}
    found = run(fused.chunk_attention, case | {"valid_BT": torch.ones_like(slot, dtype=torch.bool)})[0]
    for token in range(tokens - 1, -1, -40):
        assert torch.equal(found[token], row.plainly(list(range(token + 1)), 0, left)), token


@pytest.mark.full
@pytest.mark.parametrize("name", ["tree_attention", "chunk_attention"])
def test_error_is_that_of_the_reference(name: str) -> None:
    """On all small cases, NaN outside of what is seen and windows cut by the table's end included."""
    op, launcher = op_of(name), getattr(fused, name)
    for case in cases_of(op, torch.Generator().manual_seed(0)):
        valid = case.get("valid_BT", slice(None))
        assert_float_law(*(each[valid] for each in (launcher(**case), op.reference(**case), op.reference(**widened(case)))))

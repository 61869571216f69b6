"""The fused tree attention: against float64, at word and page boundaries, and bit for bit in any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.errors import ConfigError
from graphspec.kernels import op_of
from graphspec.kernels.attention.fused import tree_attention as fused
from graphspec.kernels.fused.launch import recording, semaphores
from tests.kernels.cases.attention import poison_unseen, random_pool, visible_slots
from tests.support.float_law import assert_float_law, widened

from ._programs import ORDERS, program_order, side_by_side

OP = op_of("tree_attention")

Case = dict[str, Any]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch, nan_memory: None) -> None:
    """Splits of 32 slots, runs of two, stretches of eight, so that short tables have many of each."""
    monkeypatch.setattr(fused, "RUN", 64)
    monkeypatch.setattr(fused, "STRETCH", 256)
    monkeypatch.setattr(fused, "tile_shape", lambda dim, dtype: (32, 32, 4))
    machine(monkeypatch, 2)


def machine(monkeypatch: pytest.MonkeyPatch, multiprocessors: int) -> None:
    monkeypatch.setattr(fused, "multiprocessors", lambda device: multiprocessors)


def make(
    ends: list[int],
    tokens: int,
    *,
    columns: int,
    page_size: int = 16,
    queries: int = 2,
    groups: int = 1,
    dim: int = 8,
    words: int = 1,
    begin: int = 0,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    seed: int = 0,
) -> Case:
    """Lanes with a prefix each, and nodes that see themselves and a random half of the nodes before them; all else is NaN."""
    generator = torch.Generator().manual_seed(seed)
    lanes, length, window = len(ends), columns * page_size, window or tokens
    pool, table = random_pool(generator, lanes=lanes, columns=columns, page_size=page_size, heads=groups, dim=dim, layers=2)
    end = torch.tensor(ends)
    node, place = torch.arange(tokens)[:, None] + window - tokens, torch.arange(64 * words)
    bits = (torch.rand(lanes, tokens, 64 * words, generator=generator) < 0.5) & (place < node) | (place == node)
    bits &= (end[:, None, None] + place) < length
    ancestors = (bits.view(lanes, tokens, words, 64).to(torch.int64) << torch.arange(64)).sum(-1)
    begin_BT = torch.randint(begin, begin + 3, (lanes, tokens), generator=generator)
    poison_unseen(pool, table, visible_slots(begin_BT, end, ancestors, length))
    return {
        "query_BTQD": torch.randn(lanes, tokens, queries, dim, generator=generator).to(dtype),
        "kv_pool": pool.to(dtype),
        "layer": 1,
        "table_BP": table,
        "prefix_begin_BT": begin_BT,
        "prefix_end_B": end,
        "ancestors_BTX": ancestors,
        "scale": dim**-0.5,
    }


def run(case: Case) -> Tensor:
    out: Tensor = OP.implementation("fused")(**case)
    assert not semaphores(out.device, 1).any(), "a counter was left"
    return out


def assert_law(case: Case) -> None:
    assert_float_law(run(case), OP.reference(**case), OP.reference(**widened(case)))


@pytest.mark.parametrize(("tokens", "page_size"), [(31, 1), (32, 3), (33, 16), (63, 3), (64, 16), (65, 1)])
def test_word_and_page_boundaries(tokens: int, page_size: int) -> None:
    columns = -(-(tokens + 24) // page_size)
    assert_law(make([21], tokens, columns=columns, page_size=page_size, words=-(-tokens // 64), queries=1))


@pytest.mark.parametrize("end", [0, 31, 33, 64])
def test_window_of_two_words_anywhere_in_a_block(end: int) -> None:
    assert_law(make([end], 5, columns=13, words=2, window=128))


def test_three_words() -> None:
    assert_law(make([11], 3, columns=14, words=3, window=190))


def test_a_window_cut_by_the_end_of_the_table() -> None:
    assert_law(make([58, 64, 40], 8, columns=4))


@pytest.mark.parametrize("dim", [5, 80])
def test_head_dimensions(dim: int) -> None:
    assert_law(make([19], 3, columns=3, dim=dim, queries=6, groups=2))


@pytest.mark.parametrize("begin", [40, 400])
def test_sliding_windows(begin: int) -> None:
    """Blocks before every row's begin aren't read; a begin after the prefix leaves the window alone."""
    assert_law(make([150], 9, columns=11, begin=begin))


@pytest.mark.parametrize("tokens", [1, 7])
def test_float16(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr(fused, "RUN", 128)
    monkeypatch.setattr(fused, "tile_shape", lambda dim, dtype: (64, 128, 4))
    assert_law(make([150, 3], tokens, columns=11, queries=4, groups=2, dim=64, dtype=torch.float16))


def test_no_query_sees_anything() -> None:
    case = make([20, 0, 30], 3, columns=3)
    case["kv_pool"][:] = torch.nan
    case["prefix_begin_BT"][:] = 10**12
    case["ancestors_BTX"][:] = 0
    case["table_BP"][1] = -1
    assert not run(case).any()


def test_rows_of_one_tile_may_see_nothing() -> None:
    case = make([150], 6, columns=11)
    case["prefix_begin_BT"][0, ::2] = 10**12
    case["ancestors_BTX"][0, ::2] = 0
    case["ancestors_BTX"][0, 1::2] = 1 << torch.arange(3)[:, None]
    seen = visible_slots(case["prefix_begin_BT"], case["prefix_end_B"], case["ancestors_BTX"], 176)
    case["kv_pool"].nan_to_num_(0.5)
    poison_unseen(case["kv_pool"], case["table_BP"], seen)
    assert_law(case)
    assert not run(case)[0, ::2].any() and run(case)[0, 1::2].any()


def test_bits_do_not_depend_on_programs_table_width_or_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten splits: one by one on a large machine, in runs of two on a smaller one, in stretches of eight on the smallest."""
    case = make([290, 40], 5, columns=20)
    found, maximum = {}, {}
    for count in (1, 2, 132):
        machine(monkeypatch, count)
        with recording() as launches:
            fused.tree_attention(**case)
        maximum[count] = launches[0].grid[1] * fused.UNITS_PER_PROGRAM
        found[count] = run(case)
    assert maximum[1] < 5 <= maximum[2] < 10 <= maximum[132]
    assert torch.equal(found[1], found[132]) and torch.equal(found[2], found[132])
    wide = {**case, "table_BP": torch.cat([case["table_BP"], torch.full((2, 45), -1, dtype=torch.int32)], 1)}
    assert torch.equal(run(wide), found[1])
    for lane in range(2):
        one = slice(lane, lane + 1)
        names = ("query_BTQD", "table_BP", "prefix_begin_BT", "prefix_end_B", "ancestors_BTX")
        assert torch.equal(run({**case, **{name: case[name][one] for name in names}}), found[1][one])
    assert_law(case)


@ORDERS
def test_bits_do_not_depend_on_who_arrives_last(monkeypatch: pytest.MonkeyPatch, order: int | None) -> None:
    """One program after the other: who waits for the rest waits in vain, and leaves."""
    case = make([150, 90], 3, columns=11)
    machine(monkeypatch, 132)
    expected = run(case)
    monkeypatch.setattr(fused, "helpers", lambda programs, places: 3)
    with program_order(order) as launches:
        found = run(case)
    assert launches[0] == 12 and torch.equal(found, expected)


@pytest.mark.parametrize(("helpers", "seed"), [(2, 0), (3, 1), (9, 2)])
def test_bits_do_not_depend_on_who_merges(monkeypatch: pytest.MonkeyPatch, helpers: int, seed: int) -> None:
    """Programs side by side, in any order between their atomic operations: several share the rows, and counters are left at 0."""
    case = make([150, 90], 8, columns=11)
    machine(monkeypatch, 132)
    expected = run(case)
    monkeypatch.setattr(fused, "helpers", lambda programs, places: helpers)
    monkeypatch.setattr(fused, "tile_shape", lambda dim, dtype: (16, 32, 4))
    monkeypatch.setattr(fused, "MERGE_ROWS", 4)
    with side_by_side(seed) as steps:
        found = run(case)
    assert len(steps) > 24 and torch.equal(found, expected)


def test_a_node_of_a_chain_attends_as_the_same_token_alone() -> None:
    """Prefix or window: the same visible slots give the same bits, for any T."""
    chain = make([90], 6, columns=6, queries=2)
    chain["prefix_begin_BT"][:] = 0
    chain["ancestors_BTX"][0] = (1 << torch.arange(1, 7)[:, None]) - 1
    chain["kv_pool"].nan_to_num_(0.25)
    together = run(chain)
    for token in (0, 5):
        alone = {**chain, "query_BTQD": chain["query_BTQD"][:, token : token + 1], "prefix_end_B": torch.tensor([90 + token])}
        alone |= {"prefix_begin_BT": torch.zeros(1, 1, dtype=torch.int64), "ancestors_BTX": torch.ones(1, 1, 1, dtype=torch.int64)}
        assert torch.equal(run(alone)[0, 0], together[0, token])


def test_strided_arguments() -> None:
    case = make([40, 21], 4, columns=5, queries=4, groups=2)
    expected = run(case)
    lanes, tokens, heads, dim = case["query_BTQD"].shape
    packed = torch.full((lanes, tokens, heads + 4, dim), torch.nan)
    packed[:, :, :heads] = case["query_BTQD"]
    case["prefix_begin_BT"][:] = case["prefix_begin_BT"][:, :1].clone()
    plain = run(case)
    spread = case["prefix_begin_BT"][:, :1].expand(-1, tokens)
    assert torch.equal(run({**case, "query_BTQD": packed[:, :, :heads], "prefix_begin_BT": spread}), plain)
    assert expected.shape == plain.shape


def test_unsupported_dtypes_are_refused() -> None:
    case = make([3], 1, columns=1)
    with pytest.raises(ConfigError, match="float64"):
        run({**case, "query_BTQD": case["query_BTQD"].double()})
    with pytest.raises(ConfigError, match="kv_pool"):
        run({**case, "kv_pool": case["kv_pool"].half()})

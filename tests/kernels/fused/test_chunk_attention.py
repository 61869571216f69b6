"""The fused chunk attention: against float64, at block and page boundaries, and bit for bit in any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.errors import ConfigError
from graphspec.kernels import op_of
from graphspec.kernels.attention.fused import chunk_attention as fused
from tests.kernels.cases.attention import poison_unseen, random_pool
from tests.support.float_law import assert_float_law, widened

OP = op_of("chunk_attention")

Case = dict[str, Any]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch, nan_memory: None) -> None:
    monkeypatch.setattr(fused, "tile_shape", lambda dim, dtype: (32, 32, 4, 1))


def make(
    first: list[int],
    tokens: int,
    *,
    columns: int,
    page_size: int = 16,
    queries: int = 2,
    groups: int = 1,
    dim: int = 8,
    window: int = 10**6,
    valid: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """A chunk a lane from slot ``first`` on, whose tokens see ``window`` slots back; all else is NaN."""
    generator = torch.Generator().manual_seed(tokens)
    lanes, length = len(first), columns * page_size
    pool, table = random_pool(generator, lanes=lanes, columns=columns, page_size=page_size, heads=groups, dim=dim, layers=2)
    slot = torch.tensor(first)[:, None] + torch.arange(tokens)
    begin = (slot + 1 - window).clamp(min=0)
    counts = (torch.arange(tokens) < (tokens if valid is None else valid)).expand(lanes, -1).contiguous()
    place = torch.arange(length)
    poison_unseen(pool, table, (place >= begin[..., None]) & (place <= slot[..., None]) & counts[..., None])
    return {
        "query_BTQD": torch.randn(lanes, tokens, queries, dim, generator=generator).to(dtype),
        "kv_pool": pool.to(dtype),
        "layer": 1,
        "table_BP": table,
        "prefix_begin_BT": begin,
        "slot_BT": slot,
        "valid_BT": counts,
        "scale": dim**-0.5,
    }


def run(case: Case) -> Tensor:
    out: Tensor = OP.implementation("fused")(**case)
    return out


def assert_law(case: Case) -> None:
    assert_float_law(run(case), OP.reference(**case), OP.reference(**widened(case)))


@pytest.mark.parametrize(("tokens", "page_size"), [(31, 1), (32, 3), (33, 16), (65, 16)])
def test_boundaries(tokens: int, page_size: int) -> None:
    assert_law(make([30], tokens, columns=-(-(tokens + 30) // page_size), page_size=page_size, queries=1))


@pytest.mark.parametrize("window", [1, 5, 40])
def test_sliding_windows(window: int) -> None:
    assert_law(make([60, 3], 9, columns=5, window=window))


@pytest.mark.parametrize("dim", [5, 80])
def test_head_dimensions(dim: int) -> None:
    assert_law(make([20], 5, columns=2, dim=dim, queries=6, groups=2))


def test_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "tile_shape", lambda dim, dtype: (64, 64, 4, 2))
    assert_law(make([100], 20, columns=8, queries=4, groups=2, dim=64, dtype=torch.float16))


def test_slots_between_two_ranges_stay_unread() -> None:
    """Rows of one tile that see distant slots; the slots between are NaN."""
    case = make([64], 2, columns=6)
    case["slot_BT"], case["prefix_begin_BT"] = torch.tensor([[3, 70]]), torch.tensor([[1, 66]])
    case["kv_pool"].nan_to_num_(0.5)
    place = torch.arange(96)
    poison_unseen(case["kv_pool"], case["table_BP"], (place >= case["prefix_begin_BT"][..., None]) & (place <= case["slot_BT"][..., None]))
    assert_law(case)


def test_invalid_tokens_return_zero() -> None:
    case = make([20, 0], 7, columns=2, valid=4)
    case["slot_BT"][:, 4:] = 10**12
    assert not run(case)[:, 4:].any()
    assert_law(case)
    case["valid_BT"][:] = False
    case["kv_pool"][:] = torch.nan
    case["table_BP"][:] = -1
    assert not run(case).any()


def test_bits_do_not_depend_on_table_width_batch_or_chunk() -> None:
    case = make([50, 7], 20, columns=5)
    expected = run(case)
    assert torch.equal(run(case), expected)
    wide = {**case, "table_BP": torch.cat([case["table_BP"], torch.full((2, 9), -1, dtype=torch.int32)], 1)}
    assert torch.equal(run(wide), expected)
    one = {k: v[1:] if k not in ("kv_pool", "layer", "scale") else v for k, v in case.items()}
    assert torch.equal(run(one), expected[1:])
    part = {k: v[:, 8:] if k in ("query_BTQD", "prefix_begin_BT", "slot_BT", "valid_BT") else v for k, v in case.items()}
    assert torch.equal(run(part), expected[:, 8:])


def test_unsupported_dtypes_are_refused() -> None:
    case = make([3], 1, columns=1)
    with pytest.raises(ConfigError, match="kv_pool"):
        run({**case, "kv_pool": case["kv_pool"].half()})

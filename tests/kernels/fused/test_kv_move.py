"""The fused KV move against its reference, with programs in any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphspec.kernels import op_of

from ._programs import ORDERS, program_order

OP = op_of("kv_move")


def run(name: str, case: dict[str, Any]) -> torch.Tensor:
    pool: torch.Tensor = case["kv_pool"].clone()
    OP.implementation(name)(**{**case, "kv_pool": pool})
    return pool


def make(
    path: list[list[int]], lengths: list[int], *, page_size: int = 4, heads: int = 2, dim: int = 5, sides: int = 2, dtype: torch.dtype
) -> dict[str, Any]:
    """Lanes whose slots are on scattered pages, beginning in the middle of a page."""
    lanes, nodes = len(path), 1 + max(max(nodes) for nodes in path)
    columns = 2 + (nodes + page_size - 1) // page_size
    generator = torch.Generator().manual_seed(nodes)
    pages = lanes * columns + 1
    return {
        "kv_pool": torch.randn(2, sides, pages, page_size, heads, dim, generator=generator).to(dtype),
        "table_RP": (torch.randperm(pages - 1, generator=generator) + 1).view(lanes, columns).to(torch.int32),
        "seq_len_R": torch.randint(0, page_size + 1, (lanes,), generator=generator),
        "path_BA": torch.tensor(path),
        "accept_len_B": torch.tensor(lengths),
    }


PATHS = {
    "in-place": ([[0, 1, 2, 3]], [4]),
    "shifted": ([[0, 2, 3, 4], [0, 3, 6, 9]], [4, 4]),
    "crossed": ([[0, 2, 1, 4], [3, 0, 1, 2]], [3, 4]),
    "cut": ([[0, 5, 6, 7], [0, 5, 6, 7], [0, 5, 6, 7]], [0, 1, 2]),
    "wide": ([[0, *range(9, 41)]], [33]),
}


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@ORDERS
def test_a_parallel_copy(name: str, dtype: torch.dtype, order: int | None) -> None:
    path, lengths = PATHS[name]
    case = make(path, lengths, dtype=dtype)
    with program_order(order) as launches:
        found = run("fused", case)
    assert launches == [4 * len(path)]
    assert torch.equal(found[:, :, 1:], run("reference", case)[:, :, 1:])
    assert torch.equal(found[:, :, 0], case["kv_pool"][:, :, 0]), "the dummy page is left alone"
    assert torch.equal(found, run("fused", case))
    assert (name == "in-place") == torch.equal(found, case["kv_pool"])


def test_rows_of_several_chunks_and_latent_pools() -> None:
    path, lengths = PATHS["shifted"]
    for sides, heads, dim in ((2, 3, 700), (1, 1, 576)):
        case = make(path, lengths, heads=heads, dim=dim, sides=sides, dtype=torch.float32)
        with program_order(1) as launches:
            found = run("fused", case)
        assert launches == [2 * sides * len(path) * -(-heads * dim // 1024)]
        assert torch.equal(found[:, :, 1:], run("reference", case)[:, :, 1:])


@ORDERS
def test_lanes_reach_their_rows(order: int | None) -> None:
    """Two live lanes on rows 3 and 1; padded ones share a dummy row that holds nothing usable."""
    case = make([[0, 2, 5], [0, 3, 4]], [3, 2], dtype=torch.float32)
    expected = run("reference", case)
    table, seq_len = torch.full((5, case["table_RP"].shape[1]), -(2**30), dtype=torch.int32), torch.full((5,), -(2**40))
    table[[3, 1]], seq_len[[3, 1]] = case["table_RP"], case["seq_len_R"]
    case |= {
        "table_RP": table,
        "seq_len_R": seq_len,
        "lane_row_B": torch.tensor([3, 4, 1, 4]),
        "path_BA": torch.stack((case["path_BA"][0], torch.full((3,), -(2**40)), case["path_BA"][1], torch.full((3,), 2**40))),
        "accept_len_B": torch.tensor([3, 0, 2, 0]),
    }
    with program_order(order):
        found = run("fused", case)
    assert torch.equal(found[:, :, 1:], expected[:, :, 1:])

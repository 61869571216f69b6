"""Sums between products under the law: a row's bits depend on the row, not on how many others there are, nor on how they lie in memory."""

from __future__ import annotations

import pytest
import torch

from graphspec.errors import CaptureError
from graphspec.kernels.linear.fused.head_product import head_product
from graphspec.kernels.linear.fused.sum_squares import BLOCK, sum_squares

from ._programs import ORDERS, program_order

ROWS = (1, 2, 15, 16, 17, 63, 64, 65, 130)


@pytest.mark.parametrize("dense", ["outputs", "inputs"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_of_a_head_has_the_same_bits_among_others(dtype: torch.dtype, dense: str) -> None:
    generator = torch.Generator().manual_seed(0)
    heads, inputs, outputs = 2, 72, 40
    x = torch.randn(1, max(ROWS), heads, inputs, generator=generator).to(dtype)
    weight = torch.randn(heads, *((inputs, outputs) if dense == "outputs" else (outputs, inputs)), generator=generator).to(dtype)
    weight = weight if dense == "outputs" else weight.transpose(1, 2)
    whole = head_product(x, weight)
    assert whole.isfinite().all()
    for rows in ROWS:
        assert torch.equal(head_product(x[:, :rows], weight), whole[:, :rows])
    lanes = head_product(x.view(5, 26, heads, inputs), weight)
    assert torch.equal(lanes.view_as(whole), whole)
    apart = torch.cat((x, torch.full_like(x, torch.nan)), -1)[..., :inputs]
    assert torch.equal(head_product(apart, weight), whole)


@ORDERS
def test_programs_of_heads_may_run_in_any_order(order: int | None) -> None:
    x, weight = torch.randn(2, 40, 3, 20), torch.randn(3, 20, 100)
    expected = head_product(x, weight)
    with program_order(order) as launches:
        assert torch.equal(head_product(x, weight), expected)
    assert launches == [2 * 4 * 3]


def test_a_weight_that_would_be_copied_is_refused() -> None:
    x, weight = torch.randn(1, 2, 3, 8), torch.randn(3, 8, 12)
    sparse = torch.randn(3, 16, 24)[:, ::2, ::2]
    for wrong, words in ((weight.double(), "float64"), (weight[:2], r"\[3, 8, outputs\]"), (sparse, "dense inputs or outputs")):
        with pytest.raises(CaptureError, match=words):
            head_product(x, wrong)


@pytest.mark.parametrize("channels", [3, 128, BLOCK + 900])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_the_same_sum_of_squares_among_others(dtype: torch.dtype, channels: int) -> None:
    x = torch.randn(1, 65, 2, channels, generator=torch.Generator().manual_seed(channels)).to(dtype)
    whole = sum_squares(x)
    for rows in (1, 2, 16, 64):
        assert torch.equal(sum_squares(x[:, :rows]), whole[:, :rows])
    among = torch.cat((x, torch.full_like(x, torch.nan)), 2)[:, :, :2]
    assert torch.equal(sum_squares(among), whole) and torch.equal(sum_squares(x[0, 7, 1]), whole[0, 7, 1])
    assert torch.equal(sum_squares(x.transpose(0, 1)), whole.transpose(0, 1))

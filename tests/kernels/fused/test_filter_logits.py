"""Thresholds without a sort keep exactly the tokens that the reference keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ._vocabulary import call, functions, lane

REFERENCE, FUSED = functions("filter_logits")


def case_of(
    logits: Tensor, temperature: float | list[float] = 1.0, top_k: int | list[int] = -1, top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
) -> dict[str, Any]:  # fmt: skip
    values = {"temperature_B": temperature, "top_p_B": top_p, "min_p_B": min_p}
    case = {key: torch.tensor(value, dtype=torch.float32).expand(len(logits)).contiguous() for key, value in values.items()}
    return {"logits_BTV": logits, **case, "top_k_B": torch.tensor(top_k).expand(len(logits)).contiguous()}


def check(case: dict[str, Any]) -> Tensor:
    (found,) = call(FUSED, case)
    expected = REFERENCE(**case)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    return found


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("vocab", [1, 2, 37, 1023, 1025])
def test_sizes(vocab: int) -> None:
    found = check(case_of(randn(3, 1, vocab, seed=vocab), [0.0, 0.7, 1.3], [2, 9, -1], [0.5, 1.0, 0.8], [0.5, 0.0, 0.01]))
    assert found[0].isfinite().all() and (vocab < 37 or not found[1:].isfinite().all())


@pytest.mark.parametrize(("top_k", "kept"), [(1, 1), (2, 4), (4, 4), (5, 5), (1199, 1199), (1200, 1200), (0, 1200)])
def test_equal_logits_at_the_kth_stay_together(top_k: int, kept: int) -> None:
    logits = torch.arange(1200.0).flip(0)[None, None] / 100
    logits[..., 2:4] = logits[..., 1]
    order = torch.randperm(1200, generator=torch.Generator().manual_seed(1))
    found = check(case_of(logits[..., order].contiguous(), top_k=top_k))
    assert found.isfinite().sum() == kept


def test_top_p_takes_a_whole_tie_and_stops_at_an_exact_share() -> None:
    """Four equal tokens have probability 1/4 each: sums are exact, so the boundary of top-p is unambiguous."""
    logits = torch.full((4, 1, 50), -60.0)
    logits[:, 0, [3, 9, 20, 49]] = 1.0
    logits[1:, 0, 9] = torch.tensor([0.5, 0.5, -0.5])
    for share, counts in ((0.25, [4, 3, 3, 3]), (0.9, [4, 4, 4, 3])):
        assert check(case_of(logits, top_p=share)).isfinite().sum(-1).flatten().tolist() == counts
    two = torch.full((1, 1, 40), -torch.inf)
    two[..., 7], two[..., 30] = 2.0, 1.999
    assert check(case_of(two, top_p=0.5)).isfinite().sum() == 1


def test_a_list_longer_than_its_block() -> None:
    """Thousands of values so close that they share a bin, and thousands that are the same."""
    close = 5.0 - torch.rand(1, 1, 2600, generator=torch.Generator().manual_seed(2)) * 2**-10
    close[..., 100] = 5.0
    found = check(case_of(close, top_k=2300, top_p=0.95))
    assert 2100 < found.isfinite().sum() < 2300
    assert check(case_of(torch.full((1, 1, 2600), 0.25), top_k=3, top_p=0.3)).isfinite().all()


@pytest.mark.parametrize("temperature", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e30])
def test_scales(temperature: float, scale: float) -> None:
    """From nearly flat rows to rows whose second token has no weight, the k-th largest is found."""
    logits = randn(1, 1, 150, seed=4) * scale
    assert check(case_of(logits, temperature, top_k=20)).isfinite().sum() == 20
    check(case_of(logits, temperature, top_p=0.6))


def test_what_is_not_finite_is_out() -> None:
    logits = randn(2, 3, 60, seed=5)
    logits[:, 0, 10:] = -torch.inf
    logits[:, 1, :5] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan, torch.inf])
    logits[:, 2] = torch.tensor([torch.nan, torch.inf, -torch.inf])[torch.arange(60) % 3]
    found = check(case_of(logits, [1.0, 0.0], 20, 0.95))
    assert torch.equal(found[1].view(torch.int32), logits[1].view(torch.int32)), "a greedy row comes back as it is"
    assert not found[0].isnan().any() and not (found[0] == torch.inf).any() and not found[0, 2].isfinite().any()


def test_rows_do_not_depend_on_batch_or_order() -> None:
    case = case_of(randn(5, 1, 1100, seed=6), [0.8, 1.0, 1.7, 0.0, 1.0], [50, -1, 200, 3, 1], [0.9, 0.8, 0.95, 0.5, 1.0])
    found = check(case)
    for b in (0, 1):
        (alone,) = call(FUSED, lane(case, b))
        assert torch.equal(alone[0], found[b])
    order = torch.randperm(1100, generator=torch.Generator().manual_seed(7))
    (shuffled,) = call(FUSED, {**case, "logits_BTV": case["logits_BTV"][..., order].contiguous()})
    assert torch.equal(shuffled, found[..., order])

"""Fused ranking of a vocabulary, whole or one rank's part: tokens of the reference, sums of exponentials within the float tolerance."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.kernels.tree.fused import draft_topk as module
from tests.support.float_law import assert_float_law, widened

from ._vocabulary import call, functions, lane

REFERENCE, FUSED = functions("draft_topk")
SHARD_REFERENCE, SHARD_FUSED = functions("shard_topk")
CHUNK = module.CHUNK


def case_of(logits: Tensor, topk: int, *, mapped: bool = False, temperature: list[float] | None = None, seed: int = 0) -> dict[str, Any]:
    lanes, _, vocab = logits.shape
    generator = torch.Generator().manual_seed(seed)
    return {
        "logits_BTVd": logits,
        "topk": topk,
        "target_token_Vd": torch.randperm(3 * vocab, generator=generator)[:vocab] if mapped else None,
        "seed_B": torch.randint(-(2**62), 2**62, (lanes,), generator=generator) if temperature else None,
        "position_B": torch.randint(0, 5000, (lanes,), generator=generator) if temperature else None,
        "temperature_B": torch.tensor(temperature) if temperature else None,
    }


def check(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Tokens equal; log-probabilities by the law of floats."""
    logprob, token = call(FUSED, case)
    expected_logprob, expected_token = REFERENCE(**case)
    assert torch.equal(token, expected_token)
    assert not logprob.isnan().any()
    assert_float_law(logprob, expected_logprob, REFERENCE(**widened(case))[0], partly=True)
    return logprob, token


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    ("vocab", "topk"),
    [(1, 1), (2, 2), (37, 8), (37, 32), (1000, 32), (CHUNK - 1, 1), (CHUNK, 8), (CHUNK + 1, 4), (2 * CHUNK + 77, 8), (2 * CHUNK + 77, 1)],
)
def test_sizes(vocab: int, topk: int) -> None:
    logits = randn(2, 1, vocab, seed=vocab)
    check(case_of(logits[:1], topk, mapped=topk == 8))
    check(case_of(logits, topk, mapped=topk != 8, temperature=[0.0, 0.9]))


@pytest.mark.parametrize("merge", [1, 16])
def test_winners_are_merged_in_any_number_of_steps(monkeypatch: pytest.MonkeyPatch, merge: int) -> None:
    monkeypatch.setattr(module, "MERGE", merge)
    check(case_of(randn(1, 1, 2 * CHUNK + 5), 6, mapped=True))


@pytest.mark.parametrize("topk", [40, 100])
def test_topk_may_be_the_whole_vocabulary(topk: int) -> None:
    logits = randn(1, 1, topk).round(decimals=0)
    _, token = check(case_of(logits, topk))
    assert sorted(token.flatten().tolist()) == list(range(topk))


def test_ties_go_to_the_lowest_id_across_chunks() -> None:
    logits = torch.full((1, 2, 2 * CHUNK + 9), -1.0)
    ties = [3, CHUNK - 1, CHUNK, 2 * CHUNK, 2 * CHUNK + 8]
    logits[0, 0, ties] = 2.0
    logits[0, 1, ties] = torch.tensor([0.0, -0.0, 0.0, -0.0, 0.0])
    _, token = check(case_of(logits, 7))
    assert token.tolist() == [[[*ties, 0, 1]] * 2]


def test_a_row_without_finite_logits_scores_minus_infinity() -> None:
    logits = torch.full((1, 4, CHUNK + 3), torch.nan)
    logits[0, 1] = torch.inf
    logits[0, 2] = -torch.inf
    logits[0, 3, CHUNK + 1] = -7.0
    logprob, token = check(case_of(logits, 3))
    assert logprob[0, :3].tolist() == [[-math.inf] * 3] * 3 and token[0, :3].tolist() == [[0, 1, 2]] * 3
    assert logprob[0, 3].tolist() == [0.0, -math.inf, -math.inf] and token[0, 3].tolist() == [CHUNK + 1, 0, 1]
    check(case_of(logits, 3, temperature=[1.0], mapped=True))


@pytest.mark.parametrize("offset", [-3e4, 3e4])
def test_large_logits_do_not_overflow_the_sum(offset: float) -> None:
    logits = randn(1, 1, CHUNK + 40) + offset
    logits[..., :CHUNK] = -torch.inf
    check(case_of(logits, 4))


def test_rows_do_not_depend_on_the_batch_around_them() -> None:
    case = case_of(randn(2, 2, CHUNK + 100), 4, mapped=True, temperature=[0.7, 0.0])
    logprob, token = call(FUSED, case)
    again = call(FUSED, case)
    assert torch.equal(again[0], logprob) and torch.equal(again[1], token)
    for b, t in ((0, 0), (1, 1)):
        alone = call(FUSED, lane(case, b, t))
        assert torch.equal(alone[0][0, 0], logprob[b, t]) and torch.equal(alone[1][0, 0], token[b, t])


@pytest.mark.parametrize(
    ("columns", "topk", "absent"), [(1, 1, 0), (37, 8, 5), (CHUNK, 1, 0), (CHUNK + 1, 4, CHUNK), (2 * CHUNK + 77, 32, 70), (40, 3, 40)]
)
@pytest.mark.parametrize("noisy", [False, True])
def test_parts_of_a_vocabulary(columns: int, topk: int, absent: int, noisy: bool) -> None:
    """Keys without noise to the bit; columns after the end of the vocabulary are ignored."""
    logits = randn(2, 2, columns, seed=columns).round(decimals=1)
    logits[..., columns - absent :] = torch.nan
    logits[0, 1, 0] = torch.inf
    ids = torch.arange(columns) + 5000
    ids[columns - absent :] = -1
    noise = (torch.tensor([0.0, 0.9]), torch.tensor([5, -7]), torch.tensor([[3, 4], [900, 17]])) if noisy else (None, None, None)
    found, expected = SHARD_FUSED(logits, topk, ids, *noise), SHARD_REFERENCE(logits, topk, ids, *noise)
    oracle = SHARD_REFERENCE(logits.double(), topk, ids, *noise)
    assert torch.equal(found[1], expected[1]) and torch.equal(found[3], expected[3])
    assert bool(found[3][0, 1]) == (absent == columns) and found[3][1, 1]
    greedy = found[0][:1] if noisy else found[0]
    assert torch.equal(greedy, expected[0][: len(greedy)])
    for place in (0, 2):
        assert_float_law(found[place], expected[place], oracle[place], partly=True)

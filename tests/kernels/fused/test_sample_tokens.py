"""Fused sampling over the vocabulary: the tokens of the reference, for every split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.kernels.sampling.fused._thresholds import BLOCK

from ._vocabulary import call, functions, lane

REFERENCE, FUSED = functions("sample_tokens")
PLAIN: dict[str, Any] = {
    "temperature_B": None, "seed_B": None, "position_BT": None, "top_k_B": None, "top_p_B": None, "min_p_B": None, "strict": True,
}  # fmt: skip


def hot(logits: Tensor, temperature: list[float] | None = None, seed: int = 3) -> dict[str, Any]:
    lanes, rows = logits.shape[:2]
    return {
        **PLAIN,
        "logits_BTV": logits,
        "temperature_B": torch.tensor(temperature if temperature is not None else [1.0] * lanes),
        "seed_B": torch.arange(lanes) * 77 + seed,
        "position_BT": 10 + torch.arange(lanes * rows).view(lanes, rows),
    }


def filtered(case: dict[str, Any], top_k: list[int] | int = -1, top_p: list[float] | float = 1.0, min_p: list[float] | float = 0.0) -> Any:
    lanes = len(case["logits_BTV"])
    return {
        **case,
        "top_k_B": torch.tensor(top_k).expand(lanes).contiguous(),
        "top_p_B": torch.tensor(top_p, dtype=torch.float32).expand(lanes).contiguous(),
        "min_p_B": torch.tensor(min_p, dtype=torch.float32).expand(lanes).contiguous(),
    }


def check(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    token, sound = call(FUSED, case)
    expected_token, expected_sound = REFERENCE(**case)
    assert torch.equal(token, expected_token) and torch.equal(sound, expected_sound)
    assert token.dtype == torch.int64 and sound.dtype == torch.bool
    return token, sound


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("vocab", [1, 2, 37, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 2500])
def test_sizes(vocab: int) -> None:
    logits = randn(2, 1, vocab, seed=vocab)
    check({**PLAIN, "logits_BTV": logits})
    check(hot(logits, [0.0, 0.8]))
    check(filtered(hot(logits[1:], [0.8]), 7, 0.95, 0.02))


@pytest.mark.parametrize("rows", [1, 5], ids=["small parts", "large parts"])
def test_ties_go_to_the_lowest_id_across_parts(rows: int) -> None:
    vocab = 4 * BLOCK + 3
    logits = torch.full((rows, 1, vocab), -1.0)
    places = (7, BLOCK - 1, BLOCK, 2 * BLOCK + 1, 4 * BLOCK, vocab - 1)
    for row in range(rows):
        logits[row, 0, list(places[row:])] = 2.0
    logits[0, 0, 3] = -0.0
    token, _ = check({**PLAIN, "logits_BTV": logits})
    assert token[:, 0].tolist() == list(places[:rows])


def test_zeros_of_either_sign_tie() -> None:
    logits = torch.full((1, 2, 40), -1.0)
    logits[0, 0, 5:8] = torch.tensor([-0.0, 0.0, 0.0])
    logits[0, 1, 5:8] = torch.tensor([0.0, -0.0, 0.0])
    token, _ = check({**PLAIN, "logits_BTV": logits})
    assert token.tolist() == [[5, 5]]


def broken_rows(vocab: int) -> Tensor:
    logits = randn(1, 8, vocab, seed=5)
    for row, (where, value) in enumerate(
        ((0, torch.nan), (vocab - 1, torch.inf), (vocab // 2, -torch.inf), (slice(None), -torch.inf), (slice(None), torch.nan)), start=1
    ):
        logits[0, row, where] = value
    logits[0, 6, 1:] = -torch.inf
    logits[0, 7, ::2] = torch.nan
    return logits


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("mode", ["greedy", "hot", "filtered"])
def test_what_is_not_finite_is_seen_and_never_sampled(strict: bool, mode: str) -> None:
    logits = broken_rows(BLOCK + 9)
    case = {**PLAIN, "logits_BTV": logits} if mode == "greedy" else hot(logits)
    token, sound = check({**(filtered(case, 5, 0.9) if mode == "filtered" else case), "strict": strict})
    assert sound[0].tolist() == [True, False, False, not strict, False, False, not strict, False]
    assert token[0, 3 + 1] == token[0, 5] == 0
    assert logits[0].gather(1, token[0, :, None])[[0, 1, 2, 3, 6, 7]].isfinite().all()


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(1, 1.0, 0.0), (-1, 1e-6, 0.0), (-1, 1.0, 1.0), (40, 1.0, 0.0), (-1, 0.8, 0.0), (-1, 1.0, 0.1), (30, 0.7, 0.05)],
)
def test_filters(top_k: int, top_p: float, min_p: float) -> None:
    logits = randn(2, 1, 200, seed=7)
    case = filtered(hot(logits, [0.0, 1.5]), top_k, top_p, min_p)
    token, _ = check(case)
    best = logits.argmax(-1)
    assert token[0] == best[0], "a greedy row is not filtered"
    if top_k == 1 or top_p < 1e-3 or min_p == 1:
        assert torch.equal(token, best)
    else:
        tokens = [REFERENCE(**{**case, "seed_B": case["seed_B"] + i})[0][1] for i in range(20)]
        assert any(not torch.equal(token, best[1]) for token in tokens)


def test_a_low_temperature_row_is_filtered_by_tokens_that_can_win() -> None:
    """At temperature 0.01 the k-th largest may have no weight; tokens still equal the reference's."""
    logits = randn(2, 1, 300, seed=8)
    check(filtered(hot(logits, [0.01, 0.05]), 50, 0.9))


def test_rows_do_not_depend_on_the_batch_around_them() -> None:
    """Alone a row is split into small parts, in the batch into large ones."""
    full = filtered(hot(randn(5, 1, BLOCK + 5, seed=9), [0.9, 0.0, 1.4, 1.0, 1.0]), [-1, 3, 50, 9, -1], 0.9)
    for case in (full, {**full, "top_k_B": None, "top_p_B": None, "min_p_B": None}):
        token, sound = check(case)
        again = call(FUSED, case)
        assert torch.equal(again[0], token) and torch.equal(again[1], sound)
        for b in (0, 2):
            alone = call(FUSED, lane(case, b))
            assert alone[0].item() == token[b] and alone[1].item() == sound[b]


def test_noise_follows_the_position_and_not_the_row() -> None:
    logits = randn(1, 1, 500, seed=10).expand(1, 3, -1)
    case = {**hot(logits, [9.0]), "position_BT": torch.tensor([[5, 6, 5]])}
    token, _ = check(case)
    assert token[0, 0] == token[0, 2] != token[0, 1]

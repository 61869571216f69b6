"""Losses that aim at the acceptance rate: their values and gradients, by formulas written out, and what training with them does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphspec.config.train_options import CROSS_ENTROPY, LK_ALPHA, LK_LAMBDA, LOSSES, TrainConfig
from graphspec.errors import ConfigError
from graphspec.train.draft import Texts, draft_losses, train_draft
from graphspec.train.drafter import Target
from graphspec.train.losses import CrossEntropyAndOverlap, SoftCrossEntropy, mean_loss
from tests.support.drafts import random_text, recipe, tiny_target


def rows(count: int = 6, vocab: int = 9, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(count, vocab, generator=generator, dtype=dtype).requires_grad_()
    return logits, (2 * torch.randn(count, vocab, generator=generator, dtype=dtype)).softmax(-1)


def written_out(kind: str, logits: torch.Tensor, soft: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """The losses as the paper has them, with autograd's gradients."""
    logits, soft = logits[counted], soft[counted]
    cross_entropy = -(soft * logits.log_softmax(-1)).sum(-1)
    overlap = 1 - (soft - logits.softmax(-1)).abs().sum(-1) / 2
    if kind == CROSS_ENTROPY:
        return cross_entropy.mean()
    if kind == LK_ALPHA:
        return -overlap.log().mean()
    share = torch.exp(-3 * overlap.mean().detach())
    return share * cross_entropy.mean() + (1 - share) * (1 - overlap.mean())


@pytest.mark.parametrize("kind", LOSSES)
def test_values_and_gradients_are_those_of_the_formulas(kind):
    logits, soft = rows()
    counted = torch.tensor([True, True, False, True, True, False])
    ours = mean_loss(kind, logits, soft, counted)
    expected = written_out(kind, logits, soft, counted)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)
    [gradient], [wanted] = (torch.autograd.grad(loss, logits) for loss in (ours, expected))
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-7)
    assert bool((gradient[~counted] == 0).all()) and bool((gradient[counted] != 0).any())


def test_gradients_are_those_of_finite_differences():
    logits, soft = rows()
    assert torch.autograd.gradcheck(lambda x: CrossEntropyAndOverlap.apply(x, soft), logits)
    assert torch.autograd.gradcheck(lambda x: SoftCrossEntropy.apply(x, soft), logits)


def test_a_draft_that_is_the_target_has_nothing_to_gain():
    _, soft = rows()
    logits = soft.log().requires_grad_()
    loss = mean_loss(LK_ALPHA, logits, soft, torch.ones(len(soft), dtype=torch.bool))
    assert float(loss.detach()) == pytest.approx(0, abs=1e-7)


def test_for_a_target_that_is_sure_it_is_cross_entropy():
    logits, _ = rows()
    sure, every = torch.eye(9, dtype=torch.float64)[:6], torch.ones(6, dtype=torch.bool)
    torch.testing.assert_close(mean_loss(LK_ALPHA, logits, sure, every), mean_loss(CROSS_ENTROPY, logits, sure, every), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", LOSSES)
def test_nothing_in_common_and_nothing_counted_stay_finite(kind):
    logits = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
    for counted in (True, False):
        loss = mean_loss(kind, logits, torch.tensor([[0.0, 0.5, 0.5]]), torch.tensor([counted]))
        [gradient] = torch.autograd.grad(loss, logits)
        assert bool(loss.isfinite()) and bool(gradient.isfinite().all())
        assert counted or float(loss.detach()) == 0


def overlap(drafter, target, tokens) -> float:
    """The mean acceptance rate of the first drafted token."""
    features, logits = Target(target).view(tokens, drafter.tap_layers)
    row = torch.arange(tokens.shape[1] - 4)
    losses, _ = draft_losses(drafter, features, logits, tokens, row, 4, kind=LK_ALPHA)
    return float(torch.exp(-losses[0].detach()))


@pytest.mark.parametrize("kind", LOSSES)
def test_training_raises_the_acceptance_rate(tmp_path, kind):
    target = tiny_target()
    stream = random_text(1, 4000)[0].to(torch.int32).numpy()
    made = recipe(
        "eagle3", steps=30, batch=4, sequence_length=24, raw_share=1.0, loss=kind, network={"tap_layers": [1, 2], "draft_vocab_size": 96}
    )
    fresh = train_draft(replace(made, train=replace(made.train, steps=1, lr=1e-9, adamw_lr=1e-9)), target, Texts(stream, {}), tmp_path)[0]
    (tmp_path / "eagle3.pt").unlink()
    trained, figures = train_draft(made, target, Texts(stream, {}), tmp_path)
    assert overlap(trained, target, random_text(4, 24, seed=9)) > overlap(fresh, target, random_text(4, 24, seed=9)) + 0.02
    assert len(figures["loss_by_depth"]) == 4
    assert made.settings()["loss"] == kind


def test_an_unknown_loss_is_named():
    with pytest.raises(ConfigError, match=r"train.loss: .*one of cross_entropy, lk_alpha, lk_lambda"):
        TrainConfig(loss="kl")
    assert TrainConfig().loss == CROSS_ENTROPY and LK_LAMBDA in LOSSES

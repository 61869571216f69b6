"""Training against loops: which tokens repeat, the loss and its gradient, fewer loops afterwards, resuming with the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from graphspec.errors import CheckpointError, ConfigError
from graphspec.train.filters import repetition
from recipes.target import options, run
from recipes.unlikelihood import NAME, repeated, unlikelihood
from tests.recipes.test_targets import TARGET
from tests.train.test_train import interrupt_at, weights_of, words

AGAINST = [f"unlikelihood.{key}={value}" for key, value in {
    "steps": 30, "width": 4, "refresh": 5, "sequences": 8, "batch": 4, "prompt": 8, "length": 40, "lr": 0.01, "weight": 4.0,
}.items()]  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of text."""
    (tmp_path / "texts").mkdir()
    for number in range(12):
        (tmp_path / "texts" / f"{number:02d}.txt").write_text(f"text {number}: " + "abc abd abe " * 12)
    return tmp_path / "texts"


def test_a_token_repeats_where_it_ends_a_run_seen_before() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 3, (6, 40)).astype(np.int32)
    for begin, width in ((0, 2), (5, 3), (10, 5)):
        mask = repeated(tokens, begin, width)
        for row, flags in zip(tokens.tolist(), mask, strict=True):
            for end, flag in enumerate(flags, 1):
                earlier = [row[i : i + width] for i in range(begin, end - width)]
                assert flag == (end - width >= begin and row[end - width : end] in earlier)
        assert mask[:, begin:].sum() / mask[:, begin + width - 1 :].size == pytest.approx(repetition(tokens[:, begin:].tolist(), width))


def test_the_loss_is_that_of_the_paper_and_keeps_its_gradient_near_certainty() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7, dtype=torch.float64)
    tokens, mask = torch.randint(7, (2, 5)), torch.rand(2, 5) < 0.5
    p = logits.softmax(-1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(unlikelihood(logits, tokens, mask).double(), (-torch.log1p(-p) * mask).sum() / 10, rtol=1e-5, atol=1e-6)
    # One token at 1 - 4e-18 in float32: it is pushed down with all the weight it has, the next one up.
    sure = torch.tensor([[[40.0, 0.0, -5.0]]], requires_grad=True)
    unlikelihood(sure, torch.tensor([[0]]), torch.tensor([[True]])).backward()
    assert sure.grad is not None
    torch.testing.assert_close(sure.grad[0, 0], torch.tensor([1.0, -0.9933, -0.0067]), rtol=0, atol=1e-4)


def test_a_run_goes_on_to_the_same_bits(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {}
    for side, more in (("without", []), ("whole", AGAINST), ("halves", AGAINST)):
        command = words(source, tmp_path / side, *TARGET, *more, "train.checkpoint_steps=4", "train.log_steps=5")
        if side == "halves":

            def die() -> None:
                raise SystemExit

            # In the third round of texts, two steps after a checkpoint.
            interrupt_at(monkeypatch, 24 + 14, die)
            with pytest.raises(SystemExit):
                run(*options(command))
            monkeypatch.undo()
            assert torch.load(tmp_path / f"{side}.work" / f"{NAME}.pt")["step"] == 12
        figures[side] = run(*options(command))["training"]
    assert weights_of(tmp_path / "whole") == weights_of(tmp_path / "halves") != weights_of(tmp_path / "without")
    assert NAME not in figures["without"]
    records = [json.loads(line) for line in (tmp_path / "whole.work" / f"{NAME}.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [5, 10, 15, 20, 25, 30]
    assert figures["whole"][NAME]["repeated"] == records[-1]["repeated"] > 0


def test_what_repeats_becomes_less_likely(tmp_path: Path, source: Path) -> None:
    """In one text, written once: a target this young only finds other loops."""
    more = ("unlikelihood.refresh=100", "unlikelihood.weight=100", "train.log_steps=1")
    run(*options(words(source, tmp_path / "out", *TARGET, *AGAINST, *more)))
    first, *_, last = [json.loads(line) for line in (tmp_path / "out.work" / f"{NAME}.jsonl").read_text().splitlines()]
    assert first["repeated"] == last["repeated"] > 0.5
    assert last[NAME] < 0.5 * first[NAME]


def test_other_settings_do_not_go_on(tmp_path: Path, source: Path) -> None:
    command = words(source, tmp_path / "out", *TARGET, *AGAINST)
    run(*options(command))
    with pytest.raises(CheckpointError, match=r"unlikelihood\.pt: unlikelihood"):
        run(*options([*command, "unlikelihood.weight=2"]))


@pytest.mark.parametrize(
    ("words_", "key"),
    [
        (["steps=-1"], "steps"), (["width=1"], "width"), (["weight=0"], "weight"), (["batch=9", "sequences=8"], "batch"),
        (["length=70", "prompt=64"], "length"), (["refresh=0"], "refresh"),
    ],
)  # fmt: skip
def test_bad_settings_name_their_key(words_: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"unlikelihood\.{key}: "):
        options([f"unlikelihood.{word}" for word in words_])


def test_text_beyond_the_context_is_refused(tmp_path: Path, source: Path) -> None:
    with pytest.raises(ConfigError, match=r"unlikelihood\.length: expected at most .* = 128, found 200"):
        run(*options(words(source, tmp_path / "out", *TARGET, *AGAINST, "unlikelihood.length=200")))

"""``train.cache_features``: the target reads each sequence once, and nothing else changes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from graphspec.errors import ConfigError
from graphspec.train import cached
from graphspec.train.draft import Chats, Texts, train_draft
from graphspec.train.drafter import Drafter
from tests.support.drafts import PARALLEL, SMALL, random_text, recipe, tiny_target

LENGTH = 20
ROUNDING = 5e-4
"""The target reads sequences alone, so products of float32 sum in other orders, through four steps."""


def some_texts() -> Texts:
    tokens = random_text(6, LENGTH, seed=5).numpy().astype(np.int32)
    marks = np.random.default_rng(0).random((6, LENGTH)) < 0.7
    return Texts(random_text(1, 500)[0].numpy(), {LENGTH: random_text(12, LENGTH, seed=3).numpy()}, [Chats(0.5, {LENGTH: (tokens, marks)})])


def trained(variant: str, work: Path, steps: int = 4, **changes: object) -> tuple[Drafter, list[torch.Size]]:
    """The network after ``steps`` steps, and the shapes of what its target read."""
    target, seen = tiny_target(), []
    target.model.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
    settings = {"network": (SMALL | PARALLEL)[variant], "unroll": 4, "phases": [[steps, 4, LENGTH]], "lr": 0.01, "schedule": "constant"}
    work.mkdir(exist_ok=True)
    drafter, _ = train_draft(recipe(variant, **(settings | {"warmup": 0} | changes)), target, some_texts(), work)
    return drafter, seen


@pytest.mark.parametrize("variant", sorted(SMALL | PARALLEL))
def test_a_cache_changes_no_more_than_the_order_of_sums(variant: str, tmp_path: Path) -> None:
    plain, read = trained(variant, tmp_path / "plain")
    kept, read_once = trained(variant, tmp_path / "kept", cache_features=True)
    assert read.count(torch.Size([4, LENGTH])) == 4
    # 16 sequences are drawn out of 18, some of them twice.
    alone = read_once.count(torch.Size([1, LENGTH]))
    assert torch.Size([4, LENGTH]) not in read_once
    assert 4 < alone < 16
    for name, parameter in kept.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name), rtol=ROUNDING, atol=ROUNDING, msg=name)
    assert not (tmp_path / "kept" / cached.FILE).exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("raw_share", [0.0, 0.5])
def test_a_resumed_run_has_the_same_bits(dtype: str, raw_share: float, tmp_path: Path) -> None:
    """The second part begins with an empty cache, and reads sequences in other batches than the first did."""
    settings = {"cache_features": True, "dtype": dtype, "raw_share": raw_share}
    whole, _ = trained("eagle3", tmp_path / "whole", 6, **settings)
    trained("eagle3", tmp_path / "parts", 3, **settings)
    parts, _ = trained("eagle3", tmp_path / "parts", 6, **settings)
    for name, parameter in parts.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name)), name


def test_ids_outside_the_draft_vocabulary_count_as_misses_all_the_same(tmp_path: Path) -> None:
    """Of a vocabulary of 8 ids most of the target's choices are missing: the agreements are those without a cache."""
    network = {"draft_vocab_size": 8, "tap_layers": [1, 2]}
    figures = []
    for cache in (False, True):
        target, work = tiny_target(), tmp_path / str(cache)
        work.mkdir()
        made = recipe("eagle3", network=network, unroll=2, phases=[[1, 18, LENGTH]], cache_features=cache)
        figures.append(train_draft(made, target, some_texts(), work)[1])
    assert figures[0]["agreement_by_depth"] == figures[1]["agreement_by_depth"]
    assert figures[0]["loss_by_depth"] == pytest.approx(figures[1]["loss_by_depth"], rel=1e-4)
    assert max(figures[0]["agreement_by_depth"]) < 0.7


def test_a_disk_that_fills_up_meanwhile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"train\.work: .*No space left on device"):
        trained("eagle3", tmp_path / "work", cache_features=True)
    assert not (tmp_path / "work" / cached.FILE).exists()


def test_a_disk_that_is_too_small_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 100})())
    with pytest.raises(ConfigError, match=r"train\.work: expected room for train\.cache_features, .* found 100 B free"):
        trained("eagle3", tmp_path / "work", cache_features=True)

"""Every set of config keys that published drafts have: what loads loads and drafts, what can't is refused by one message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from graphspec.api.llm import LLM, SamplingParams
from graphspec.config.catalog import load_object, resolve_variant
from graphspec.errors import CheckpointError
from graphspec.facts import read_model_facts
from graphspec.models.target import load_target
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.engines import SMALL, prompts
from tests.support.published_drafts import ROWS, write_target

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SEEDED = [SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.8, seed=3)]
GREEDY = [SamplingParams(max_tokens=16, ignore_eos=True)]
PROMPT = prompts(1, (11,), VOCAB_SIZE)[0]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def target(family: str) -> Path:
        if family not in made:
            made[family] = write_target(tmp_path_factory.mktemp("targets") / family, family)
        return made[family]

    return target


@pytest.fixture(scope="module")
def plain(targets: Callable[[str], Path]) -> Callable[[str], list[list[int]]]:
    """What a target says without a draft: greedy, and drawn."""
    made: dict[str, list[list[int]]] = {}

    def output(family: str) -> list[list[int]]:
        if family not in made:
            llm = LLM(targets(family), variant="none", **SMALL)
            made[family] = [out.token_ids for out in llm.generate([PROMPT] * 2, GREEDY + SEEDED)]
        return made[family]

    return output


def load(name: str, folder: Path, target_path: Path) -> Any:
    variant, target = resolve_variant(ROWS[name].variant), read_model_facts(target_path)
    facts = load_object(variant.facts)(folder, target)
    network = load_target(target, facts.tap_layers, 64, torch.float32, "cpu")
    return load_object(variant.loader)(facts, network, 64, torch.float32, "cpu")


@pytest.mark.parametrize("name", ROWS)
def test_a_published_config_loads_or_says_why_not(name: str, tmp_path: Path, targets: Callable[[str], Path]) -> None:
    row = ROWS[name]
    folder = row.write(tmp_path)
    if row.refused:
        with pytest.raises(CheckpointError, match=row.refused):
            load(name, folder, targets(row.target))
        return
    draft = load(name, folder, targets(row.target))
    assert not any(parameter.is_meta for parameter in draft.parameters())
    assert draft.facts.decoder.eos_token_ids == ()


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.runs])
def test_a_published_kind_drafts(
    name: str, tmp_path: Path, targets: Callable[[str], Path], plain: Callable[[str], list[list[int]]]
) -> None:
    row = ROWS[name]
    llm = LLM(
        targets(row.target), variant=row.variant, draft=row.write(tmp_path), **{**SMALL, "num_steps": 3, "topk": 2, "num_draft_tokens": 6}
    )
    outputs = llm.generate([PROMPT] * 2, GREEDY + SEEDED)
    assert [out.token_ids for out in outputs] == plain(row.target)

"""An engine that measures its linear layers before it builds anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from graphspec.config.schema import KernelsConfig
from graphspec.engine.request import SamplingParams
from graphspec.engine.tuning import read_table
from graphspec.errors import ConfigError
from graphspec.kernels.linear.fused import linear_tune
from graphspec.kernels.linear.fused.linear_choice import LinearShape, LinearTable, device_identity
from tests.support.engines import CHAIN, mirror_pair, prompts

CPU = torch.device("cpu")


def test_an_engine_measures_the_shapes_of_its_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shape of every program once, before the first build; a second engine reads the file and measures nothing."""
    measured: list[LinearShape] = []

    def note(table: LinearTable, shapes: Sequence[LinearShape], device: torch.device) -> None:
        measured.extend(shapes)
        table.entries.update(dict.fromkeys(shapes))

    monkeypatch.setattr(linear_tune, "tune", note)
    pair, path = mirror_pair(tmp_path), tmp_path / "tables" / "linear.json"
    keys = {"mode": "fused", "attention": "reference", "max_rows": 1, "buckets": [1], "page_size": 4, "max_context": 64, **CHAIN}
    prompt = prompts(1)[0]
    for _ in range(2):
        llm = pair.llm(**keys, linear_table=str(path))
        assert llm.generate(prompt, SamplingParams(max_tokens=2))[0].token_ids == pair.greedy(prompt, 2)
        # Draft steps, the verify chain and the window, both prefill chunks.
        assert {1, 5, 8, 16} == {shape.rows for shape in measured}
        assert len(measured) == len(set(measured)) == len(LinearTable.load(path, device_identity(CPU)).entries)


def test_without_a_file_nothing_is_known(tmp_path: Path) -> None:
    assert read_table(tmp_path / "none.json", CPU).entries == {}


def test_a_table_of_another_machine_is_refused(tmp_path: Path) -> None:
    LinearTable().save(tmp_path / "table.json", {"gpu": "another"})
    with pytest.raises(ConfigError, match=r"kernels\.linear_table.*another"):
        read_table(tmp_path / "table.json", CPU)


def test_batch_invariant_numerics_choose_nothing() -> None:
    with pytest.raises(ConfigError, match=r"kernels\.linear_table"):
        KernelsConfig(numerics="batch_invariant", linear_table="table.json")


def test_an_unused_linear_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kernels\.linear_table.*kernels\.mode=reference"):
        mirror_pair(tmp_path).llm(linear_table=str(tmp_path / "table.json"))

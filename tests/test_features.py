"""The writer of docs/features.md: what markers say of green and of red tests, and a table that is written alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import features
from tests.support.features import BY_FAMILY, FeatureTable, of_family, shows

MODULE = """
import pytest
from tests.support.features import of_family, shows

@of_family("Glm4ForCausalLM", "logits")
def test_green(): pass

@pytest.fixture(params=[pytest.param(0, marks=of_family("Gemma2ForCausalLM"))])
def size(request): return request.param

@pytest.mark.covers("eagle3", "chain")
@shows("eagle3", "chain")
def test_family_of_a_fixture(size): pass

@of_family("Glm4ForCausalLM", "tree")
@pytest.mark.parametrize("bad", [False, True])
def test_half_red(bad): assert not bad
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "features.md"
    monkeypatch.setattr(features, "PAGE", file)
    return file


def run(table: FeatureTable, folder: Path) -> None:
    module = folder / f"{folder.name}.py"  # modules of one name would be taken for each other
    module.write_text(MODULE, encoding="utf-8")
    # Of this repository's conftest nothing is wanted: it would register a table of its own.
    pytest.main(["-q", "-p", "no:cacheprovider", "--noconftest", "-c", "/dev/null", "--rootdir", str(folder), str(module)], plugins=[table])


def cells(text: str, row: str) -> dict[str, str]:
    """The cells of a row that are not empty, by column."""
    lines = text[text.index(BY_FAMILY) :].splitlines()
    head = next(line for line in lines if line.startswith("| family |"))
    line = next(line for line in lines if line.startswith(f"| {row} |"))
    names, values = ([part.strip() for part in each.split("|")[2:-1]] for each in (head, line))
    return {name: value for name, value in zip(names, values, strict=True) if value}


def test_markers_of_a_run_become_two_tables(page: Path, tmp_path: Path) -> None:
    run(FeatureTable(), tmp_path)
    text = page.read_text(encoding="utf-8")
    assert cells(text, "glm4") == {"logits": "1", "tree": "failed"}
    assert cells(text, "gemma2") == {"eagle3": "1", "chain": "1"}
    assert cells(text, "llama") == {}
    assert "| chain |  |  | 1 |" in text[: text.index(BY_FAMILY)]


def test_the_table_by_family_may_be_written_alone(page: Path, tmp_path: Path) -> None:
    table = FeatureTable()
    table.variants.passed["mtp", "chain"] = 7
    table.pytest_sessionfinish()
    assert "7" in page.read_text(encoding="utf-8")
    run(FeatureTable(families_only=True), tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "| chain |  |  |  |  |  |  | 7 |" in text and cells(text, "glm4")["logits"] == "1"


@pytest.mark.parametrize(
    "make", [lambda: of_family("Glm4ForCausalLM", "trees"), lambda: shows("stree"), lambda: of_family("KimiLinearForCausalLM", "tree")]
)
def test_a_marker_with_a_name_that_is_none_is_an_error(make: Any) -> None:
    with pytest.raises(AssertionError):
        make()

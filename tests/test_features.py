"""The writer of docs/features.md: what markers say of green and of red tests, in one process and in several."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphspec.lab.measure.provenance import ROOT
from tests.support.features import BY_FAMILY, of_family, shows

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
PLUGIN = """
from pathlib import Path
from tests.support import features

features.PAGE = Path({page!r})

def pytest_configure(config):
    config.pluginmanager.register(features.FeatureTable())
"""


def run(folder: Path, processes: int) -> None:
    """What ``make features`` does, for the tests above."""
    (folder / "test_few.py").write_text(MODULE, encoding="utf-8")
    (folder / "conftest.py").write_text(PLUGIN.format(page=str(folder / "features.md")), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(folder), str(folder)]
    done = subprocess.run([*command, *(["-n", str(processes)] if processes else [])], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "1 failed, 3 passed" in done.stdout, done.stdout


def cells(text: str, row: str) -> dict[str, str]:
    """The cells of a row that are not empty, by column."""
    lines = text[text.index(BY_FAMILY) :].splitlines()
    head = next(line for line in lines if line.startswith("| family |"))
    line = next(line for line in lines if line.startswith(f"| {row} |"))
    names, values = ([part.strip() for part in each.split("|")[2:-1]] for each in (head, line))
    return {name: value for name, value in zip(names, values, strict=True) if value}


@pytest.mark.parametrize("processes", [0, 2])
def test_markers_of_a_run_become_two_tables(processes: int, tmp_path: Path) -> None:
    run(tmp_path, processes)
    text = (tmp_path / "features.md").read_text(encoding="utf-8")
    assert cells(text, "glm4") == {"logits": "1", "tree": "failed"}
    assert cells(text, "gemma2") == {"eagle3": "1", "chain": "1"}
    assert cells(text, "llama") == {}
    assert "| chain |  |  | 1 |" in text[: text.index(BY_FAMILY)]


@pytest.mark.parametrize(
    "make", [lambda: of_family("Glm4ForCausalLM", "trees"), lambda: shows("stree"), lambda: of_family("KimiLinearForCausalLM", "tree")]
)
def test_a_marker_with_a_name_that_is_none_is_an_error(make: Any) -> None:
    with pytest.raises(AssertionError):
        make()

"""Shared by all tests: fixed seeds, one CPU thread, and a hypothesis profile without deadlines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

# Read when Triton is imported: without a GPU, fused kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.support.features import FeatureTable

if TYPE_CHECKING:
    from tests.support.engines import Pair
    from tests.support.variants import Family

# Compilation makes single examples slow, so time says nothing about them; the same examples everywhere make a red run repeatable.
hypothesis.settings.register_profile("graphspec", deadline=None, derandomize=True, max_examples=50, print_blob=True, database=None)
hypothesis.settings.load_profile("graphspec")

FUSED = Path(__file__).resolve().parent / "kernels" / "fused"


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    """Seeds torch, and gives back the thread count and default dtype a test may have changed."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


# Imported when first asked for: many tests need neither engines nor transformers.


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target, and an EAGLE-3 draft that is right most of the time, so that runs of every length are accepted."""
    from tests.support.engines import mirror_pair

    return mirror_pair(tmp_path_factory.mktemp("pair"), noise=0.8)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A draft that is always right; a slot, position or feature that is off by one shows as a miss."""
    from tests.support.engines import mirror_pair

    return mirror_pair(tmp_path_factory.mktemp("twin"))


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """One target with a draft of every variant."""
    from tests.support.variants import build_family

    return build_family(tmp_path_factory.mktemp("family"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything about fused kernels is of the kernel tier; marked before pytest selects by marker."""
    for item in items:
        if FUSED in item.path.parents:
            item.add_marker("kernels")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-features", action="store_true", help="write docs/features.md from what this run shows")
    parser.addoption("--fuzz-seed", type=int, default=0, help="which inputs the fuzzers take and invent")
    parser.addoption("--fuzz-budget", type=int, default=100, help="inputs of each fuzzer")
    parser.addoption("--fuzz-seconds", type=float, default=30.0, help="time limit of the fuzzer of a server")
    parser.addoption("--clients", default=".venv-clients/bin", help="folder of the programs of other people's clients")
    parser.addoption("--soak-requests", type=int, default=80, help="requests of the soak test")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-features"):
        config.pluginmanager.register(FeatureTable())

"""The real model of the tests: where it is on this machine, one engine for all of them. Nothing is downloaded here; ``make test`` does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from graphspec import LLM
from graphspec.config.compose import load_config
from graphspec.errors import ConfigError
from graphspec.facts.folders import model_folder


@pytest.fixture(scope="session")
def real() -> Path:
    """Its folder. Skipped only where the model is not on this machine: ``make test`` fetches it, which needs a network once."""
    path = load_config("experiment=chat").model.path
    try:
        return model_folder(path)
    except ConfigError as error:
        if error.key != "model.path":
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def chain(real: Path) -> Iterator[LLM]:
    """The n-gram chain, two rows."""
    with LLM(real, variant="ngram", num_steps=3, topk=1, num_draft_tokens=4, max_rows=2, buckets=[2], max_context=6144) as llm:
        yield llm

"""A pair with a tokenizer for what is measured, and a report of everything that results may hold."""

from __future__ import annotations

import pytest

from tests.support.engines import Pair, add_tokenizer, mirror_pair
from tests.support.report_page import Document, render
from tests.support.report_records import records


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    made = mirror_pair(tmp_path_factory.mktemp("mirror"), noise=1.0)
    add_tokenizer(made.target)
    return made


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Document]:
    return render(tmp_path_factory.mktemp("whole"), records())

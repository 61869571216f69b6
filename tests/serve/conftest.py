"""One tiny engine with a tokenizer and a chat template, and one server over it for all tests that leave it intact."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.engines import CHAIN, Pair, add_tokenizer, mirror_pair
from tests.support.serving import BOS, TEMPLATE, Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphspec.api.llm import LLM


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    pair = mirror_pair(tmp_path_factory.mktemp("pair"), noise=0.8)
    add_tokenizer(pair.target, bos=BOS, chat_template=TEMPLATE)
    return pair


@pytest.fixture(scope="module")
def llm(pair: Pair) -> Iterator[LLM]:
    with pair.llm(**CHAIN, max_rows=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Served]:
    with serving(llm) as found:
        yield found

"""Compiled cycles of hybrid targets on a CPU: native kernels, and the tokens of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphspec.api.llm import SamplingParams
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.engines import TREE, ids, prompts, random_pair
from tests.support.features import marked
from tests.support.hybrid_checkpoints import build_hybrid, hybrid_of

LENGTH = 15
PROMPTS = prompts(4, (12, 1, 25, 7), VOCAB_SIZE)


@pytest.mark.kernels
@pytest.mark.parametrize("family", marked(("qwen3_5", "nemotron_h", "falcon_h1"), hybrid_of, "eagle3", "tree", "compiled"))
def test_compiled_cycles_decode_the_same(family: str, tmp_path: Path) -> None:
    pair = random_pair(tmp_path, build_hybrid(family, seed=1))
    llm = pair.llm(**TREE, mode="compiled", page_size=4, max_rows=3)
    assert llm.cycle.kernels.records, "they are native"
    assert ids(llm.generate(PROMPTS, SamplingParams(max_tokens=LENGTH))) == [pair.greedy(prompt, LENGTH) for prompt in PROMPTS]

"""The full cross: variant, chain or tree, runtime, batch, page size; greedy, and sampled under every filter and penalty."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from graphspec.api.llm import SamplingParams
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.engines import CHAIN, TREE, WIDE, ids, prompts
from tests.support.variants import Family

from .test_variants import HEADS, PATHS, STATIC, make, mixed, name_of

pytestmark = pytest.mark.full

LENGTH = 24
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    *itertools.product(("eagle", "mtp-1", "standalone"), (CHAIN, TREE, WIDE, STATIC)),
    ("mtp-3", HEADS),
    *itertools.product(("ngram", "ngram_trie"), (CHAIN, PATHS)),
]


def asking(runtime: str, temperature: float, batch: int) -> list[SamplingParams]:
    """As :func:`mixed`. Compiled, the first row uses all parameters, so that there is one sampling class: compiling takes a minute."""
    params = mixed(temperature, batch, LENGTH)
    if runtime == "compiled":
        params[0] = replace(
            params[0], top_k=40, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1,
            logit_bias={3: 1.0, 9: -2.0}, min_tokens=3,
        )  # fmt: skip
    return params


@pytest.mark.parametrize("runtime", ["eager", "compiled"])
@pytest.mark.parametrize(("name", "shape"), SHAPES, ids=name_of)
def test_no_setting_changes_the_output(family: Family, name: str, shape: dict[str, Any], runtime: str) -> None:
    for page_size in (1, 16):
        buckets = {"buckets": [8], "max_rows": 8} if runtime == "compiled" else {}
        llm = make(family, name, shape, runtime=runtime, page_size=page_size, **buckets)
        for batch in (1, 3, 8):
            prompt_ids = prompts(batch, vocab=VOCAB_SIZE)
            assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=LENGTH))) == [family.pair.greedy(p, LENGTH) for p in prompt_ids]
            for temperature in (0.7, 1.0):
                key, params = (runtime, temperature, batch), asking(runtime, temperature, batch)
                if key not in family.plain:
                    family.plain[key] = ids(family.llm("none").generate(prompt_ids, params))
                assert ids(llm.generate(prompt_ids, params)) == family.plain[key], (page_size, batch, temperature)

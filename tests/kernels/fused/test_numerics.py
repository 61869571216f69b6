"""Token for token in bfloat16: engines on interpreted fused kernels, whose models make ties.

The output layer has every row twice and the logits are rounded to bfloat16, so that tokens tie or nearly do. What is compared is every bit
of the logits of every committed position. Blocks of keys are 16 slots, so that short rows have several. The interpreter shows addresses and
the order of tiles; the instruction is read from the machine code by ``tests/kernels/proof``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphspec.api.llm import LLM
from graphspec.kernels.attention.fused import tree_attention as by_slot
from tests.support.law import NETWORKS, SHAPES, TREE, Found, answered, assert_same, requests, write_family

KEYS: dict[str, Any] = {
    "mode": "fused", "runtime": "eager", "dtype": "bfloat16", "max_rows": 2, "buckets": [2], "max_context": 64, "prefill_chunks": [4],
}  # fmt: skip
COUNT, TOKENS = 3, 6
"""Of a test of the kernel tier; two rows serve three requests."""
LONG = (5, 38)
"""Of a thorough one: 200 tokens."""
CASES = [
    (variant, shape, (1, 16, 64)[(number + step) % 3])
    for number, variant in enumerate(("ngram", *NETWORKS))
    for step, shape in enumerate(SHAPES)
]
"""Every drafter and shape, each page size in turn; n-gram trees have all of them."""
CASES += [("ngram", "tree", page) for page in (1, 64)]


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_slot, "RUN", 32)
        patch.setattr(by_slot, "STRETCH", 128)
        patch.setattr(by_slot, "tile_shape", lambda dim, dtype: (32, 16, 4))
        yield


class Family:
    def __init__(self, path: Path) -> None:
        self.folders, self.known = write_family(path), dict[tuple[str, tuple[int, int]], Found]()

    def run(self, variant: str, numerics: str, size: tuple[int, int], **keys: Any) -> tuple[Found, float]:
        draft = None if variant == "none" else self.folders[variant]
        llm = LLM(self.folders["none"], variant=variant, draft=draft, **{**KEYS, "numerics": numerics, **keys})
        logits = llm.cycle.target.logits
        llm.cycle.target.logits = lambda hidden: logits(hidden).bfloat16().float()  # type: ignore[method-assign]
        found = answered(llm, requests(*size))
        assert llm.metrics is not None and llm.metrics.numerics == numerics
        return found, llm.metrics.acceptance_length

    def plain(self, numerics: str, size: tuple[int, int]) -> Found:
        if (numerics, size) not in self.known:
            self.known[numerics, size] = self.run("none", numerics, size, page_size=16)[0]
        return self.known[numerics, size]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp("ties"))


def differing(found: Found, plain: Found) -> int:
    return sum(found[1].get(place) != bits for place, bits in plain[1].items())


@pytest.mark.full
@pytest.mark.parametrize(("variant", "shape", "page_size"), CASES)
def test_drafts_change_no_bit(family: Family, variant: str, shape: str, page_size: int) -> None:
    found, _ = family.run(variant, "batch_invariant", LONG, **SHAPES[shape], page_size=page_size)
    assert sum(map(len, found[0])) >= 200
    assert_same(found, family.plain("batch_invariant", LONG))


@pytest.mark.parametrize("shape", ["tree", pytest.param("chain", marks=pytest.mark.full)])
def test_some_bits_of_fast_numerics_differ(family: Family, shape: str) -> None:
    """Else the tests above would show nothing. The same few requests keep their bits under the law."""
    size = (COUNT, TOKENS)
    law, accepted = family.run("ngram", "batch_invariant", size, **SHAPES[shape], page_size=1)
    assert accepted > 1, "some drafts are accepted, or the test shows nothing"
    assert_same(law, family.plain("batch_invariant", size))
    fast, _ = family.run("ngram", "fast", size, **SHAPES[shape], page_size=1)
    assert differing(fast, family.plain("fast", size)) > 0


@pytest.mark.full
def test_a_token_flips_in_fast_numerics(family: Family) -> None:
    found, _ = family.run("ngram", "fast", LONG, **TREE, page_size=1)
    assert found[0] != family.plain("fast", LONG)[0]

"""Token for token in bfloat16: engines on interpreted fused kernels, whose models make ties.

The output layer has every row twice and the logits are rounded to bfloat16, so that tokens tie or nearly do. What is compared is every bit
of the logits of every committed position. Blocks of keys are 16 slots, so that short rows have several. The interpreter shows addresses and
the order of tiles; the instruction is read from the machine code by ``tests/kernels/proof``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional

from graphspec.api.llm import LLM
from graphspec.engine.request import SamplingParams
from graphspec.kernels.attention.fused import tree_attention as by_slot
from graphspec.shapes import PRODUCT_ROWS
from tests.support.engines import prompts
from tests.support.law import NETWORKS, SHAPES, VOCAB, Found, answered, assert_same, requests, write_family

KEYS: dict[str, Any] = {
    "mode": "fused", "runtime": "eager", "dtype": "bfloat16", "max_rows": 2, "buckets": [2], "max_context": 64, "prefill_chunks": [4],
}  # fmt: skip
WIDE = {"num_steps": 4, "topk": 4, "num_draft_tokens": 16}
LONG = (5, 38)
"""Requests, and tokens of the first of them: 200 tokens in two rows that five requests share."""
ITSELF = "itself"
"""The target as its own draft, whose runs are accepted: nodes with ancestors decide tokens."""
DRAFTERS = (ITSELF, "ngram", *NETWORKS)
CASES = [(variant, shape, (1, 16, 64)[(number + step) % 3]) for number, variant in enumerate(DRAFTERS) for step, shape in enumerate(SHAPES)]
"""Every drafter and shape, each page size in turn; trees of the target itself have all of them."""
CASES += [(ITSELF, "tree", page) for page in (1, 64)]


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_slot, "RUN", 32)
        patch.setattr(by_slot, "STRETCH", 128)
        patch.setattr(by_slot, "tile_shape", lambda dim, dtype: (32, 16, 4))
        yield


Requests = tuple[list[list[int]], list[SamplingParams]]


class Family:
    def __init__(self, path: Path) -> None:
        self.folders = write_family(path)

    def run(self, variant: str, numerics: str, asked: Requests, **keys: Any) -> tuple[Found, float]:
        draft = None if variant == "none" else self.folders["none" if variant == ITSELF else variant]
        variant = "standalone" if variant == ITSELF else variant
        with LLM(self.folders["none"], variant=variant, draft=draft, **{**KEYS, "numerics": numerics, **keys}) as llm:
            logits = llm.cycle.target.logits
            llm.cycle.target.logits = lambda hidden: logits(hidden).bfloat16().float()  # type: ignore[method-assign]
            found = answered(llm, asked)
            assert llm.metrics is not None and llm.metrics.numerics == numerics
            return found, llm.metrics.acceptance_length

    @cached_property
    def plain(self) -> Found:
        return self.run("none", "batch_invariant", requests(*LONG), page_size=16)[0]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp("ties"))


@pytest.mark.full
@pytest.mark.parametrize(("variant", "shape", "page_size"), CASES)
def test_drafts_change_no_bit(family: Family, variant: str, shape: str, page_size: int) -> None:
    found, _ = family.run(variant, "batch_invariant", requests(*LONG), **SHAPES[shape], page_size=page_size)
    assert sum(map(len, found[0])) >= 200
    assert_same(found, family.plain)


@pytest.mark.full
@pytest.mark.parametrize("numerics", ["batch_invariant", "fast"])
def test_some_bits_of_fast_numerics_differ(family: Family, numerics: str) -> None:
    """Else the tests above would show nothing. Runs cross the end of a block; accepted nodes are in later slots than their positions."""
    asked = prompts(1, lengths=(13,), vocab=VOCAB), [SamplingParams(max_tokens=12, ignore_eos=True, seed=0)]
    one = {"max_rows": 1, "buckets": [1], "prefill_chunks": [16]}
    plain, _ = family.run("none", numerics, asked, page_size=16, **one)
    found, accepted = family.run(ITSELF, numerics, asked, **WIDE, page_size=1, **one)
    assert accepted > 3, "runs are accepted, or the test shows nothing"
    if numerics == "fast":
        assert [place for place, bits in plain[1].items() if found[1].get(place) != bits]
    else:
        assert_same(found, plain)


@pytest.mark.full
def test_cycles_keep_the_law_after_prompts_that_the_library_reads(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """``cycle_invariant``: a chunk has more rows than a tile, so the library multiplies it; all that cycles multiply is tiled."""
    multiplied, rows = functional.linear, set()

    def counted(x: Tensor, *weights: Tensor | None) -> Tensor:
        rows.add(x.numel() // x.shape[-1])
        return multiplied(x, *weights)

    monkeypatch.setattr(functional, "linear", counted)
    chunk = PRODUCT_ROWS + 16
    asked = prompts(1, lengths=(chunk - 3,), vocab=VOCAB), [SamplingParams(max_tokens=12, ignore_eos=True, seed=0)]
    one = {"max_rows": 1, "buckets": [1], "prefill_chunks": [chunk], "max_context": 128}
    plain, _ = family.run("none", "cycle_invariant", asked, page_size=16, **one)
    found, accepted = family.run(ITSELF, "cycle_invariant", asked, **WIDE, page_size=1, **one)
    assert accepted > 2, "runs are accepted, or the test shows nothing"
    assert_same(found, plain)
    assert rows == {chunk}


@pytest.mark.full
def test_drafts_change_no_bit_over_two_ranks(family: Family) -> None:
    """Both sum in order of rank. Compared is the part of the vocabulary that the first rank has."""
    asked, keys = requests(2, 10), {"tensor_parallel": 2, "page_size": 16}
    plain, _ = family.run("none", "batch_invariant", asked, **keys)
    found, accepted = family.run(ITSELF, "batch_invariant", asked, **SHAPES["tree"], **keys)
    assert accepted > 1.2, "runs are accepted, or the test shows nothing"
    assert_same(found, plain)

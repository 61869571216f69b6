"""Engines whose drafters propose all levels in one pass, block drafters and P-EAGLE alike: their output is the target's own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from graphspec.api.llm import LLM, SamplingParams
from tests.drafters.test_variants import mixed
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.engines import SMALL, Pair, ids, prompts
from tests.support.features import of_family
from tests.support.parallel_checkpoints import BLOCK, ParallelDraft, dflash_tensors, favouring_target, parallel_drafts, write_dflash

if TYPE_CHECKING:
    from pathlib import Path

LENGTH = 20
CHAIN = {"num_steps": 5, "topk": 1, "num_draft_tokens": 6}
SHORT = {"num_steps": 2, "topk": 1, "num_draft_tokens": 3}
TREE = {"num_steps": 4, "topk": 3, "num_draft_tokens": 12}
WIDE = {"num_steps": 5, "topk": 8, "num_draft_tokens": 128}
DEEP = {"num_steps": 20, "topk": 4, "num_draft_tokens": 64}
COVERED = ("greedy equals transformers", "seeded sampling equals plain decoding", "filters, penalties and bias mixed in a batch")
BOTH = {"dflash": "sliding", "p_eagle": "reduced"}
"""A draft of each variant, for what one of them shows."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return favouring_target(tmp_path_factory.mktemp("favouring"))


@pytest.fixture(scope="module")
def drafts(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ParallelDraft]:
    return parallel_drafts(pair, tmp_path_factory.mktemp("drafts"))


def case(variant: str, name: str, shape: dict[str, int], page_size: int, rows: int, run_ahead: int) -> Any:
    shown = ["chain" if shape["topk"] == 1 else "tree", f"pages of {page_size}", "batch", *(["run-ahead"] if run_ahead else [])]
    words = f"{name}-{shape['num_steps']}-{shape['topk']}-{shape['num_draft_tokens']}"
    marks = (pytest.mark.covers(variant, *COVERED, *shown), of_family("LlamaForCausalLM", variant, shown[0]))
    return pytest.param(name, shape, page_size, rows, run_ahead, marks=marks, id=words)


def covering(feature: str, drafts: dict[str, str] = BOTH) -> Any:
    """One test for each variant."""
    return pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.covers(v, feature), id=v) for v, n in drafts.items()])


@pytest.mark.parametrize(
    ("name", "shape", "page_size", "rows", "run_ahead"),
    [
        case("dflash", "dflash", CHAIN, 16, 2, 2),
        case("dflash", "jetspec", TREE, 1, 4, 0),
        case("dflash", "sliding", WIDE, 16, 4, 1),
        case("dflash", "speculators", SHORT, 16, 3, 0),
        case("p_eagle", "reduced", CHAIN, 16, 2, 2),
        case("p_eagle", "full", TREE, 1, 4, 0),
        case("p_eagle", "reduced", WIDE, 16, 4, 1),
        case("p_eagle", "full", DEEP, 16, 3, 0),
    ],
)
def test_output_is_the_targets_own(
    pair: Pair, drafts: dict[str, ParallelDraft], name: str, shape: dict[str, int], page_size: int, rows: int, run_ahead: int
) -> None:
    llm = drafts[name].llm(pair, **shape, page_size=page_size, max_rows=rows, cycles_in_flight=run_ahead + 1)
    plain = LLM(pair.target, variant="none", **SMALL)
    prompt_ids = prompts(4, (3, 9, 17, 5), VOCAB_SIZE)
    assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=LENGTH))) == [pair.greedy(prompt, LENGTH) for prompt in prompt_ids]
    for params in ([SamplingParams(max_tokens=LENGTH, temperature=0.8, seed=50 + i) for i in range(4)], mixed(1.0, 4, LENGTH)):
        assert ids(llm.generate(prompt_ids, params)) == ids(plain.generate(prompt_ids, params))
    assert llm.metrics is not None and 1.1 < llm.metrics.acceptance_length < shape["num_steps"] + 0.95


@pytest.mark.kernels
@covering("compiled")
def test_compiled_cycles_give_the_targets_own_tokens(pair: Pair, drafts: dict[str, ParallelDraft], name: str) -> None:
    llm = drafts[name].llm(pair, **TREE, runtime="compiled", buckets=[2], max_rows=2, cycles_in_flight=2)
    prompt_ids = prompts(3, vocab=VOCAB_SIZE)
    assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=20))) == [pair.greedy(prompt, 20) for prompt in prompt_ids]


@covering("preemption and exact resumption")
def test_preemption_resumes_exactly(pair: Pair, drafts: dict[str, ParallelDraft], name: str) -> None:
    llm = drafts[name].llm(pair, **TREE, page_size=4, max_rows=4, num_pages=26)
    prompt_ids = prompts(4, (9, 12, 5, 16), VOCAB_SIZE)
    outputs = llm.generate(prompt_ids, SamplingParams(max_tokens=20, ignore_eos=True))
    assert ids(outputs) == [pair.greedy(prompt, 20, ignore_eos=True) for prompt in prompt_ids]


@pytest.mark.parametrize("name", ["dflash", "reduced"])
def test_depths_change_and_the_drafter_catches_up(pair: Pair, drafts: dict[str, ParallelDraft], name: str) -> None:
    """Four rows decode plainly; with fewer of them drafting begins, and the drafter reads what it has missed."""
    prompt_ids, lengths = prompts(4, (9, 12, 5, 16), VOCAB_SIZE), (4, 9, 16, 30)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    llm = drafts[name].llm(pair, **TREE, max_rows=4, buckets=[1, 2, 4], depth_per_bucket={4: 0, 2: 2})
    outputs = llm.generate(prompt_ids, params)
    assert ids(outputs) == [pair.greedy(prompt, n, ignore_eos=True) for prompt, n in zip(prompt_ids, lengths, strict=True)]
    assert outputs[3].metrics.cycles < 28, "drafts after catching up are accepted now and then"


@covering("accept=rejection", {"dflash": "jetspec", "p_eagle": "reduced"})
def test_rejection_serves_greedy_rows_exactly(pair: Pair, drafts: dict[str, ParallelDraft], name: str) -> None:
    llm = drafts[name].llm(pair, **CHAIN, rule="rejection")
    prompt_ids = prompts(3, (9, 12, 5), VOCAB_SIZE)
    params = [SamplingParams(max_tokens=30, temperature=t, seed=7, ignore_eos=True) for t in (0.0, 1.0, 0.0)]
    outputs = llm.generate(prompt_ids, params)
    assert [outputs[i].token_ids for i in (0, 2)] == [pair.greedy(prompt_ids[i], 30, ignore_eos=True) for i in (0, 2)]
    assert len(outputs[1].token_ids) == 30


def test_a_draft_that_is_never_right_warns(pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Slots or taps that are off by one show as an acceptance length near 1, and as nothing else."""
    tensors = dflash_tensors(pair)
    tensors["norm.weight"] = -tensors["norm.weight"]  # what was likeliest is the least likely
    llm = ParallelDraft("dflash", write_dflash(tmp_path / "draft", tensors, block=BLOCK), tensors).llm(pair, **CHAIN)
    caplog.set_level(logging.WARNING, "graphspec.engine.meter")
    llm.generate(prompts(4, vocab=VOCAB_SIZE), SamplingParams(max_tokens=30, ignore_eos=True))
    (message,) = [record.getMessage() for record in caplog.records if record.name == "graphspec.engine.meter"]
    assert "almost never accepted: 1.0" in message and "of variant dflash" in message and "tapped layers" in message

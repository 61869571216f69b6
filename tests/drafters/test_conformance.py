"""What every variant of the catalog owes, read from the catalog: a new drafter is tested here without an edit.

A network is trained for a few steps by the ``training`` of its row, so that some of its drafts are accepted; one that can't be trained has
a pair of its own in ``tests/support/own_pairs.py``, and a drafter without a network needs no draft. The tests of each drafter stand in
files of their own.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from graphspec.api.llm import LLM, SamplingParams
from graphspec.config.catalog import Variant, all_variants, load_object
from graphspec.config.compose import load_config
from graphspec.config.schema import Config, ModelConfig, RuntimeConfig, VariantConfig
from graphspec.engine.scheduler import Scheduler
from graphspec.facts import read_model_facts
from graphspec.graphs.programs import PrefillKey
from graphspec.models.target import load_target
from graphspec.plan.plan import make_plan
from graphspec.shapes import SAMPLED
from graphspec.train.draft import Recipe, Texts, train_draft
from graphspec.train.export import export_draft
from graphspec.train.generate import cut_prompts
from recipes.continuation import continue_text
from tests.graphs.test_capture_safety import FakeProgram, cuda_guard
from tests.support.drafts import random_text, tiny_target
from tests.support.engines import SMALL, ids, prompts
from tests.support.own_pairs import PAIRS, write_pair
from tests.support.tiny import Networks, make_fake

__all__ = ["cuda_guard"]
DRAFTERS = [variant for variant in all_variants() if variant.speculates]
SHAPES = {
    "chain": {"num_steps": 3, "topk": 1, "num_draft_tokens": 4},
    "tree": {"num_steps": 3, "topk": 2, "num_draft_tokens": 7},
}
VOCAB, LENGTH = 96, 20


class Bench:
    """A target, and a draft of every variant that has a network."""

    def __init__(self, path: Path) -> None:
        self.path, self.model, self.made = path, tiny_target(num_hidden_layers=9), {}
        self.known: dict[str, list[list[int]]] = {}
        self.plain_engines: dict[Path, LLM] = {}
        self.model.save_pretrained(path / "target")

    @cached_property
    def texts(self) -> Texts:
        stream = random_text(1, 400)[0].numpy()
        return Texts(stream, {32: continue_text(self.model, cut_prompts(stream, 6, 8, 3), 32, 0.0, 0).numpy()})

    def draft(self, variant: Variant) -> Path | None:
        """The folder of its draft; None: it needs none."""
        if not variant.has_network:
            return None
        if variant.name not in self.made:
            if variant.name in PAIRS:
                _, self.made[variant.name] = write_pair(variant.name, VOCAB, self.path / variant.name)
                return self.made[variant.name]
            if not variant.training:
                assert variant.draft_in_target, "without `training` or a pair of its own, the draft lies in the target"
                return None
            words = ["train.phases=[[30,4,32]]", "train.lr=0.02", "train.warmup=2", "train.cooldown=4"]
            recipe = Recipe(variant.name, load_config(f"variant={variant.name}", *words).train)
            folder = self.path / variant.name
            folder.mkdir()
            drafter, _ = train_draft(recipe, self.model, self.texts, folder)
            export_draft(drafter, self.model, folder)
            self.made[variant.name] = folder
        return self.made[variant.name]

    def target(self, variant: Variant) -> Path:
        """The folder of its target."""
        draft = self.draft(variant)
        return draft.parent / "target" if draft is not None and variant.name in PAIRS else self.path / "target"

    def llm(self, variant: Variant, **overrides: Any) -> LLM:
        return LLM(self.target(variant), variant=variant.name, draft=self.draft(variant), **{**SMALL, **overrides})

    def plain(self, variant: Variant, prompt_ids: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
        """What plain decoding gives, and so every drafter must."""
        target = self.target(variant)
        key = str((target, prompt_ids, params))
        if key not in self.known:
            if target not in self.plain_engines:
                self.plain_engines[target] = LLM(target, variant="none", **SMALL)
            self.known[key] = ids(self.plain_engines[target].generate(prompt_ids, params))
        return self.known[key]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", DRAFTERS, ids=lambda variant: variant.name)
def test_tokens_are_those_of_plain_decoding(bench: Bench, variant: Variant, shape: str) -> None:
    """Greedy and seeded, in a batch, with cycles in flight where the drafter isn't on the host."""
    flight = {} if variant.drafter == "host" else {"cycles_in_flight": 3}
    llm, prompt_ids = bench.llm(variant, **SHAPES[shape], **flight), prompts(3, vocab=VOCAB)
    for temperature in (0.0, 1.0):
        params = [SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=i, ignore_eos=True) for i in range(3)]
        assert ids(llm.generate(prompt_ids, params)) == bench.plain(variant, prompt_ids, params), temperature
        assert llm.metrics is not None
        if variant.has_network and temperature:
            assert 1.1 < llm.metrics.acceptance_length < llm.plan.shape.num_steps + 1, "runs of several lengths, or the test shows nothing"


@pytest.mark.parametrize("variant", DRAFTERS, ids=lambda variant: variant.name)
def test_a_preempted_request_resumes_exactly(bench: Bench, variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    preempt, times = Scheduler._preempt, []
    monkeypatch.setattr(Scheduler, "_preempt", lambda self: (times.append(1), preempt(self))[1])
    llm = bench.llm(variant, **SHAPES["chain"], page_size=4, max_rows=4, num_pages=24)
    prompt_ids, params = prompts(4, (9, 12, 5, 16), VOCAB), SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    outputs = llm.generate(prompt_ids, params)
    assert times, "short of pages, or the test shows nothing"
    assert ids(outputs) == bench.plain(variant, prompt_ids, [params] * 4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", DRAFTERS, ids=lambda variant: variant.name)
def test_no_program_needs_the_host(bench: Bench, variant: Variant, shape: str) -> None:
    """Every program on fake tensors of a GPU: a value that is read, or a shape that depends on data, raises."""
    folder, path = bench.draft(variant), bench.target(variant)
    facts = read_model_facts(path)
    draft = load_object(variant.facts)(folder or path, facts) if variant.has_network else None
    config = Config(
        variant=VariantConfig(name=variant.name, **SHAPES[shape]),
        model=ModelConfig(path=str(path), max_context=96),
        runtime=RuntimeConfig(name="captured", page_size=8, prefill_chunks=[8, 16], prefill_lanes=2, max_rows=2, buckets=[2]),
    )
    plan = make_plan(config, facts, draft, device="cuda")
    target = load_target(facts, plan.tap_layers, plan.max_positions, torch.float32, "cpu")
    network = load_object(variant.loader)(draft, target, plan.max_positions, torch.float32, "cpu") if draft is not None else None
    mode = FakeTensorMode()
    networks = Networks(make_fake(target, mode), make_fake(network, mode))
    with mode:
        program = FakeProgram(plan, networks)
        counts = [program.build(key).run() for key in (*plan.graph_keys(SAMPLED), PrefillKey(16, SAMPLED))]
    assert min(counts) > 50

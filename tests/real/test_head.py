"""The EAGLE-3 head that comes with the real model: found by its name, exact, accepted as its card says, and as its record has it."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from graphspec import LLM, SamplingParams
from graphspec.cli.chat import FEW_BITS, N_GRAMS, conversation_words
from graphspec.config.catalog import resolve_variant
from graphspec.config.train_options import SELF, read_sources
from graphspec.facts import folders
from graphspec.lab.measure.provenance import ROOT

HEAD = ROOT / "graphspec" / "heads" / "smollm2" / "eagle3"
PROMPTS = ROOT / "perf" / "prompts" / "chat.jsonl"
EVERY, NEW_TOKENS = 8, 48
LEAST = 1.3
"""Tokens per cycle of the chain on these few prompts, well below the card's: another machine's sums may flip a token."""
KEYS = {"max_rows": 1, "buckets": [1], "max_context": 512, "generation_config": "ignore"}
SHAPE = {"num_steps": 4, "topk": 1, "num_draft_tokens": 5}


@pytest.fixture(scope="module")
def prompts() -> list[list[dict[str, str]]]:
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    return [[{"role": "user", "content": line["prompt"]}] for line in lines[::EVERY]]


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "seeded"])
def params(request: pytest.FixtureRequest) -> Iterator[SamplingParams]:
    yield SamplingParams(max_tokens=NEW_TOKENS, temperature=request.param, seed=3)


def test_the_head_is_found_by_the_models_names() -> None:
    for name in ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        assert folders.shipped_draft(name, Path("anywhere"), resolve_variant("eagle3")) == HEAD


@pytest.mark.parametrize("activations", ["full", "int8"])
def test_its_tokens_are_those_of_plain_decoding_and_many_are_accepted(
    real: Path, prompts: list[list[dict[str, str]]], params: SamplingParams, activations: str
) -> None:
    with LLM("smollm2", variant="none", activations=activations, **KEYS) as plain:
        expected = [output.token_ids for output in plain.chat(prompts, params)]
    with LLM("smollm2", variant="eagle3", activations=activations, **KEYS, **SHAPE) as llm:
        outputs = llm.chat(prompts, params)
        assert llm.metrics is not None and llm.metrics.activations == activations
        assert llm.metrics.acceptance_length > LEAST
    assert [output.token_ids for output in outputs] == expected


def test_its_card_and_files_match_its_record() -> None:
    record = json.loads((HEAD / "training.json").read_text(encoding="utf-8"))
    card = (HEAD.parent / "README.md").read_text(encoding="utf-8")
    config = json.loads((HEAD / "config.json").read_text(encoding="utf-8"))
    training, acceptance = record["training"], record["acceptance"]
    for figure in (training["steps"], training["tokens"], training["parameters"], config["draft_vocab_size"]):
        assert f"{figure:,}" in card
    for values in (training["loss_by_depth"], training["agreement_by_depth"]):
        assert ", ".join(f"{value:.2f}" for value in values) in card
    for shape in (*acceptance["shapes"], *acceptance["sampled"]["shapes"]):
        assert f"{shape['tokens_per_cycle']:.2f}" in card
    settings = record["config"]
    for key in ("steps", "batch", "sequence_length", "unroll", "dtype"):
        assert f"train.{key}={settings[key]}" in card
    assert f"train.text.tokens={settings['text']['tokens']}" in card
    with safe_open(HEAD / "model.safetensors", "pt") as file:
        assert file.get_slice("d2t").get_shape() == [config["draft_vocab_size"]]
    assert (HEAD / "model.safetensors").stat().st_size < 6e6


def test_its_text_is_in_the_repository() -> None:
    """As ``train.work`` has it, so that a run goes on from there."""
    record = json.loads((HEAD / "training.json").read_text(encoding="utf-8"))
    data = record["data"]["conversations"][[source.path for source in read_sources(record["config"]["data"])].index(SELF)]
    lengths = []
    with tarfile.open(ROOT / "recipes" / "smollm2" / "conversations.tar.xz") as archive:
        for member in archive:
            assert member.name == "conversations" or member.name.startswith("conversations/self")
            if member.name.endswith(".jsonl"):
                lines = archive.extractfile(member)
                assert lines is not None
                lengths += [len(json.loads(line)["tokens"]) for line in lines]
    assert len(lengths) == data["train"] + data["held_out"]
    assert sum(lengths) == data["train_tokens"] + data["held_out_tokens"]


def test_no_prompt_of_its_training_is_one_that_is_measured() -> None:
    def words(*files: Path) -> list[set[str]]:
        lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
        return [set(re.findall(r"\w+", json.loads(line)["prompt"].lower())) for line in lines]

    record = json.loads((HEAD / "training.json").read_text(encoding="utf-8"))
    paths = [ROOT / source.path for source in read_sources(record["config"]["data"]) if source.path != SELF]
    assert len(paths) > 1
    trained, measured = words(*paths), words(*PROMPTS.parent.glob("*.jsonl"))
    assert max(len(one & other) / len(one | other) for one in trained for other in measured) < 0.6


def test_a_chat_over_four_bits_rounds_activations_for_the_head(real: Path) -> None:
    """Without that the head does not pay, and n-grams draft; whoever names it gets it."""
    assert set(FEW_BITS) <= set(conversation_words([]))
    for given in ("kernels.activations=full", "runtime=eager", "hardware.device=cuda"):
        words = conversation_words([given])
        assert set(N_GRAMS) <= set(words) and "kernels.activations=int8" not in words
    shaped = conversation_words(["variant.num_steps=3"])
    assert set(FEW_BITS) & set(shaped) == {"kernels.activations=int8"}
    assert conversation_words(["variant=eagle3"]) == ["variant=eagle3", "experiment=chat"]

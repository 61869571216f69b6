"""Tied, untied and absent language-model heads: greedy tokens are those of transformers, whatever ``tie_word_embeddings`` says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from graphspec import LLM, SamplingParams
from graphspec.errors import CheckpointError
from graphspec.facts import read_model_facts
from graphspec.graphs.memory import parameter_bytes
from graphspec.lab.floor import FloorModel
from tests.support.checkpoints import build_hf, edit_json, edit_tensors, write_hf
from tests.support.engines import CHAIN, SMALL, ids
from tests.support.hybrid_checkpoints import build_hybrid
from tests.support.moe_checkpoints import build_mixture

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROMPTS = [[5, 9, 20, 31, 7], [44, 3, 3]]
LENGTH = 12
FAMILIES: dict[str, tuple[Callable[[], Any], str]] = {
    "llama": (lambda: build_hf("llama", num_hidden_layers=2), "model.embed_tokens.weight"),
    "qwen3": (lambda: build_hf("qwen3", num_hidden_layers=2), "model.embed_tokens.weight"),
    "qwen3_moe": (lambda: build_mixture("qwen3_moe"), "model.embed_tokens.weight"),
    "qwen3_5": (lambda: build_hybrid("qwen3_5"), "model.embed_tokens.weight"),
    "nemotron_h": (lambda: build_hybrid("nemotron_h"), "backbone.embeddings.weight"),
}
"""A model with a head of its own, and how its embedding is stored."""
CASES = [(tied, head) for tied in (True, False) for head in ("other", "equal", "absent")]


def write(folder: Path, family: str, *, tied: bool, head: str) -> Path:
    build, embedding = FAMILIES[family]
    path = write_hf(build(), folder / f"{tied}-{head}", tie_word_embeddings=tied)
    file = path / "model.safetensors"
    if head == "equal":
        edit_tensors(file, lm_head__weight=load_file(file)[embedding])
    elif head == "absent":
        edit_tensors(file, "lm_head.weight")
    return path


def greedy(path: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in PROMPTS:
        token_BT = torch.tensor([prompt])
        out = model.generate(token_BT, attention_mask=torch.ones_like(token_BT), max_new_tokens=LENGTH, do_sample=False, pad_token_id=0)
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    for tied, head in CASES:
        path = write(tmp_path, family, tied=tied, head=head)
        if head == "absent" and (family == "nemotron_h" or not tied):
            why = "every NemotronHForCausalLM has one" if family == "nemotron_h" else "tie_word_embeddings is not true in config.json"
            with pytest.raises(CheckpointError, match=rf"lm_head\.weight: expected a head of its own, as {why}, found no such tensor"):
                LLM(path, variant="none", **SMALL)
            continue
        llm = LLM(path, variant="none", **SMALL)
        assert ids(llm.generate(PROMPTS, params)) == greedy(path), (tied, head)
        network = llm.cycle.target
        shared = network.lm_head.weight is network.embed_tokens.weight
        assert shared == (tied and head != "other" and family != "nemotron_h")


@pytest.mark.parametrize(("family", "shape"), [("llama", CHAIN), ("qwen3", CHAIN), ("qwen3_moe", CHAIN)])
def test_a_draft_keeps_its_head_too(family: str, shape: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A draft that is the target is always right; the difference is named once for each of the two."""
    params = SamplingParams(max_tokens=1 + 2 * (shape["num_steps"] + 1), ignore_eos=True)
    for head in ("other", "equal"):
        path = write(tmp_path, family, tied=True, head=head)
        caplog.clear()
        outputs = LLM(path, variant="standalone", draft=path, **shape, **SMALL).generate(PROMPTS, params)
        assert [out.metrics.acceptance_length for out in outputs] == [shape["num_steps"] + 1] * len(PROMPTS)
        named = [record for record in caplog.records if "tie_word_embeddings" in record.getMessage()]
        assert len(named) == (2 if head == "other" else 0)


def test_memory_and_floors_count_the_head_that_is_there(tmp_path: Path) -> None:
    size = 61 * 48
    weights = {}
    for head in ("other", "equal", "absent"):
        path = write(tmp_path, "llama", tied=True, head=head)
        weights[head] = FloorModel.of(read_model_facts(path), None, "float32").target_weights.number
        weights[head, "bytes"] = parameter_bytes(LLM(path, variant="none", **SMALL).plan)[0]
    assert weights["equal"] == weights["absent"] == weights["other"] - size
    assert weights["equal", "bytes"] == weights["absent", "bytes"] == weights["other", "bytes"] - 4 * size
    edit_json(tmp_path / "True-other" / "config.json", tie_word_embeddings=False)
    assert FloorModel.of(read_model_facts(tmp_path / "True-other"), None, "float32").target_weights.number == weights["other"]

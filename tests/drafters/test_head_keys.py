"""Keys of a draft's config that it does not read, reads in several spellings, or may leave out."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch

from graphspec.api.llm import LLM
from graphspec.config.catalog import load_object, resolve_variant
from graphspec.drafters.eagle3.facts import read_eagle3_facts
from graphspec.drafters.p_eagle.facts import read_p_eagle_facts
from graphspec.errors import CheckpointError
from graphspec.facts import read_model_facts
from tests.support.checkpoints import (
    VOCAB_SIZE,
    build_hf,
    eagle3_tensors,
    eagle_tensors,
    edit_json,
    edit_tensors,
    publish_eagle,
    publish_eagle3,
    write_hf,
)
from tests.support.engines import SMALL, Pair, prompts
from tests.support.mtp_checkpoints import head_tensors, write_heads
from tests.support.parallel_checkpoints import dflash_tensors, favouring_target, p_eagle_tensors, write_dflash, write_p_eagle

if TYPE_CHECKING:
    from pathlib import Path

FOREIGN = [151645, -1, [151645, 151643], [-1], "</s>", 2.5]
"""Ids of a Qwen vocabulary, and what is no id."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return favouring_target(tmp_path_factory.mktemp("pair"))


def publish(variant: str, path: Path, pair: Pair) -> Path:
    """A draft of a variant, as it loads."""
    if variant == "eagle3":
        return publish_eagle3(path, eagle3_tensors(num_taps=2), "sglang", taps=(1, 3))
    if variant == "eagle":
        return publish_eagle(path, eagle_tensors(), "safeailab")
    if variant == "p_eagle":
        return write_p_eagle(path, p_eagle_tensors(pair))
    if variant == "dflash":
        return write_dflash(path, dflash_tensors(pair))
    return write_hf(build_hf("llama", num_hidden_layers=1), path)


@pytest.mark.parametrize("variant", ["eagle", "eagle3", "p_eagle", "dflash", "standalone"])
def test_token_ids_of_a_draft_are_not_read(variant: str, tmp_path: Path, pair: Pair) -> None:
    target, read = read_model_facts(pair.target), load_object(resolve_variant(variant).facts)
    folder = publish(variant, tmp_path / "draft", pair)
    for value in FOREIGN:
        edit_json(folder / "config.json", eos_token_id=value, bos_token_id=value)
        (folder / "generation_config.json").write_text('{"eos_token_id": 151645}')
        facts = read(folder, target)
        assert (facts.decoder.bos_token_id, facts.decoder.eos_token_ids) == (None, ()), value
    assert target.eos_token_ids == (VOCAB_SIZE - 2,)


def test_token_ids_of_prediction_heads_are_not_read(tmp_path: Path, pair: Pair) -> None:
    target, read = read_model_facts(pair.target), load_object(resolve_variant("mtp").facts)
    folder = write_heads(tmp_path / "heads", head_tensors("deepseek"))
    for value in FOREIGN:
        edit_json(folder / "config.json", eos_token_id=value)
        assert read(folder, target).num_heads == 1, value


@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id"])
def test_those_of_a_target_are_checked(key: str, tmp_path: Path) -> None:
    folder = write_hf(build_hf("llama", num_hidden_layers=1), tmp_path / "target")
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", **{key: -1})
    with pytest.raises(CheckpointError, match=key):
        read_model_facts(folder)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_may_be_spelled_with_its_module(key: str, tmp_path: Path, pair: Pair) -> None:
    head, whole = publish("eagle3", tmp_path / "head", pair), publish("standalone", tmp_path / "whole", pair)
    for folder in (head, whole):
        edit_json(folder / "config.json", dtype=None, torch_dtype=None)
        edit_json(folder / "config.json", **{key: "torch.bfloat16"})
    assert read_eagle3_facts(head, read_model_facts(pair.target)).decoder.dtype == "bfloat16"
    assert read_model_facts(whole).dtype == "bfloat16"
    edit_json(whole / "config.json", **{key: "torch.float8_e4m3fn"})
    with pytest.raises(CheckpointError, match=f"{key}: expected one of float32"):
        read_model_facts(whole)


def test_a_head_without_a_context_does_not_limit_its_target(tmp_path: Path, pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    folder = publish("eagle3", tmp_path / "head", pair)
    caplog.set_level(logging.INFO, "graphspec")
    limited = LLM(pair.target, variant="eagle3", draft=folder, **SMALL)
    assert limited.plan.draft_context == 32 < limited.plan.max_context == 96
    assert "rows past them decode plainly" in caplog.text
    caplog.clear()
    edit_json(folder / "config.json", "max_position_embeddings")
    free = LLM(pair.target, variant="eagle3", draft=folder, **SMALL)
    assert free.plan.draft_context >= free.plan.max_context == 96
    assert "decode plainly" not in caplog.text and "max_position_embeddings is absent" in caplog.text
    scaled = {"rope_type": "dynamic", "factor": 2.0}
    edit_json(folder / "config.json", rope_scaling=scaled)
    rope = read_eagle3_facts(folder, read_model_facts(pair.target)).decoder.rope
    assert rope.original_max_position_embeddings == 2048, "the default of transformers, with which such a head was trained"


@torch.no_grad()
def test_the_feature_of_masks_has_any_leading_dimensions(tmp_path: Path, pair: Pair) -> None:
    shape = {"num_steps": 4, "topk": 1, "num_draft_tokens": 5}
    raw, trees = p_eagle_tensors(pair), []
    for front in ((), (1,), (1, 1)):
        tensors = {**raw, "mask_hidden": raw["mask_hidden"].reshape(*front, -1)}
        llm = LLM(pair.target, variant="p_eagle", draft=write_p_eagle(tmp_path / str(len(front)), tensors), **SMALL, **shape)
        trees.append(llm.draft_tree(prompts(1, (9,), VOCAB_SIZE)[0]).token_N)
    assert list(trees[0]) == list(trees[1]) == list(trees[2])
    for wrong in (raw["mask_hidden"].expand(2, -1), raw["mask_hidden"].T, raw["mask_hidden"][None, None], raw["mask_hidden"][:, 1:]):
        folder = write_p_eagle(tmp_path / "wrong", {**raw, "mask_hidden": wrong.contiguous()})
        assert read_p_eagle_facts(folder, read_model_facts(pair.target)).feature_size == 96
        with pytest.raises(CheckpointError, match=r"mask_hidden: expected shape \[1, 96\]"):
            LLM(pair.target, variant="p_eagle", draft=folder, **SMALL, **shape)


def test_a_mixture_in_a_draft_layer_is_named(tmp_path: Path, pair: Pair) -> None:
    """A config may count the experts of its target; only tensors show that the layer has some."""
    folder = publish("eagle3", tmp_path / "head", pair)
    edit_json(folder / "config.json", num_experts=8, n_routed_experts=8, num_local_experts=8, kv_lora_rank=12)
    assert read_eagle3_facts(folder, read_model_facts(pair.target)).decoder.experts is None
    LLM(pair.target, variant="eagle3", draft=folder, **SMALL)
    expert: dict[str, Any] = {"midlayer.mlp.experts.0.up_proj.weight": torch.zeros(4, 48)}
    edit_tensors(folder / "model.safetensors", "midlayer.mlp.up_proj.weight", **expert)
    with pytest.raises(CheckpointError, match=r"experts\.0\.up_proj\.weight: expected no such tensor"):
        LLM(pair.target, variant="eagle3", draft=folder, **SMALL)


def test_a_head_that_reads_no_taps_says_so_consistently(tmp_path: Path, pair: Pair) -> None:
    alone = {"use_aux_hidden_state": False}
    tensors = eagle3_tensors()
    del tensors["fc.weight"]
    head = publish_eagle3(tmp_path / "head", tensors, "sglang", taps=None, eagle_config=alone)
    facts = read_eagle3_facts(head, read_model_facts(pair.target))
    assert (facts.tap_layers, facts.feature_size, facts.reads_taps) == ((), 48, False)
    LLM(pair.target, variant="eagle3", draft=head, **SMALL)
    wide = publish_eagle3(
        tmp_path / "wide", {**eagle3_tensors(hidden_size=32, extras=("embedding",)), "fc.weight": torch.zeros(32, 48)}, "sglang",
        taps=None, eagle_config=alone, target_hidden_size=48,
    )  # fmt: skip
    LLM(pair.target, variant="eagle3", draft=wide, **SMALL)
    edit_tensors(wide / "model.safetensors", "fc.weight")
    with pytest.raises(CheckpointError, match=r"fc\.weight: expected a projection to 32 of the target's hidden state of 48"):
        LLM(pair.target, variant="eagle3", draft=wide, **SMALL)
    tapped = publish_eagle3(tmp_path / "tapped", tensors, "sglang", taps=(1,))
    with pytest.raises(CheckpointError, match=r"fc\.weight: expected an EAGLE-3 head"):
        LLM(pair.target, variant="eagle3", draft=tapped, **SMALL)

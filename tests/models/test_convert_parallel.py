"""``graphspec convert`` of drafts that propose all levels at once: block drafters and P-EAGLE heads, bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from graphspec.drafters.convert import convert
from graphspec.drafters.dflash.facts import read_dflash_facts
from graphspec.drafters.heads.eagle3_facts import read_eagle3_facts
from graphspec.drafters.p_eagle.facts import PEagleFacts, read_p_eagle_facts
from graphspec.errors import CheckpointError, ConfigError
from graphspec.facts import DraftFacts, read_model_facts
from tests.support.checkpoints import build_hf, edit_json, edit_tensors, write_hf
from tests.support.parallel_checkpoints import MASK, TAPS, dflash_tensors, favouring_target, p_eagle_tensors, write_dflash, write_p_eagle

if TYPE_CHECKING:
    from tests.support.engines import Pair

DFLASH, P_EAGLE = ("z-lab", "jetspec", "speculators"), ("sglang", "speculators")
SLIDING = {"layer": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}}
SHORT = {"layer": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7}}

# name: options of the tensors, options of the config, layouts that can express it, causal layers
DRAFTS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...], tuple[bool, ...]]] = {
    "dflash": ({}, {}, ("z-lab", "speculators"), (False, False)),
    "the last layer": ({}, {"target_layer_ids": [0, 3]}, ("z-lab", "speculators"), (False, False)),
    "jetspec": ({}, {"causal_head": True}, ("z-lab", "jetspec"), (True, True)),
    "shifted jetspec": ({}, {"causal_head": True, "draft_shift": True}, ("jetspec",), (True, True)),
    "sliding": ({}, SLIDING, ("z-lab", "speculators"), (True, False)),
    "sliding ahead": ({}, {**SLIDING, "causal": False}, ("z-lab", "speculators"), (False, False)),
    "all sliding": ({}, SHORT, DFLASH, (True, True)),
    "speculators": ({}, {"speculators": True}, ("z-lab", "speculators"), (False, False)),
    "shifted": ({}, {"speculators": True, "sample_from_anchor": True}, ("speculators",), (False, False)),
    "trimmed": ({"reduced": True}, {"speculators": True}, ("speculators",), (False, False)),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return favouring_target(tmp_path_factory.mktemp("favouring"))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / "model.safetensors"))


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


def nameless(facts: DraftFacts) -> DraftFacts:
    return replace(facts, path=Path(), decoder=replace(facts.decoder, path=Path(), architecture=""))


def settled(facts: PEagleFacts) -> DraftFacts:
    """What the config leaves open is the same as what it denies, where there are no such tensors."""
    return nameless(replace(facts, layout="", norm_before_fc=None, fc_norm=None, fc_bias=None))


@pytest.mark.parametrize("name", DRAFTS)
def test_block_drafters_between_all_layouts(pair: Pair, tmp_path: Path, name: str) -> None:
    sizes, spelling, able, causal = DRAFTS[name]
    target = read_model_facts(pair.target)
    source = write_dflash(tmp_path / "source", dflash_tensors(pair, **sizes), block=5, **spelling)
    known = read_dflash_facts(source, target)
    assert known.causal == causal
    for first in DFLASH:
        if first not in able:
            with pytest.raises(CheckpointError, match=f"layout {first} can express"):
                convert(source, tmp_path / first, first, pair.target)
            assert not (tmp_path / first).exists()
            continue
        done = convert(source, tmp_path / first, first, pair.target)
        assert done.sentence.startswith(f"{tmp_path / first}: block drafter in the layout {first}; ")
        assert_same_bits(tensors_of(source), tensors_of(tmp_path / first))
        assert nameless(read_dflash_facts(tmp_path / first, target)) == nameless(known)
    for first in able:
        for second in able:
            there = tmp_path / f"{first} {second}"
            convert(tmp_path / first, there, second, pair.target)
            assert config_of(there) == config_of(tmp_path / second), (first, second)


def test_names_and_keys_of_block_drafters_are_the_published_ones(pair: Pair, tmp_path: Path) -> None:
    source = write_dflash(tmp_path / "source", dflash_tensors(pair), block=5, layer={"rope_theta": 777.0})
    convert(source, tmp_path / "speculators", "speculators", pair.target)
    there = config_of(tmp_path / "speculators")
    assert (there["speculators_model_type"], there["architectures"]) == ("dflash", ["DFlashSpeculator"])
    # By the layer entered, and what leaves the target at the end.
    assert (there["aux_hidden_state_layer_ids"], there["block_size"], there["mask_token_id"]) == ([*TAPS, 4], 5, MASK)
    assert (there["sample_from_anchor"], there["sliding_window_non_causal"], there["draft_vocab_size"]) == (False, False, 61)
    assert there["speculators_config"]["verifier"] == {"name_or_path": str(pair.target), "architectures": ["LlamaForCausalLM"]}
    assert there["transformer_layer_config"]["rope_theta"] == 777.0 and "dflash_config" not in there["transformer_layer_config"]
    convert(tmp_path / "speculators", tmp_path / "z-lab", "z-lab", pair.target)
    back = config_of(tmp_path / "z-lab")
    assert (back["architectures"], back["num_target_layers"], back["rope_theta"]) == (["DFlashDraftModel"], 4, 777.0)
    assert back["dflash_config"] == {"mask_token_id": MASK, "block_size": 5, "target_layer_ids": [i - 1 for i in TAPS]}
    causal = write_dflash(tmp_path / "causal", dflash_tensors(pair), block=5, causal=True)
    convert(causal, tmp_path / "jetspec", "jetspec", pair.target)
    own = config_of(tmp_path / "jetspec")["dflash_config"]
    assert (own["causal_head"], own["draft_shift"]) == (True, False) and "causal" not in own


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("layout", P_EAGLE)
def test_p_eagle_heads_between_both_layouts(pair: Pair, tmp_path: Path, layout: str, reduced: bool) -> None:
    target = read_model_facts(pair.target)
    source = write_p_eagle(tmp_path / "source", p_eagle_tensors(pair, reduced=reduced), layout)
    known = read_p_eagle_facts(source, target)
    for other in P_EAGLE:
        done = convert(source, tmp_path / other, other)
        assert done.kind == "P-EAGLE head"
        found = read_p_eagle_facts(tmp_path / other, target)
        assert settled(found) == settled(known)
        assert torch.equal(tensors_of(tmp_path / other)["mask_hidden"], tensors_of(source)["mask_hidden"])
        assert config_of(tmp_path / other)["mask_token_id"] == MASK
    assert "midlayer.hidden_norm.weight" in tensors_of(tmp_path / "sglang")
    there = config_of(tmp_path / "speculators")
    assert (there["speculators_model_type"], there["speculators_config"]["algorithm"]) == ("peagle", "peagle")
    convert(tmp_path / "speculators", tmp_path / "back", "sglang")
    assert_same_bits(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "sglang"))
    assert config_of(tmp_path / "back") == config_of(tmp_path / "sglang")


def test_what_a_block_drafter_needs_is_named(pair: Pair, tmp_path: Path) -> None:
    source = write_dflash(tmp_path / "source", dflash_tensors(pair), block=5)
    with pytest.raises(ConfigError, match=r"^target: expected the folder of the target"):
        convert(source, tmp_path / "out", "speculators")
    with pytest.raises(ConfigError, match="layout: expected one of z-lab, jetspec, speculators for a block drafter, found 'sglang'"):
        convert(source, tmp_path / "out", "sglang", pair.target)
    shallow = write_hf(build_hf("llama", num_hidden_layers=2), tmp_path / "shallow")
    with pytest.raises(CheckpointError, match=r"target_layer_ids: expected .* from 0 to 1"):
        convert(source, tmp_path / "out", "speculators", shallow)
    edit_tensors(source / "model.safetensors", **{"fc.weight": torch.zeros(48, 48)})
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        convert(source, tmp_path / "out", "speculators", pair.target)
    head = write_p_eagle(tmp_path / "head", p_eagle_tensors(pair))
    with pytest.raises(ConfigError, match="layout: expected one of sglang, speculators for a P-EAGLE head, found 'modelopt'"):
        convert(head, tmp_path / "out", "modelopt")
    edit_json(head / "config.json", mask_token_id=61)
    with pytest.raises(CheckpointError, match="mask_token_id: expected a token of the vocabulary of 61, found 61"):
        convert(head, tmp_path / "out", "speculators")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "shallow", "head"}  # nothing half written


def test_the_default_residual_of_a_speculators_head(pair: Pair, tmp_path: Path) -> None:
    """vLLM reads it as false for P-EAGLE, and as true for EAGLE-3."""
    target, tensors = read_model_facts(pair.target), p_eagle_tensors(pair)
    head = write_p_eagle(tmp_path / "head", tensors, "speculators", norm_before_residual=None)
    assert read_p_eagle_facts(head, target).norm_before_residual is False
    edit_json(head / "config.json", speculators_model_type="eagle3", mask_token_id=None)
    assert read_eagle3_facts(head, target).norm_before_residual is True

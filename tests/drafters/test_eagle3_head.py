"""The EAGLE-3 head against the published equations, written out from the checkpoint's raw tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphspec.drafters.heads.eagle3_facts import read_eagle3_facts
from graphspec.drafters.heads.eagle3_loading import load_eagle3
from graphspec.errors import CheckpointError
from graphspec.facts import read_model_facts
from graphspec.models.target import load_target
from tests.support.checkpoints import (
    MODELOPT,
    VOCAB_SIZE,
    DenseAttention,
    assert_inert_rows,
    build_hf,
    eagle3_tensors,
    eagle_tensors,
    edit_json,
    edit_tensors,
    publish_eagle,
    write_eagle3,
    write_hf,
)
from tests.support.eagle_reference import eagle3_step
from tests.support.float_law import assert_float_law

THETA = 500.0


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_hf(build_hf("llama"), tmp_path_factory.mktemp("target"))


def load(draft_path: Any, target_path: Any, max_positions: int = 64) -> Any:
    target_facts = read_model_facts(target_path)
    facts = read_eagle3_facts(draft_path, target_facts)
    target = load_target(target_facts, facts.tap_layers, max_positions, torch.float32, "cpu")
    return load_eagle3(facts, target, max_positions, torch.float32, "cpu"), target


@torch.inference_mode()
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 1), (6, 3), (5, 5)])
def test_head_equals_the_equations(num_heads: int, num_kv_heads: int, tmp_path: Any, target_path: Any) -> None:
    raw = eagle3_tensors(num_heads=num_heads, num_kv_heads=num_kv_heads)
    draft, target = load(write_eagle3(tmp_path, raw, rope_theta=THETA), target_path)
    generator = torch.Generator().manual_seed(5)
    feature_BTF = torch.randn(1, 7, 3 * 48, generator=generator)
    tokens = [4, 9, 60, 0, 9, 33, 2]
    fused = draft.fuse(feature_BTF)
    fc = raw["fc.weight"]
    assert_float_law(fused[0], torch.stack([fc @ row for row in feature_BTF[0]]), feature_BTF[0].double() @ fc.double().T)
    attention = DenseAttention.prompt(1, 7)
    attention.position_BT = attention.position_BT + 40  # beyond the head's own max_position_embeddings of 32
    found = draft(torch.tensor([tokens]), fused, attention)
    logits = draft.logits(found)

    def step(hidden: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        w = {name: tensor.to(dtype) for name, tensor in raw.items()}
        out, last = eagle3_step(w, target.embed_tokens.weight[tokens].to(dtype), hidden.to(dtype), 40, theta=THETA)
        return out, last @ w["lm_head.weight"].T

    for mine, low, high in zip((found[0], logits[0]), step(fused[0], torch.float32), step(fused[0], torch.float64), strict=True):
        assert_float_law(mine, low, high)
    assert logits.dtype == torch.float32
    assert logits.shape == (1, 7, 23)
    # its own output is what the next step takes, without fc
    second = draft(torch.tensor([tokens]), found, attention)
    assert_float_law(second[0], step(found[0], torch.float32)[0], step(found[0], torch.float64)[0])


@torch.inference_mode()
def test_vocabulary_map_is_by_offsets(tmp_path: Any, target_path: Any) -> None:
    raw = eagle3_tensors()
    draft, _ = load(write_eagle3(tmp_path, raw), target_path)
    assert draft.target_token_Vd.dtype == torch.int64
    assert torch.equal(draft.target_token_Vd, raw["t2d"].nonzero()[:, 0])
    assert [i + int(raw["d2t"][i]) for i in range(23)] == draft.target_token_Vd.tolist()


@torch.inference_mode()
def test_both_spellings_of_the_layer_are_one_head(tmp_path: Any, target_path: Any) -> None:
    raw = eagle3_tensors()
    other = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in raw.items()}
    first, _ = load(write_eagle3(tmp_path / "midlayer", raw), target_path)
    second, _ = load(write_eagle3(tmp_path / "layers", other), target_path)
    for (name, mine), (_, theirs) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@torch.inference_mode()
def test_own_embedding_is_used_and_the_targets_is_shared_without_one(tmp_path: Any, target_path: Any) -> None:
    raw = eagle3_tensors()
    shared, target = load(write_eagle3(tmp_path / "shared", raw), target_path)
    assert shared.embed_tokens is target.embed_tokens
    own = torch.randn(VOCAB_SIZE, 48, generator=torch.Generator().manual_seed(9))
    draft, target = load(write_eagle3(tmp_path / "own", {**raw, "embed_tokens.weight": own}), target_path)
    assert torch.equal(draft.embed_tokens.weight, own)
    assert not torch.equal(target.embed_tokens.weight, own)


@torch.inference_mode()
def test_full_vocabulary_needs_no_map_and_may_share_the_head(tmp_path: Any, target_path: Any) -> None:
    raw = eagle3_tensors(draft_vocab_size=VOCAB_SIZE)
    assert not raw["d2t"].any()
    identity, _ = load(write_eagle3(tmp_path / "identity", raw), target_path)
    assert identity.target_token_Vd is None
    del raw["d2t"], raw["t2d"]
    own, _ = load(write_eagle3(tmp_path / "own", raw), target_path)
    assert own.target_token_Vd is None
    head = raw.pop("lm_head.weight")
    assert torch.equal(own.lm_head.weight, head)
    shared, target = load(write_eagle3(tmp_path / "shared", raw), target_path)
    assert shared.lm_head is target.lm_head
    # sharing must not have moved or replaced anything of the target's
    assert torch.equal(target.lm_head.weight, load_target(target.facts, (), 8, torch.float32, "cpu").lm_head.weight)


def test_inert_rows_change_nothing_even_with_nan_features(tmp_path: Any, target_path: Any) -> None:
    assert_inert_rows(load(write_eagle3(tmp_path, eagle3_tensors()), target_path)[0])


def test_rope_comes_from_the_head_alone(tmp_path: Any) -> None:
    target = read_model_facts(
        write_hf(build_hf("llama", rope_parameters={"rope_type": "default", "rope_theta": 500000.0}), tmp_path / "target")
    )
    facts = read_eagle3_facts(write_eagle3(tmp_path / "draft", eagle3_tensors()), target)
    assert (target.rope.theta, facts.decoder.rope.theta) == (500000.0, 10000.0)


@pytest.mark.parametrize(
    ("config", "num_layers", "taps"),
    [
        ({}, 6, (1, 3, 5)),
        ({"eagle_config": None}, 9, (2, 4, 6)),
        ({"eagle_config": None}, 32, (2, 16, 29)),
        ({"eagle_config": {}, "eagle_aux_hidden_state_layer_ids": [-1, 0, 3]}, 6, (0, 1, 4)),
    ],
)
def test_tapped_layers(config: dict[str, Any], num_layers: int, taps: tuple[int, ...], tmp_path: Any, target_path: Any) -> None:
    from dataclasses import replace

    target = replace(read_model_facts(target_path), num_layers=num_layers)
    assert read_eagle3_facts(write_eagle3(tmp_path, eagle3_tensors(), **config), target).tap_layers == taps


def test_a_head_of_the_first_publication_is_recognised(tmp_path: Any, target_path: Any) -> None:
    draft, _ = load(write_eagle3(tmp_path, eagle3_tensors(), architectures=["LlamaForCausalLM"]), target_path)
    assert draft.facts.draft_vocab_size == 23


AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("config", "key", "expected"),
    [
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, "architectures", "an EAGLE-3 head"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "architectures", "an EAGLE-3 head"),
        ({"architectures": None}, "architectures", "an EAGLE-3 head"),
        ({"vocab_size": 60}, "vocab_size", "61"),
        ({"hidden_size": 64}, "hidden_size", "48"),
        ({"target_hidden_size": 64}, "target_hidden_size", "48"),
        ({"draft_vocab_size": 62}, "draft_vocab_size", "at most vocab_size = 61"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "an integer >= 1"),
        ({"num_aux_hidden_states": 5}, "num_aux_hidden_states", "3"),
        ({"eagle_config": None}, AUX, "explicit layer ids"),  # (2, 3, 3) collide in 6 layers
        ({"eagle_config": {AUX: [0, 2, 6]}}, AUX, "from -1 to 5"),
        ({"eagle_config": {AUX: [2, 0, 4]}}, AUX, "ascending"),
        ({"eagle_config": {AUX: [0, 0, 4]}}, AUX, "distinct"),
        ({"eagle_config": {AUX: "all"}}, AUX, "a list"),
        ({"eagle_config": {AUX: [0, 2, 4], "use_aux_hidden_state": False}}, "use_aux_hidden_state", "true"),
        ({"eagle_config": None, "num_aux_hidden_states": 5}, "num_aux_hidden_states", "3, or explicit"),
        ({"fc_norm": True, "norm_before_fc": True}, "norm_before_fc", "one or the other"),
        ({"fc_norm": "yes"}, "fc_norm", "true or false"),
        ({"eagle_config": {"new_idea": 1}}, "new_idea", "one of"),
        ({"eagle_config": {**MODELOPT, "use_mtp_layernorm": True}}, "use_mtp_layernorm", "absent, null or false"),
        ({"eagle_config": {**MODELOPT, "parallel_draft_step": 4}}, "parallel_draft_step", "absent, null or 1"),
        ({"eagle_config": {**MODELOPT, "next_layer_regular": False}}, "next_layer_regular", "absent, null or true"),
        ({"eagle_config": {**MODELOPT, "use_last_layernorm": False}}, "use_last_layernorm", "absent, null or true"),
        ({"eagle_config": {**MODELOPT, "parallel_draft_heads_num_layers": 2}}, "parallel_draft_heads_num_layers", "absent"),
        ({"parallel_drafting": True}, "parallel_drafting", "absent"),
        ({"mask_token_id": 0}, "mask_token_id", "absent"),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}, "layer_types", "1 entries"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor", "at most 1"),
        ({"architectures": ["DeepseekV3ForCausalLMEagle3"], "kv_lora_rank": 12}, "qk_rope_head_dim", "an integer"),
        ({"quantization_config": {"quant_algo": "INT4_AWQ"}}, "quant_algo", "one of FP8"),
        ({"architectures": ["PEagleDraftModel"]}, "architectures", "an EAGLE-3 head"),
        ({"speculators_model_type": "peagle"}, "speculators_model_type", "'eagle3'"),
        ({"speculators_model_type": "eagle3"}, "transformer_layer_config", "an object"),
        ({"speculators_model_type": "eagle3", "transformer_layer_config": {"model_type": "gpt_oss"}}, "model_type", "one of llama"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "type", "one of default"),
    ],
)
def test_heads_that_do_not_fit_are_named(config: dict[str, Any], key: str, expected: str, tmp_path: Any, target_path: Any) -> None:
    path = write_eagle3(tmp_path, eagle3_tensors(), **config)
    with pytest.raises(CheckpointError) as caught:
        read_eagle3_facts(path, read_model_facts(target_path))
    assert str(path / "config.json") in caught.value.key
    assert key in caught.value.key
    assert expected in str(caught.value.expected)


def test_other_kinds_of_draft_are_named(tmp_path: Any, target_path: Any) -> None:
    raw = eagle3_tensors()
    narrow = {**raw, "fc.weight": torch.zeros(48, 96)}
    with pytest.raises(CheckpointError, match=r"fc\.weight: expected shape \[48, 144\], found shape \[48, 96\]"):
        load(write_eagle3(tmp_path / "narrow", narrow), target_path)
    target = read_model_facts(target_path)
    for architecture, hint in (
        ("LlamaForCausalLMEagle", "variant=eagle"),
        ("LlamaForCausalLM", "variant=standalone"),
        ("DeepseekV3ForCausalLMNextN", "variant=mtp"),
        ("PEagleDraftModel", "variant=p_eagle"),
        ("DFlashDraftModel", "variant=dflash"),
    ):
        path = write_eagle3(tmp_path / architecture, raw, architectures=[architecture], draft_vocab_size=None, eagle_config=None)
        with pytest.raises(CheckpointError) as caught:
            read_eagle3_facts(path, target)
        assert caught.value.hint.endswith(hint) or hint in caught.value.hint, architecture
    # configs that pretend, and tensors that don't
    whole = write_hf(build_hf("llama", num_hidden_layers=1), tmp_path / "whole")
    edit_json(whole / "config.json", draft_vocab_size=VOCAB_SIZE, eagle_config={AUX: [0, 2, 4]})
    first = publish_eagle(tmp_path / "first", eagle_tensors(), "safeailab", draft_vocab_size=23, eagle_config={AUX: [0, 2, 4]})
    nextn = write_eagle3(tmp_path / "nextn", raw)
    edit_tensors(nextn / "model.safetensors", "fc.weight", model__layers__0__eh_proj__weight=torch.zeros(48, 96))
    parallel = write_eagle3(tmp_path / "parallel", raw)
    edit_tensors(parallel / "model.safetensors", "fc.weight", mask_hidden=torch.zeros(1, 144))
    for path, hint in ((whole, "variant=standalone"), (first, "variant=eagle"), (nextn, "variant=mtp"), (parallel, "variant=p_eagle")):
        with pytest.raises(CheckpointError, match="expected an EAGLE-3 head") as caught:
            load(path, target_path)
        assert hint in caught.value.hint, path
        assert not (hint == "variant=eagle" and "variant=eagle3" in caught.value.hint)


def shifted(raw: dict[str, torch.Tensor], by: int) -> dict[str, torch.Tensor]:
    return {**raw, "d2t": raw["d2t"] + by}


@pytest.mark.parametrize("with_t2d", [True, False])
def test_bad_vocabulary_maps_are_refused(with_t2d: bool, tmp_path: Any, target_path: Any) -> None:
    raw = eagle3_tensors()
    token_Vd = raw["d2t"] + torch.arange(23)
    bad = {
        "absolute": {**raw, "d2t": token_Vd},
        "above": shifted(raw, VOCAB_SIZE),
        "below": shifted(raw, -VOCAB_SIZE),
        "twice": {**raw, "d2t": -torch.arange(23)},
        "shape": {**raw, "d2t": raw["d2t"][:-1]},
        "dtype": {**raw, "d2t": raw["d2t"].float()},
        "missing": {name: tensor for name, tensor in raw.items() if name != "d2t"},
    }
    if with_t2d:
        bad["disagrees"] = {**raw, "t2d": ~raw["t2d"]}
        bad["marks too many"] = {**raw, "t2d": torch.ones_like(raw["t2d"])}
    for name, tensors in bad.items():
        tensors = tensors if with_t2d else {key: tensor for key, tensor in tensors.items() if key != "t2d"}
        with pytest.raises(CheckpointError) as caught:
            load(write_eagle3(tmp_path / name, tensors, vocab_size=VOCAB_SIZE), target_path)
        assert "d2t" in caught.value.key, name
        assert (caught.value.hint == "d2t looks like target ids, not offsets") == (name == "absolute"), name


def test_a_mask_of_a_full_vocabulary_is_looked_at(tmp_path: Any, target_path: Any) -> None:
    """Without ``d2t``: it marks every token, or the map is missing."""
    raw = eagle3_tensors(draft_vocab_size=VOCAB_SIZE)
    del raw["d2t"]
    load(write_eagle3(tmp_path / "all", raw), target_path)
    raw["t2d"][7] = False
    with pytest.raises(CheckpointError, match="d2t: expected 61 offsets into a vocabulary of 61, found no such tensor"):
        load(write_eagle3(tmp_path / "some", raw), target_path)


def test_everything_lands_on_the_device(tmp_path: Any, target_path: Any) -> None:
    target_facts = read_model_facts(target_path)
    facts = read_eagle3_facts(write_eagle3(tmp_path, eagle3_tensors()), target_facts)
    target = load_target(target_facts, facts.tap_layers, 8, torch.bfloat16, "meta")
    draft = load_eagle3(facts, target, 8, torch.bfloat16, "meta")
    for module in (target, draft):
        places = {name: tensor.device.type for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        assert set(places.values()) == {"meta"}, places
    assert {"rotary.table_LD", "target_token_Vd"} == {name for name, _ in draft.named_buffers()}

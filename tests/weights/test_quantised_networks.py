"""Weights of low precision in draft heads, latent attention and mixtures of experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from graphspec.drafters.heads.eagle3_facts import read_eagle3_facts
from graphspec.drafters.heads.eagle3_loading import load_eagle3
from graphspec.drafters.mtp.facts import read_mtp_facts
from graphspec.drafters.mtp.loading import load_mtp
from graphspec.errors import CheckpointError
from graphspec.facts import read_model_facts
from graphspec.models.checkpoint import Checkpoint
from graphspec.models.decoder import Decoder
from graphspec.models.packed_weight import PackedWeight
from graphspec.models.target import load_target
from tests.support.checkpoints import build_hf, eagle3_tensors, edit_json, write_eagle3, write_hf
from tests.support.moe_checkpoints import write_mixture
from tests.support.mtp_checkpoints import add_heads, head_tensors, write_target
from tests.support.quantised_checkpoints import quantise


def load(folder: Path, device: str = "cpu") -> Decoder:
    return load_target(read_model_facts(folder), (), 32, torch.float32, device)


def assert_same_numbers(found: nn.Module, expected: nn.Module, products: int) -> None:
    """Every projection of one network is packed and has the numbers of the other's."""
    others, packed = dict(expected.named_modules()), 0
    for name, module in found.named_modules():
        weight = getattr(module, "weight", None)
        if name.endswith("_proj") and isinstance(weight, PackedWeight):
            assert torch.equal(weight.dequantise(), others[name].weight), name
            packed += 1
    assert packed == products


@pytest.mark.parametrize("sidecar", [True, False])
def test_an_eagle3_head_may_be_quantised(sidecar: bool, tmp_path: Path) -> None:
    """As compressed-tensors writes it, and as ModelOpt does, with the quantisation in a file of its own."""
    target_path = write_hf(build_hf("llama"), tmp_path / "target")
    layout = "fp8-tensor" if sidecar else "float-quantized"
    packed, plain = quantise(write_eagle3(tmp_path / "head", eagle3_tensors()), tmp_path, layout)
    if sidecar:
        edit_json(packed / "config.json", "quantization_config")
        (packed / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}))
    heads = []
    for folder in (packed, plain):
        facts = read_eagle3_facts(folder, target_facts := read_model_facts(target_path))
        target = load_target(target_facts, facts.tap_layers, 64, torch.float32, "cpu")
        heads.append(load_eagle3(facts, target, 64, torch.float32, "cpu"))
    assert_same_numbers(*heads, products=4)


def test_prediction_heads_may_be_quantised_with_their_target(tmp_path: Path) -> None:
    source = add_heads(write_target(tmp_path / "source"), head_tensors("deepseek", 2), num_nextn_predict_layers=1)
    heads = []
    for folder in quantise(source, tmp_path, "float-quantized"):
        facts = read_mtp_facts(folder, target_facts := read_model_facts(folder))
        heads.append(load_mtp(facts, load_target(target_facts, facts.tap_layers, 64, torch.float32, "cpu"), 64, torch.float32, "cpu"))
    assert_same_numbers(*heads, products=4)


def test_experts_in_low_precision_are_refused_by_name(tmp_path: Path) -> None:
    packed, _ = quantise(write_mixture(tmp_path / "source", "qwen3_moe")[0], tmp_path, "fp8-tensor")
    for device in ("meta", "cpu"):
        with pytest.MonkeyPatch.context() as patch:
            for read in ("raw", "codes", "part"):
                patch.setattr(Checkpoint, read, lambda *_: pytest.fail("read before it was refused"))
            with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.weight: expected experts that are not quantised"):
                load(packed, device)


def test_latent_attention_absorbs_the_numbers_of_a_packed_projection(tmp_path: Path) -> None:
    """``kv_b_proj`` is no product here but a factor of queries and outputs; experts stay in full precision."""
    source, _ = write_mixture(tmp_path / "source", "deepseek_v3")
    packed, plain = quantise(source, tmp_path, "fp8-tensor")
    file = packed / "model.safetensors"
    numbers = load_file(plain / "model.safetensors")
    kept = {name: value for name, value in load_file(file).items() if ".experts." not in name}
    save_file(kept | {name: value for name, value in numbers.items() if ".experts." in name}, file, metadata={"format": "pt"})
    found, expected = load(packed), load(plain)
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert torch.equal(one.self_attn.kv_b_QDL, other.self_attn.kv_b_QDL)
        assert isinstance(one.self_attn.o_proj.weight, PackedWeight)
        assert torch.equal(one.self_attn.o_proj.weight.dequantise(), other.self_attn.o_proj.weight)


def test_weights_in_low_precision_are_refused_over_ranks(tmp_path: Path) -> None:
    packed, _ = quantise(
        write_hf(build_hf("llama", num_attention_heads=4, num_key_value_heads=2), tmp_path / "source"), tmp_path, "fp8-tensor"
    )
    with pytest.raises(CheckpointError, match=r"q_proj.*full precision where weights are spread over ranks.*tensor_parallel=1"):
        load_target(read_model_facts(packed).of_rank(0, 2), (), 32, torch.float32, "meta")

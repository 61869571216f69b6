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
from graphspec.facts.sharding import Shard
from graphspec.kernels.linear.packed import Packed, check_packed, dequantise
from graphspec.models.decoder import Decoder
from graphspec.models.experts import MixtureOfExperts
from graphspec.models.layers import join_ranks
from graphspec.models.packed_weight import PackedWeight, shard_of
from graphspec.models.stack import pack_network
from graphspec.models.target import load_target
from tests.support.checkpoints import (
    VOCAB_SIZE,
    DenseAttention,
    architecture_of,
    build_hf,
    eagle3_tensors,
    edit_json,
    write_eagle3,
    write_hf,
)
from tests.support.features import marked, of_family
from tests.support.moe_checkpoints import write_mixture
from tests.support.mtp_checkpoints import add_heads, head_tensors, write_target
from tests.support.plans import plan
from tests.support.quantised_checkpoints import LAYOUTS, quantise, quantise_gpt_oss
from tests.support.rank_threads import ThreadComm, together


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


MIXTURE = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}


def experts_of(network: Decoder) -> list[MixtureOfExperts]:
    found = [module for module in network.modules() if isinstance(module, MixtureOfExperts)]
    assert found
    return found


@of_family("Qwen3MoeForCausalLM", "codes")
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if not layout.endswith("-order")])
@torch.inference_mode()
def test_experts_in_low_precision_have_the_bits_of_their_numbers(layout: str, tmp_path: Path) -> None:
    """In every layout in which experts are published one by one; by the reference and by the native op."""
    packed, plain = quantise(write_mixture(tmp_path / "source", "qwen3_moe", **MIXTURE)[0], tmp_path, layout)
    token_BT = torch.randint(0, VOCAB_SIZE, (2, 8), generator=torch.Generator().manual_seed(3))
    for native in (False, True):
        found, expected = load(packed), load(plain)
        for one, other in zip(experts_of(found), experts_of(expected), strict=True):
            for name in ("gate_up_EFH", "down_EHF"):
                weight = getattr(one, name)
                assert isinstance(weight, PackedWeight)
                assert torch.equal(weight.dequantise(), getattr(other, name).flatten(0, 1))
                assert weight.nbytes < getattr(other, name).nbytes / 2
        if native:
            for network in (found, expected):
                pack_network(network, plan())
                assert all(block.native_down is not None for block in experts_of(network))
        logits = [network.logits(network(token_BT, DenseAttention.prompt(2, 8)).hidden_BTH) for network in (found, expected)]
        assert torch.equal(*logits)


@pytest.mark.parametrize("layout", ["float-quantized", "fp8-block", "pack-quantized", "gptq", "nvfp4-modelopt"])
@pytest.mark.parametrize("family", marked(("glm", "glm4", "ernie4_5"), architecture_of, "codes"))
@torch.inference_mode()
def test_rows_of_codes_move_with_their_factors(family: str, layout: str, tmp_path: Path) -> None:
    """Rotated neighbours are put apart, in whatever form rows are stored; by the reference and by the native op."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    packed, plain = quantise(write_hf(build_hf(family, **sizes), tmp_path / "source"), tmp_path, layout)
    token_BT = torch.randint(0, VOCAB_SIZE, (2, 8), generator=torch.Generator().manual_seed(3))
    networks = load(packed), load(plain)
    assert any(isinstance(getattr(module, "weight", None), PackedWeight) for module in networks[0].modules())
    first, second = (network.logits(network(token_BT, DenseAttention.prompt(2, 8)).hidden_BTH) for network in networks)
    assert torch.equal(first, second)
    assert pack_network(networks[0], plan()) is None


def test_experts_without_data_are_counted_as_they_are_held(tmp_path: Path) -> None:
    packed, _ = quantise(write_mixture(tmp_path / "source", "qwen3_moe", **MIXTURE)[0], tmp_path, "nvfp4-modelopt")
    for one, other in zip(experts_of(load(packed)), experts_of(load(packed, "meta")), strict=True):
        for block in (one, other):
            block.pack()
        assert one.native_gate_up is not None and one.native_down is not None
        assert (one.native_gate_up.shape, one.native_down.shape) == (other.native_gate_up.shape, other.native_down.shape)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("pack-quantized-order", "", r"experts\.0\.gate_proj\.weight: expected experts of one format, and channels in one order"),
        ("fp8-tensor", "numbers", r"experts\.2\.up_proj\.weight: expected codes, as other experts of the layer have, found numbers"),
        ("fp8-tensor", "shape", r"experts\.2\.up_proj\.weight: expected shape \[32, 64\], found shape \[31, 64\]"),
        ("fp8-tensor", "format", r"experts\.0\.gate_proj\.weight: expected experts of one format"),
    ],
)
def test_experts_that_are_not_alike_are_refused(layout: str, change: str, message: str, tmp_path: Path) -> None:
    packed, _ = quantise(write_mixture(tmp_path / "source", "qwen3_moe", **MIXTURE)[0], tmp_path, layout)
    file, name = packed / "model.safetensors", "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors = load_file(file)
    if change == "numbers":
        tensors[name] = tensors[name].float()
        del tensors[f"{name}_scale"], tensors[name.replace("weight", "input_scale")]
    elif change == "shape":
        tensors[name] = tensors[name][:-1].clone()
    elif change == "format":
        tensors[f"{name}_scale"] = tensors[f"{name}_scale"].half()
    save_file(tensors, file, metadata={"format": "pt"})
    for device in ("meta", "cpu"):
        with pytest.raises(CheckpointError, match=message):
            load(packed, device)


@pytest.mark.parametrize("change", ["scales", "blocks", "dtype"])
def test_wrong_blocks_of_gpt_oss_are_refused(change: str, tmp_path: Path) -> None:
    packed, _ = quantise_gpt_oss(write_mixture(tmp_path / "source", "gpt_oss", hidden_size=64, intermediate_size=32)[0], tmp_path)
    file, stem = packed / "model.safetensors", "model.layers.1.mlp.experts.down_proj"
    tensors = load_file(file)
    if change == "scales":
        tensors[f"{stem}_scales"] = tensors[f"{stem}_scales"][:, 1:].clone()
        message = r"down_proj_scales: expected shape \[6, 64, 1\], U8, found U8 of shape \[6, 63, 1\]"
    elif change == "blocks":
        tensors[f"{stem}_blocks"] = tensors[f"{stem}_blocks"][..., :8].clone()
        message = r"down_proj_blocks: expected shape \[experts, rows, groups, 16\]"
    else:
        tensors[f"{stem}_scales"] = tensors[f"{stem}_scales"].float()
        message = r"down_proj_scales: expected shape \[6, 64, 1\], U8, found F32"
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        load(packed, "meta")


def test_latent_attention_absorbs_the_numbers_of_a_packed_projection(tmp_path: Path) -> None:
    """``kv_b_proj`` is no product here but a factor of queries and outputs."""
    source, _ = write_mixture(tmp_path / "source", "deepseek_v3")
    packed, plain = quantise(source, tmp_path, "fp8-tensor")
    found, expected = load(packed), load(plain)
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert torch.equal(one.self_attn.kv_b_QDL, other.self_attn.kv_b_QDL)
        assert isinstance(one.self_attn.o_proj.weight, PackedWeight)
        assert torch.equal(one.self_attn.o_proj.weight.dequantise(), other.self_attn.o_proj.weight)


SPREAD = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64, "intermediate_size": 128}


@pytest.mark.parametrize(
    "layout", ["float-quantized", "fp8-block", "pack-quantized", "pack-quantized-zeros", "gptq", "awq", "nvfp4-modelopt"]
)
def test_ranks_have_parts_of_codes(layout: str, tmp_path: Path) -> None:
    """Numbers and logits equal, bit for bit, those of ranks that load the same numbers."""
    source = write_hf(build_hf("llama", num_hidden_layers=2, **SPREAD), tmp_path / "source")
    packed, plain = quantise(source, tmp_path, layout)
    token_BT = torch.randint(0, VOCAB_SIZE, (2, 8), generator=torch.Generator().manual_seed(3))
    logits = []
    for folder in (packed, plain):
        comm = ThreadComm(2)

        def run(rank: int, folder: Path = folder, comm: ThreadComm = comm) -> tuple[Decoder, torch.Tensor]:
            with torch.inference_mode():
                ours = load_target(read_model_facts(folder).of_rank(rank, 2), (), 32, torch.float32, "cpu")
                join_ranks(ours, comm.of(rank))
                return ours, ours.logits(ours(token_BT, DenseAttention.prompt(2, 8)).hidden_BTH)

        logits.append(together(2, run))
    for (found, mine), (expected, theirs) in zip(*logits, strict=True):
        assert_same_numbers(found, expected, products=8)
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("layout", ["float-quantized", "fp8-block", "pack-quantized", "gptq", "nvfp4-modelopt", "mxfp4 of gpt-oss"])
def test_ranks_have_parts_of_packed_experts(layout: str, tmp_path: Path) -> None:
    """Bit for bit those of ranks that load the same numbers."""
    if layout == "mxfp4 of gpt-oss":
        source, _ = write_mixture(tmp_path / "source", "gpt_oss", hidden_size=64, intermediate_size=128)
        packed, plain = quantise_gpt_oss(source, tmp_path)
    else:
        packed, plain = quantise(write_mixture(tmp_path / "source", "qwen3_moe", **MIXTURE)[0], tmp_path, layout)
    token_BT = torch.randint(0, VOCAB_SIZE, (2, 8), generator=torch.Generator().manual_seed(3))
    logits = []
    for folder in (packed, plain):
        comm = ThreadComm(2)

        def run(rank: int, folder: Path = folder, comm: ThreadComm = comm) -> torch.Tensor:
            with torch.inference_mode():
                ours = load_target(read_model_facts(folder).of_rank(rank, 2), (), 32, torch.float32, "cpu")
                assert all(isinstance(block.down_EHF, PackedWeight) is (folder is packed) for block in experts_of(ours))
                join_ranks(ours, comm.of(rank))
                return ours.logits(ours(token_BT, DenseAttention.prompt(2, 8)).hidden_BTH)

        logits.append(together(2, run))
    for mine, theirs in zip(*logits, strict=True):
        assert torch.equal(mine, theirs)


def test_groups_of_experts_that_ranks_would_cut_are_refused(tmp_path: Path) -> None:
    packed, _ = quantise_gpt_oss(write_mixture(tmp_path / "source", "gpt_oss", hidden_size=64, intermediate_size=96)[0], tmp_path)
    with pytest.raises(
        CheckpointError, match=r"down_proj: expected groups of channels that divide those of a rank, 48, found groups of 32"
    ):
        load_target(read_model_facts(packed).of_rank(0, 2), (), 32, torch.float32, "meta")


@pytest.mark.parametrize(
    ("layout", "rank_width", "message"),
    [
        ("pack-quantized", 24, r"o_proj\.weight.*: expected groups of channels that divide those of a rank, 24, found groups of 16"),
        ("gptq-order", 32, r"o_proj\..*: expected groups of channels that divide those of a rank, 32, found groups in no order"),
    ],
)
def test_groups_that_ranks_would_cut_are_refused(layout: str, rank_width: int, message: str, tmp_path: Path) -> None:
    sizes = SPREAD | {"head_dim": rank_width // 2, "hidden_size": 2 * rank_width}
    packed, _ = quantise(write_hf(build_hf("llama", num_hidden_layers=1, **sizes), tmp_path / "source"), tmp_path, layout)
    for device in ("meta", "cpu"):
        with pytest.raises(CheckpointError, match=message):
            load_target(read_model_facts(packed).of_rank(0, 2), (), 32, torch.float32, device)


def test_parts_of_rows_and_columns_have_the_numbers_of_the_whole() -> None:
    """Factors of several groups that end elsewhere than a part; rows past the end; formats that divide."""
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 256, (6, 48), generator=generator).to(torch.uint8)
    scales, minimums = (torch.randint(1, 60, (6, 6), generator=generator).to(torch.uint8) for _ in range(2))
    supers = torch.rand(6, 2, generator=generator).half()
    for weight in (
        Packed(codes, scales, "uint4", 16, supers, minimums=minimums, super_minimums=supers / 3),
        Packed(codes, scales.to(torch.float8_e4m3fn), "e2m1", 16, supers[:, :1].float(), divides=True),
        Packed(codes, scales[:, :1].float(), "int4", 96),
    ):
        numbers = dequantise(weight, torch.float32)
        for begin, count in ((0, 32), (32, 32), (64, 32), (16, 80)):
            part = shard_of(weight, 1, Shard(96, ((begin, count),), count))
            assert isinstance(part, Packed)
            check_packed(part, "part")
            assert torch.equal(dequantise(part, torch.float32), numbers[:, begin : begin + count])
        part = shard_of(weight, 0, Shard(6, ((4, 2), (0, 1)), 5))
        assert isinstance(part, Packed)
        expected = torch.cat((numbers[[4, 5, 0]], torch.zeros(2, 96)))
        assert torch.equal(dequantise(part, torch.float32), expected)


def test_the_outline_of_a_weight_has_its_order_of_channels(tmp_path: Path) -> None:
    """A plan counts it, and what reads channels in an order is known before anything is loaded."""
    source = write_hf(build_hf("llama", num_hidden_layers=1, **SPREAD), tmp_path / "source")
    for layout, ordered in (("gptq-order", True), ("pack-quantized-order", True), ("gptq", False)):
        packed, _ = quantise(source, tmp_path, layout)
        found, outline = (load(packed, device).layers[0].mlp.down_proj.weight for device in ("cpu", "meta"))
        assert isinstance(found, PackedWeight) and isinstance(outline, PackedWeight)
        assert found.nbytes == outline.nbytes and ("segment0_group_of" in dict(outline.named_buffers())) == ordered

"""Quantised safetensors checkpoints: their numbers bit for bit, and the tokens of whole engines against transformers on those numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

from graphspec.errors import CheckpointError
from graphspec.facts import read_model_facts
from graphspec.models.checkpoint import Checkpoint
from graphspec.models.decoder import Decoder
from graphspec.models.packed_weight import PackedWeight
from graphspec.models.target import load_target
from tests.support.checkpoints import VOCAB_SIZE, build_hf, edit_json, write_hf
from tests.support.engines import assert_tokens_of
from tests.support.features import of_family
from tests.support.quantised_checkpoints import LAYOUTS, quantise

PROMPTS = [[5, 9, 3, 22, 5, 9, 3], [40, 2, 17, 33, 8, 40, 2, 17]]
SHAPES: dict[str, dict[str, Any]] = {
    "none": {"variant": "none"},
    "chain": {"variant": "ngram", "num_steps": 3, "topk": 1, "num_draft_tokens": 4},
    "tree": {"variant": "ngram", "num_steps": 3, "topk": 2, "num_draft_tokens": 7},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = build_hf("llama", head_dim=16, max_position_embeddings=128, **sizes)
    return write_hf(model, tmp_path_factory.mktemp("source") / "model")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_target(read_model_facts(folder), (), 64, dtype, "cpu")


def projections(model: Decoder) -> dict[str, torch.Tensor]:
    found = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            weight = module.weight
            found[name] = weight.dequantise() if isinstance(weight, PackedWeight) else weight
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_the_format(layout: str, dtype: torch.dtype, source: Path, tmp_path: Path) -> None:
    packed, plain = quantise(source, tmp_path, layout)
    model, numbers = load(packed, dtype), projections(load(plain, dtype))
    found = projections(model)
    assert found.keys() == numbers.keys() and len(found) == 8
    for name in found:
        assert torch.equal(found[name].view(torch.int16), numbers[name].view(torch.int16)), name
    held = [module.weight for name, module in model.named_modules() if name.endswith("_proj")]
    assert all(isinstance(weight, PackedWeight) for weight in held)
    assert sum(weight.nbytes for weight in held) < 0.75 * sum(2 * number.numel() for number in numbers.values()) or "8" in layout


@of_family("LlamaForCausalLM", "codes")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_emit_the_tokens_of_transformers(layout: str, source: Path, tmp_path: Path) -> None:
    packed, plain = quantise(source, tmp_path, layout, seed=3)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    assert_tokens_of(model, packed, PROMPTS, 24, *SHAPES.values())


COMPRESSED = [name for name, (config, _) in LAYOUTS.items() if config["quant_method"] == "compressed-tensors"]


# Groups by ``weight_g_idx`` are published, but compressed-tensors itself has dropped them.
@pytest.mark.parametrize("layout", [name for name in COMPRESSED if name != "pack-quantized-order"])
def test_numbers_are_those_of_compressed_tensors(layout: str, source: Path, tmp_path: Path) -> None:
    """Its decompression computes integers in the dtype of the scales, so these are float32 here, and rounds 4-bit floats to bfloat16."""
    packed, _ = quantise(source, tmp_path, layout)
    file, prefix = packed / "model.safetensors", "model.layers.0.self_attn.o_proj."
    tensors = load_file(file)
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if own["weight_scale"].dtype == torch.bfloat16:
        own["weight_scale"] = own["weight_scale"].float()
        save_file(tensors | {f"{prefix}weight_scale": own["weight_scale"]}, file, metadata={"format": "pt"})
    config = LAYOUTS[layout][0]
    args = {"strategy": "group", "group_size": 16} | config["config_groups"]["group_0"]["weights"]
    if args["strategy"] == "channel":
        args["group_size"] = None
    if config["format"].startswith("nvfp4"):
        args["strategy"] = "tensor_group"
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args), format=config["format"])
    numbers = BaseCompressor.get_value_from_registry(config["format"]).decompress(own, scheme)["weight"]
    assert numbers.dtype == (torch.bfloat16 if "fp4" in layout else torch.float32)
    assert torch.equal(projections(load(packed, numbers.dtype))["layers.0.self_attn.o_proj"], numbers)


def test_a_layer_may_have_projections_of_several_formats(source: Path, tmp_path: Path) -> None:
    """Queries in int4, keys in bfloat16, values in FP8: three segments of one layer."""
    (int4, plain4), (fp8, plain8) = (quantise(source, tmp_path, layout) for layout in ("pack-quantized", "float-quantized"))
    mixed, plain = tmp_path / "mixed", tmp_path / "mixed-plain"
    for target, first, second in ((mixed, int4, fp8), (plain, plain4, plain8)):
        tensors, others = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
        numbers = load_file(plain4 / "model.safetensors")
        kept = {name: value for name, value in tensors.items() if ".k_proj." not in name and ".v_proj." not in name}
        kept |= {name: value for name, value in others.items() if ".v_proj." in name}
        kept |= {name: value.bfloat16() for name, value in numbers.items() if ".k_proj." in name}
        target.mkdir()
        for file in first.iterdir():
            if file.name != "model.safetensors":
                (target / file.name).write_bytes(file.read_bytes())
        save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    found, expected = load(mixed), load(plain)
    weight = found.layers[0].self_attn.qkv_proj.weight
    assert isinstance(weight, PackedWeight) and len(weight.segments) == 3
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    qkv = [model.layers[0].self_attn.qkv_proj(x) for model in (found, expected)]
    torch.testing.assert_close(*qkv)
    for name, numbers in projections(expected).items():
        assert torch.equal(projections(found)[name], numbers)


def test_rows_may_be_taken_in_any_order(source: Path, tmp_path: Path) -> None:
    packed, _ = quantise(source, tmp_path, "gptq-order")
    weight = load(packed).layers[1].self_attn.qkv_proj.weight
    assert isinstance(weight, PackedWeight)
    row = torch.randperm(weight.shape[0], generator=torch.Generator().manual_seed(1))
    assert torch.equal(weight.take(row).dequantise(), weight.dequantise()[row])


@pytest.mark.parametrize("layout", ["gptq-v2", "gptq", "awq"])
def test_newer_configurations_name_the_layout_format(layout: str, source: Path, tmp_path: Path) -> None:
    """As transformers 5 and GPTQModel write them: a second version that was read as the first would have all zero points wrong."""
    packed, plain = quantise(source, tmp_path, layout)
    config = {key: value for key, value in LAYOUTS[layout][0].items() if key not in ("checkpoint_format", "version")}
    edit_json(
        packed / "config.json", quantization_config=config | {"format": {"gptq-v2": "GPTQ_V2", "gptq": "gptq", "awq": "gemm"}[layout]}
    )
    found, numbers = projections(load(packed)), projections(load(plain))
    assert all(torch.equal(found[name], numbers[name]) for name in numbers)


def test_layers_of_gptq_may_have_bits_of_their_own(source: Path, tmp_path: Path) -> None:
    """``dynamic`` of GPTQModel: one projection in 8 bits, one left in full precision."""
    (packed, plain), (eight, plain8) = (quantise(source, tmp_path, layout) for layout in ("gptq", "gptq-8"))
    dynamic = {r"+:.*\.o_proj": {"bits": 8, "group_size": 32}, r"-:.*\.down_proj": {}}
    edit_json(packed / "config.json", quantization_config=LAYOUTS["gptq"][0] | {"dynamic": dynamic})
    numbers = load_file(plain / "model.safetensors")
    for folder, wide in ((packed, eight), (plain, plain8)):
        tensors, others = load_file(folder / "model.safetensors"), load_file(wide / "model.safetensors")
        kept = {name: value for name, value in tensors.items() if ".o_proj." not in name and ".down_proj." not in name}
        kept |= {name: value for name, value in others.items() if ".o_proj." in name}
        kept |= {name: value for name, value in numbers.items() if ".down_proj." in name}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    found, expected = projections(load(packed)), projections(load(plain))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("same", [True, False])
def test_a_packed_head_beside_the_embedding_is_compared_by_its_numbers(same: bool, source: Path, tmp_path: Path) -> None:
    """A config that ties, and both tensors there: the tensors decide, and codes are read once however many parts are compared."""
    packed, _ = quantise(source, tmp_path, "float-quantized")
    file = packed / "model.safetensors"
    tensors = load_file(file)
    codes, scale = torch.randn(VOCAB_SIZE, 64).to(torch.float8_e4m3fn), torch.full((VOCAB_SIZE, 1), 0.25)
    other = codes.clone()
    other.view(torch.uint8)[-1, -1] ^= 0 if same else 1
    for name, value in (("lm_head.", codes), ("model.embed_tokens.", other)):
        tensors |= {f"{name}weight": value, f"{name}weight_scale": scale.clone()}
    save_file(tensors, file, metadata={"format": "pt"})
    edit_json(packed / "config.json", tie_word_embeddings=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphspec.models.checkpoint._COMPARED", 64 * 8)
        reads: list[str] = []
        whole = Checkpoint.codes
        patch.setattr(Checkpoint, "codes", lambda self, name, **more: reads.append(name) or whole(self, name, **more))
        model = load(packed)
    assert (model.lm_head.weight is model.embed_tokens.weight) == same
    assert max(reads.count(name) for name in ("lm_head.weight", "model.embed_tokens.weight")) <= 2


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "bitsandbytes"}, r"quant_method: expected one of fp8.*found 'bitsandbytes'"),
    "no object": (["fp8"], "quantization_config: expected an object"),
    "bits": ({"quant_method": "gptq", "bits": 3}, r"bits: expected one of 4, 8, found 3"),
    "cache": ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme: expected null"),
    "format": ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format: expected one of float-quantized"),
    "rotated": ({"quant_method": "compressed-tensors", "transform_config": {"x": 1}}, "transform_config: expected none"),
    "sparse": ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    "newer name": ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, r"\.format: expected one of gptq, gptq_v2, found 'marlin'"),
    "bits of a pattern": (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*o_proj": {"bits": 3}}},
        r"dynamic.*o_proj.*bits: expected one of 4, 8, found 3",
    ),
    "newer name of awq": ({"quant_method": "awq", "bits": 4, "format": "llm-awq"}, r"\.format: expected one of gemm"),
    "version": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version: expected one of gemm, found 'gemv'"),
    "block": ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size: expected null, or rows and channels"),
    "algorithm": ({"quant_algo": "W4A8_AWQ"}, "quant_algo: expected one of FP8"),
    "cache of modelopt": ({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo: expected null"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_that_do_not_load_are_refused_before_anything_is_read(name: str, source: Path, tmp_path: Path) -> None:
    config, message = CONFIGS[name]
    packed, _ = quantise(source, tmp_path, "fp8-tensor")
    edit_json(packed / "config.json", quantization_config=config)
    with pytest.raises(CheckpointError, match=message):
        read_model_facts(packed)


TENSORS: dict[str, tuple[str, str, Any, str]] = {
    "no scale": ("fp8-tensor", "o_proj.weight_scale", None, r"o_proj\.weight_scale: expected .* found no such tensor"),
    "scale of another shape": ("float-quantized", "o_proj.weight_scale", torch.ones(3, 1), "a scale for each row"),
    "block of another size": ("fp8-block", "o_proj.weight_scale_inv", torch.ones(3, 3), r"a scale for each block of \[16, 16\]"),
    "scale of the cache": ("fp8-tensor", "self_attn.k_scale", torch.ones(1), "no scale of the cache"),
    "zero points cut": ("gptq", "o_proj.qzeros", torch.zeros(1, 8, dtype=torch.int32), r"qzeros: expected shape \[4, 8\]"),
    "scales of channels": ("float-quantized", "o_proj.weight_scale", torch.ones(64, 5), "a scale for each row"),
    "a group too far": ("gptq-order", "o_proj.g_idx", torch.full((64,), 9, dtype=torch.int32), "groups from 0 to 3, found 9"),
    "bits of neither": ("pack-quantized", "o_proj.weight_shape", torch.tensor([64, 100]), "4 or 8 bits for each of 100 channels"),
    "no global scale": ("nvfp4-modelopt", "o_proj.weight_scale_2", None, "weight_scale_2: expected"),
    "group of another size": ("mxfp4", "o_proj.weight_scale", torch.ones(64, 4).to(torch.uint8), "a scale for 32 of 64 channels"),
    "another width": ("awq", "o_proj.qweight", torch.zeros(32, 8, dtype=torch.int32), r"found shape \[64, 32\]|qzeros|scales"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_are_named(name: str, source: Path, tmp_path: Path) -> None:
    layout, tensor, value, message = TENSORS[name]
    packed, _ = quantise(source, tmp_path, layout)
    tensors = load_file(packed / "model.safetensors")
    full = f"model.layers.0.{tensor}" if "self_attn" in tensor else f"model.layers.0.self_attn.{tensor}"
    tensors.pop(full, None)
    if value is not None:
        tensors[full] = value
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        load(packed)


def test_tensors_without_a_configuration_say_what_is_missing(source: Path, tmp_path: Path) -> None:
    packed, _ = quantise(source, tmp_path, "awq")
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"its config\.json has no quantization_config"):
        load(packed)

"""GGUF files of Qwen3.5: value heads of recurrent layers lie as ggml repeats key heads. Logits are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from torch import Tensor

from graphspec.errors import CheckpointError
from graphspec.facts import read_model_facts
from graphspec.facts.gguf_model import gguf_folder
from graphspec.kernels.linear.packed import check_packed, dequantise
from graphspec.models.target import load_target
from graphspec.weights.gguf import GgufFile
from tests.models.test_hybrid_models import whole_prompts
from tests.support.checkpoints import VOCAB_SIZE, write_hf
from tests.support.engines import assert_tokens_of
from tests.support.features import of_family
from tests.support.gguf_files import blocks, copy_gguf, stacked
from tests.support.hybrid_checkpoints import build_hybrid

HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 64}
LENGTH = 20


def tiled(tensor: Tensor, dim: int, size: int) -> Tensor:
    """From heads by key head to all first ones, then all second ones."""
    keys, repeats = HEADS["linear_num_key_heads"], HEADS["linear_num_value_heads"] // HEADS["linear_num_key_heads"]
    shape = tensor.shape
    parted = tensor.reshape(*shape[:dim], keys, repeats, size, *shape[dim + 1 :])
    return parted.transpose(dim, dim + 1).reshape(shape)


def as_stored(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """The name that the package's table knows, and what a converter writes."""
    width, before = HEADS["linear_value_head_dim"], 2 * HEADS["linear_num_key_heads"] * HEADS["linear_key_head_dim"]
    part = name.rpartition("linear_attn.")[2] if "linear_attn." in name else ""
    if part.startswith(("in_proj_qkv", "conv1d")):
        tensor = tensor.squeeze()
        tensor = torch.cat((tensor[:before], tiled(tensor[before:], 0, width)))
    elif part.startswith("in_proj_z"):
        tensor = tiled(tensor, 0, width)
    elif part.startswith(("in_proj_a", "in_proj_b", "A_log", "dt_bias")):
        tensor = tiled(tensor, 0, 1)
    elif part.startswith("out_proj"):
        tensor = tiled(tensor, 1, width)
    elif name.endswith("norm.weight") and part != "norm.weight":
        tensor = tensor + 1
    if part == "A_log":
        tensor = -tensor.exp()
    return name.replace(".dt_bias", ".dt_proj.bias"), tensor.contiguous()


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with gate and up of all experts in two tensors, where they are one."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
                found[name.replace("gate_up_proj", f"{part}_proj.weight")] = half.contiguous()
        else:
            found[name + ".weight" if name.endswith("experts.down_proj") else name] = tensor
    return found


def write(folder: Path, heads: int = 0, *, experts: bool = False) -> tuple[Path, Any]:
    """A file, and the model that it was made of; ``heads``: prediction heads, as layers past the last one."""
    model = build_hybrid("qwen3_5_moe" if experts else "qwen3_5", **HEADS)
    source = write_hf(model, folder / "source")
    config = json.loads((source / "config.json").read_text())
    layers, arch = config["num_hidden_layers"], "qwen35moe" if experts else "qwen35"
    file = folder / "model.gguf"
    writer = gguf.GGUFWriter(file, arch)
    writer.add_context_length(96)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers + heads)
    if experts:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    else:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([0 if kind == "linear_attention" else config["num_key_value_heads"] for kind in config["layer_types"]])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(HEADS["linear_key_head_dim"])
    writer.add_ssm_group_count(HEADS["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(HEADS["linear_num_value_heads"])
    writer.add_ssm_inner_size(HEADS["linear_value_head_dim"] * HEADS["linear_num_value_heads"])
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    if heads:
        writer.add_nextn_predict_layers(heads)
        for part in ("nextn.eh_proj", "nextn.enorm", "attn_norm", "attn_q"):
            writer.add_tensor(f"blk.{layers}.{part}.weight", np.zeros((4, 4), np.float32))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35MOE if experts else gguf.MODEL_ARCH.QWEN35, layers)
    for name, tensor in stacked(apart(load_file(source / "model.safetensors"))).items():
        if name.endswith("shared_expert_gate.weight"):
            tensor = tensor[0]  # as files have it that were quantised
        known, data = as_stored(name, tensor)
        stored = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, data.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file, model


DENSE, MIXTURE = (of_family(f"{name}ForCausalLM", "GGUF") for name in ("Qwen3_5", "Qwen3_5Moe"))


@pytest.mark.parametrize(
    ("heads", "experts"),
    [pytest.param(0, False, marks=DENSE), pytest.param(1, False, marks=DENSE), pytest.param(1, True, marks=MIXTURE)],
)
@torch.inference_mode()
def test_logits_equal_transformers(heads: int, experts: bool, tmp_path: Path) -> None:
    file, model = write(tmp_path, heads, experts=experts)
    facts = read_model_facts(gguf_folder(file))
    ours = load_target(facts, (), LENGTH, torch.float32, "cpu")
    token_BT = torch.randint(0, VOCAB_SIZE - 1, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    found = ours.logits(ours(token_BT, whole_prompts(facts, 2, LENGTH)).hidden_BTH)
    torch.testing.assert_close(found, model(input_ids=token_BT).logits, rtol=1e-4, atol=1e-4)


@of_family("Qwen3_5ForCausalLM", "GGUF", "ngram", "tree")
def test_an_engine_emits_the_tokens_of_transformers(tmp_path: Path) -> None:
    file, model = write(tmp_path)
    assert_tokens_of(model, file, [[5, 9, 3, 22, 5, 9, 3]], 16, {"variant": "ngram", "num_steps": 3, "topk": 2})


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_codes_of_columns_move_with_their_scales(kind: str, tmp_path: Path) -> None:
    assert_columns(kind, write(tmp_path)[0], tmp_path)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_super_blocks_of_several_heads_are_cut(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four heads of 64 channels lie in a block of 256."""
    monkeypatch.setitem(HEADS, "linear_num_value_heads", 8)
    assert_columns(kind, write(tmp_path)[0], tmp_path)


def assert_columns(kind: str, file: Path, tmp_path: Path) -> None:
    name, ours = "blk.0.ssm_out.weight", "model.layers.0.linear_attn.out_proj.weight"
    rows, columns = GgufFile([file]).describe(ours)[0]
    data = blocks((rows, columns), Type[kind], np.random.default_rng(2))
    packed = copy_gguf(file, tmp_path / "packed.gguf", lambda tensors: tensors | {name: (data, Type[kind])})
    codes = GgufFile([packed]).codes()[ours]
    found, outline = codes.make(), codes.outline()
    check_packed(found, kind)
    assert {field: part.shape for field, part in outline.tensors.items()} == {field: part.shape for field, part in found.tensors.items()}
    plain = torch.from_numpy(gguf.quants.dequantize(data, Type[kind]))
    keys, repeats = HEADS["linear_num_key_heads"], HEADS["linear_num_value_heads"] // HEADS["linear_num_key_heads"]
    expected = plain.reshape(rows, repeats, keys, -1).transpose(1, 2).reshape(rows, columns)
    assert torch.equal(dequantise(found, torch.float32).view(torch.int32), expected.contiguous().view(torch.int32))


def test_metadata_that_is_wrong_is_named(tmp_path: Path) -> None:
    file, _ = write(tmp_path)
    kind = gguf.GGUFValueType.UINT32
    for key, value, message in (
        ("qwen35.ssm.group_count", 4, "time_step_rank: expected a multiple of 4"),
        ("qwen35.ssm.inner_size", 192, r"attn_qkv\.weight|ssm_|attn_gate"),
    ):
        changed = copy_gguf(file, tmp_path / "changed.gguf", metadata={key: (value, kind)})
        with pytest.raises(CheckpointError, match=message):
            load_target(read_model_facts(gguf_folder(changed)), (), 8, torch.float32, "cpu")

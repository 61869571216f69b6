"""Targets of low precision: a draft learns from the numbers that the engine multiplies by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM

from graphspec.facts.gguf_model import gguf_folder
from graphspec.train.drafter import load_target
from tests.support.checkpoints import build_hf, write_hf
from tests.support.gguf_files import write_gguf
from tests.support.quantised_checkpoints import quantise


@pytest.mark.parametrize("form", ["gguf", "fp8-block", "awq", "pack-quantized-order", "nvfp4-compressed"])
def test_a_target_of_low_precision_is_read_as_its_numbers(form: str, tmp_path: Path) -> None:
    source = write_hf(
        build_hf("qwen3", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2),
        tmp_path / "source",
    )
    if form == "gguf":
        file = tmp_path / "model.gguf"
        plain, packed = write_gguf(source, file, {"attn_q": Type.Q4_1}, arch="qwen3", default=Type.Q8_0), gguf_folder(file)
    else:
        packed, plain = quantise(source, tmp_path, form)
    found, expected = load_target(packed), AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    assert found.dtype == torch.float32 and not any(parameter.requires_grad for parameter in found.parameters())
    tokens = torch.arange(48)[None]
    assert torch.equal(found(tokens).logits, expected(tokens).logits)

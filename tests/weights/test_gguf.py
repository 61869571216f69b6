"""GGUF files: blocks as the ``gguf`` package reads them, engines as transformers runs the same numbers, tokenizers, and damaged files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from graphspec import LLM, SamplingParams
from graphspec.errors import CheckpointError, GraphspecError
from graphspec.facts import read_model_facts
from graphspec.facts.gguf import read_header
from graphspec.facts.gguf_model import gguf_folder
from graphspec.kernels.linear.packed import check_packed, dequantise
from graphspec.models.packed_weight import PackedWeight
from graphspec.models.target import load_target
from graphspec.text.tokenizer import Tokenizer
from graphspec.weights.gguf import DECODE
from tests.support.checkpoints import architecture_of, build_hf, write_hf
from tests.support.engines import assert_tokens_of
from tests.support.features import marked
from tests.support.gguf_files import blocks, copy_gguf, write_gguf

PROMPTS = [[5, 9, 3, 22, 5, 9, 3], [40, 2, 17, 33, 8, 40, 2, 17]]
SIZES = {
    "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "head_dim": 64, "max_position_embeddings": 128,
}  # fmt: skip
MIXED = {
    "attn_q": Type.Q4_K, "attn_k": Type.Q4_K, "attn_v": Type.Q6_K, "attn_output": Type.Q5_K, "ffn_gate": Type.Q4_1, "ffn_up": Type.Q4_1,
    "ffn_down": Type.Q5_1, "token_embd": Type.Q8_0,
}  # fmt: skip
"""As a file of mixed types has them: three formats in one layer's projections."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    made = {}
    for family in ("llama", "qwen2", "qwen3"):
        sizes = SIZES | ({"head_dim": None} if family == "qwen2" else {})
        made[family] = write_hf(build_hf(family, tie_word_embeddings=family == "llama", **sizes), folder / family)
    return made


@pytest.mark.parametrize("name", DECODE)
def test_blocks_stand_for_the_numbers_of_the_package(name: str) -> None:
    kind = Type[name]
    channels, size = gguf.GGML_QUANT_SIZES[kind]
    raw = blocks((7, 3 * channels), kind, np.random.default_rng(1))
    packed = DECODE[name](torch.from_numpy(raw).view(7, 3, size))
    check_packed(packed, name)
    found, expected = dequantise(packed, torch.float32), torch.from_numpy(gguf.quants.dequantize(raw, kind))
    assert torch.equal(found, expected)
    if name != "MXFP4":  # its code 8 is -0 by the OCP specification, and 0 in ggml
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("family", marked(("llama", "qwen2", "qwen3"), architecture_of, "GGUF", "none", "ngram", "chain", "tree"))
def test_engines_emit_the_tokens_of_transformers(family: str, sources: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    plain = write_gguf(sources[family], file, MIXED, arch=family, default=Type.Q4_0)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    drafts = ({"variant": "ngram", "num_steps": 3, "topk": topk} for topk in (1, 2))
    assert_tokens_of(model, file, PROMPTS, 24, {"variant": "none"}, *drafts)


def test_layers_hold_codes(sources: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(sources["llama"], file, MIXED, arch="llama", default=Type.Q8_0)
    facts = read_model_facts(gguf_folder(file))
    model = load_target(facts, (), 64, torch.float32, "cpu")
    attention = model.layers[0].self_attn
    assert isinstance(attention.qkv_proj.weight, PackedWeight)
    assert [segment.code for segment in attention.qkv_proj.weight.segments] == ["uint4", "int8"]
    assert model.lm_head.weight is model.embed_tokens.weight  # tied, in packed form
    outline = load_target(facts, (), 64, torch.float32, "meta")
    sizes = [sum(tensor.nbytes for tensor in (*each.parameters(), *each.buffers())) for each in (model, outline)]
    assert sizes[0] == sizes[1] < sum(4 * parameter.numel() for parameter in build_hf("llama", **SIZES).parameters()) / 3


def test_split_files_are_one_model(sources: dict[str, Path], tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    write_gguf(sources["qwen3"], whole, MIXED, arch="qwen3")
    parts = [tmp_path / f"split-0000{part}-of-00002.gguf" for part in (1, 2)]
    for number, part in enumerate(parts):
        split = {key: (value, gguf.GGUFValueType.UINT16) for key, value in (("split.no", number), ("split.count", 2))}
        copy_gguf(whole, part, lambda t, number=number: dict(list(t.items())[number::2]), split, bare=number > 0)  # type: ignore[misc]
    outputs = []
    for file in (whole, parts[0]):
        llm = LLM(str(file), variant="none", runtime="eager", max_context=64, max_rows=1, buckets=[1])
        outputs.append(llm.generate([PROMPTS[0]], SamplingParams(max_tokens=16, ignore_eos=True))[0].token_ids)
    assert outputs[0] == outputs[1]
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"a part of split-00001-of-00002\.gguf, found no such file"):
        gguf_folder(parts[0])


def test_the_tokenizer_and_the_chat_template_come_from_the_file(sources: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(sources["llama"], file, {}, arch="llama")
    folder = gguf_folder(file)
    tokenizer = Tokenizer(folder)
    assert tokenizer.words("aab!") == [tokenizer.library.token_to_id(token) for token in ("a", "ab", "!")]
    assert tokenizer.decode(tokenizer.words("a b\nab")) == "a b\nab" and tokenizer.has_chat_template
    assert tokenizer.special_tokens == {"<|end|>": 58, "<s>": 59, "</s>": 60}
    assert read_model_facts(folder).eos_token_ids == (60, 58) and gguf_folder(file) == folder


def test_sentence_pieces_are_those_of_transformers(sources: dict[str, Path], tmp_path: Path) -> None:
    """Against the slow converter's rule: among the pairs that are there, the one whose token scores best merges first."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "c",
        "ab",
        "abc",
        "bc",
        "▁a",
        "▁ab",
        "▁abc",
    ]
    scores = [0.0] * 259 + [-9.0, -10.0, -11.0, -12.0, -1.0, -3.0, -2.0, -4.0, -5.0, -6.0]
    types = [2, 3, 3] + [6] * 256 + [1] * 10
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.pre": None, "tokenizer.ggml.merges": None, "tokenizer.ggml.eot_token_id": None,
        "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    model = build_hf("llama", vocab_size=len(pieces), **SIZES)
    file = tmp_path / "model.gguf"
    write_gguf(write_hf(model, tmp_path / "source"), file, {}, arch="llama", metadata=metadata)
    tokenizer = Tokenizer(gguf_folder(file))
    spelled = lambda text: [pieces[token] for token in tokenizer.encode(text)]  # noqa: E731
    assert spelled("abc") == ["<s>", "▁abc"]
    assert spelled("cab c") == ["<s>", "▁", "c", "ab", "▁", "c"]
    assert spelled("é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.words("abc é ab")) == "abc é ab"
    # Gemma 4's lists its merges, and puts no space in front.
    listed = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": ["a b", "ab c"], "tokenizer.ggml.add_space_prefix": False}
    file = tmp_path / "listed.gguf"
    write_gguf(tmp_path / "source", file, {}, arch="llama", metadata=metadata | listed)
    tokenizer = Tokenizer(gguf_folder(file))
    assert spelled("abc") == ["<s>", "abc"] and spelled("a bc") == ["<s>", "a", "▁", "b", "c"]
    assert tokenizer.decode(tokenizer.words("abc é ab")) == "abc é ab"


BAD_METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"llama.block_count": None}, "llama.block_count: expected a whole number"),
    "experts": ({"llama.expert_count": 8}, "expert_count: expected 0"),
    "width of keys": ({"llama.attention.key_length": 0}, "key_length: expected a whole number above 0"),
    "width of values": ({"llama.attention.value_length": 32}, "value_length: expected 64, found 32"),
    "rotated part": ({"llama.rope.dimension_count": "x"}, "dimension_count: expected a whole number above 0"),
    "scores": ({"llama.attention.scale": 2.0}, "attention.scale: expected 0, found 2.0"),
    "logits": ({"llama.logit_scale": 2.0}, "logit_scale: expected 0 or 1, found 2.0"),
    "clamp": ({"llama.attention.clamp_kqv": 1.0}, "clamp_kqv: expected 0, found 1.0"),
    "attention factor": ({"llama.rope.scaling.attn_factor": 2.0}, "attn_factor: expected 0 or 1, found 2.0"),
    "alignment": ({"general.alignment": 4}, "general.alignment: expected a power of two, at least 8, found 4"),
    "list of pre-tokenizers": ({"tokenizer.ggml.pre": ["gpt-2"]}, "tokenizer.ggml.pre: expected one of default"),
    "flag": ({"tokenizer.ggml.add_bos_token": "x"}, "add_bos_token: expected true or false, found 'x'"),
    "kinds of tokens": ({"tokenizer.ggml.token_type": ["a"] * 61}, "token_type: expected 61 kinds"),
    "scaling": ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type: expected one of none, linear, yarn"),
    "tokenizer": ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model: expected gpt2, llama or gemma4, found 'bert'"),
    "pre-tokenizer": ({"tokenizer.ggml.pre": "jais"}, "tokenizer.ggml.pre: expected one of default"),
    "end": ({"tokenizer.ggml.eos_token_id": 99}, "eos_token_id: expected a token from 0 to 60"),
    "types": ({"tokenizer.ggml.token_type": [1, 1]}, "token_type: expected 61 kinds"),
    "template": ({"tokenizer.chat_template": 3}, "tokenizer.chat_template: expected a text"),
    "split": ({"split.count": 3}, "split.count: expected 1, as the name of the file says"),
}


@pytest.mark.parametrize("name", BAD_METADATA)
def test_what_is_not_supported_is_named(name: str, sources: dict[str, Path], tmp_path: Path) -> None:
    metadata, message = BAD_METADATA[name]
    file = tmp_path / "model.gguf"
    write_gguf(sources["llama"], file, {}, arch="llama", metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        gguf_folder(file)


def test_types_and_architectures_that_do_not_load_are_named(sources: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((4, 84), dtype=np.uint8), raw_dtype=Type.Q2_K)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(CheckpointError, match=r"ffn_up\.weight: expected one of F32, F16, Q4_0, .*, found Q2_K"):
        gguf_folder(file)
    write_gguf(sources["llama"], tmp_path / "other.gguf", {}, arch="internlm2")
    known = (
        "llama, qwen2, qwen3, qwen3vl, qwen3moe, qwen2moe, olmoe, ernie4_5, ernie4_5-moe, glm4, gemma, gemma2, gemma3, gemma4, olmo2, "
        "exaone4, smollm3, granite, seed_oss, dots1, qwen35, qwen35moe, gpt-oss, glm4moe"
    )
    with pytest.raises(CheckpointError, match=rf"general\.architecture: expected one of {known}, found 'internlm2'"):
        gguf_folder(tmp_path / "other.gguf")


def test_damaged_files_are_one_message_and_nothing_beyond_them_is_read(sources: dict[str, Path], tmp_path: Path) -> None:
    """Cut at every place of the header and in the data, and with every length of the beginning made huge."""
    file, damaged = tmp_path / "model.gguf", tmp_path / "damaged.gguf"
    write_gguf(sources["llama"], file, MIXED, arch="llama", metadata={"tokenizer.chat_template": None})
    data = file.read_bytes()
    end = min(tensor.begin for tensor in read_header(file).tensors.values())
    for length in [*range(400), *range(400, end, 97), end + 5, len(data) - 1]:
        damaged.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            read_header(damaged)
    for place in range(8, 1200, 3):
        damaged.write_bytes(data[:place] + struct.pack("<Q", 2**63 + 5) + data[place + 8 :])
        try:
            read_header(damaged)
        except CheckpointError as error:
            assert str(damaged) in str(error)


@pytest.mark.parametrize("content", [b"", b"GG", b"GGUF", b"PK\x03\x04" * 20, b"GGUF\x01\x00\x00\x00" + bytes(64)])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(GraphspecError, match=str(file)):
        LLM(str(file), variant="none", runtime="eager")

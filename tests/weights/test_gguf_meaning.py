"""GGUF files: what their metadata and tensors mean, or are refused for, where a converter has a choice."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Kind

from graphspec.errors import CheckpointError, ResourceError
from graphspec.facts import read_model_facts
from graphspec.facts.folders import model_folder
from graphspec.facts.gguf import read_header
from graphspec.facts.gguf_model import gguf_folder
from graphspec.lab.predict.model_pair import config_folder
from graphspec.models.target import load_target
from graphspec.text.tokenizer import Tokenizer
from tests.support.checkpoints import build_hf, write_hf
from tests.support.gguf_files import Stored, copy_gguf, write_gguf

SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "head_dim": 16,
    "max_position_embeddings": 128,
}  # fmt: skip
Q = "blk.0.attn_q.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    file = folder / "good.gguf"
    write_gguf(write_hf(build_hf("llama", tie_word_embeddings=True, **SIZES), folder / "source"), file, {}, arch="llama")
    return file


def load(file: Path) -> None:
    load_target(read_model_facts(gguf_folder(file)), (), 32, torch.float32, "cpu")


def as_type(name: str, kind: Type, shape: tuple[int, ...] | None = None) -> Any:
    """A change of one tensor: its type, and its shape."""

    def change(tensors: Stored) -> Stored:
        data, _ = tensors[name]
        return tensors | {name: (gguf.quants.quantize(data.reshape(shape or data.shape), kind), kind)}

    return change


def more(name: str, *shape: int) -> Any:
    return lambda tensors: tensors | {name: (np.zeros(shape, np.float32), Type.F32)}


UNFIT = {
    "a norm of low precision": (as_type("output_norm.weight", Type.Q8_0), r"output_norm\.weight: expected a matrix, or one of F32"),
    "queries in three dimensions": (as_type(Q, Type.Q8_0, (4, 16, 64)), r"attn_q\.weight: expected a matrix, .* shape \[4, 16, 64\]"),
    "queries of half a head": (lambda t: t | {Q: (t[Q][0][:6], Type.F32)}, r"attn_q\.weight: expected rows of 4 heads of an even width"),
    "a layer by two names": (more("blk.00.attn_q.weight", 64, 64), r"blk\.00\.attn_q\.weight.*: expected a tensor of LlamaForCausalLM"),
    "a layer of 60 digits": (more(f"blk.{'9' * 60}.attn_q.weight", 64, 64), "expected a tensor of LlamaForCausalLM"),
    "a layer too many": (more("blk.5.attn_v.weight", 32, 64), r"model\.layers\.5\.self_attn\.v_proj\.weight: expected no such tensor"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_tensors_that_do_not_fit_are_named(name: str, good: Path, tmp_path: Path) -> None:
    change, message = UNFIT[name]
    with pytest.raises(CheckpointError, match=message):
        load(copy_gguf(good, tmp_path / "unfit.gguf", change))


def test_tensors_lie_at_multiples_of_the_alignment(good: Path, tmp_path: Path) -> None:
    data, name = good.read_bytes(), b"output_norm.weight"
    place = data.index(name) + len(name) + 4 + 8 + 4  # dimensions, the one extent, type
    (offset,) = struct.unpack_from("<Q", data, place)
    file = tmp_path / "shifted.gguf"
    file.write_bytes(data[:place] + struct.pack("<Q", offset - 2) + data[place + 8 :])
    with pytest.raises(CheckpointError, match=r"output_norm\.weight: expected an offset that is a multiple of 32"):
        read_header(file)


def llama3_divisors(factor: float, theta: float) -> np.ndarray[Any, Any]:
    """As convert_hf_to_gguf writes them for heads of 16."""
    found = []
    for place in range(8):
        length = 2 * np.pi * theta ** (place / 8)
        smooth = (8192 / length - 1.0) / 3.0
        found.append(1.0 if length < 8192 / 4 else factor if length > 8192 else 1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def with_divisors(values: Any, kind: Type = Type.F32) -> Any:
    data = np.array(values, np.float32 if kind == Type.F32 else np.float16)
    return lambda tensors: tensors | {"rope_freqs.weight": (data, kind)}


def test_divisors_of_frequencies_are_the_scaling_of_llama_3(good: Path, tmp_path: Path) -> None:
    theta = {"llama.rope.freq_base": (500000.0, Kind.FLOAT32)}
    facts = read_model_facts(gguf_folder(copy_gguf(good, tmp_path / "a.gguf", with_divisors(llama3_divisors(8.0, 500000.0)), theta)))
    assert (facts.rope.kind, facts.rope.factor, facts.rope.low_freq_factor, facts.rope.high_freq_factor) == ("llama3", 8.0, 1.0, 4.0)
    assert facts.rope.original_max_position_embeddings == 8192


def test_divisors_are_read_from_the_part_that_has_them(good: Path, tmp_path: Path) -> None:
    parts = [tmp_path / f"split-0000{part}-of-00002.gguf" for part in (1, 2)]
    split = {"split.count": (2, Kind.UINT16), "llama.rope.freq_base": (500000.0, Kind.FLOAT32)}
    copy_gguf(good, parts[0], lambda tensors: {}, split)
    copy_gguf(good, parts[1], with_divisors(llama3_divisors(32.0, 500000.0)), bare=True)
    assert read_model_facts(gguf_folder(parts[0])).rope.factor == 32.0
    load(parts[0])


ODD_DIVISORS = {
    "another number": (with_divisors([1] * 5), r"expected F32 of shape \[8\], found F32 of shape \[5\]"),
    "float16": (with_divisors([1] * 8, Type.F16), r"expected F32 of shape \[8\], found F16"),
    "zero": (with_divisors([0] * 8), "expected divisors of at least 1"),
    "NaN": (with_divisors([1] * 7 + [float("nan")]), "expected the divisors of Llama 3's scaling, found nan at 7"),
    "infinite": (with_divisors([1] * 7 + [float("inf")]), "expected the divisors of Llama 3's scaling"),
    "another scaling": (with_divisors([1, 2, 3, 4, 5, 6, 7, 8]), "expected the divisors of Llama 3's scaling, found 2 at 1"),
}


@pytest.mark.parametrize("name", ODD_DIVISORS)
def test_other_divisors_are_refused(name: str, good: Path, tmp_path: Path) -> None:
    change, message = ODD_DIVISORS[name]
    with pytest.raises(CheckpointError, match=message):
        gguf_folder(copy_gguf(good, tmp_path / "odd.gguf", change))


def test_divisors_need_a_base_and_no_other_scaling(good: Path, tmp_path: Path) -> None:
    for theta in (0.0, -5.0):
        file = copy_gguf(good, tmp_path / "base.gguf", with_divisors([1] * 8), {"llama.rope.freq_base": (theta, Kind.FLOAT32)})
        with pytest.raises(CheckpointError, match="a base above 1"):
            gguf_folder(file)
    scaled = {"llama.rope.scaling.type": ("linear", Kind.STRING), "llama.rope.scaling.factor": (2.0, Kind.FLOAT32)}
    with pytest.raises(CheckpointError, match=r"scaling\.type: expected none next to rope_freqs\.weight"):
        gguf_folder(copy_gguf(good, tmp_path / "both.gguf", with_divisors([1] * 8), scaled))


SCALINGS: dict[str, tuple[dict[str, tuple[Any, Kind]], tuple[Any, ...]]] = {
    "linear": ({"type": ("linear", Kind.STRING), "factor": (2.0, Kind.FLOAT32)}, ("linear", 2.0)),
    "a factor without a type": ({"factor": (2.0, Kind.FLOAT32)}, ("linear", 2.0)),
    "no scaling, whatever the factor": ({"type": ("none", Kind.STRING), "factor": (2.0, Kind.FLOAT32)}, ("default", 1.0)),
    "yarn": (
        {
            "type": ("yarn", Kind.STRING), "factor": (4.0, Kind.FLOAT32), "original_context_length": (32, Kind.UINT32),
            "yarn_beta_fast": (16.0, Kind.FLOAT32), "yarn_beta_slow": (2.0, Kind.FLOAT32),
        },
        ("yarn", 4.0, 32, 16.0, 2.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_of_the_rotation(name: str, good: Path, tmp_path: Path) -> None:
    keys, expected = SCALINGS[name]
    file = copy_gguf(good, tmp_path / "scaled.gguf", metadata={f"llama.rope.scaling.{key}": value for key, value in keys.items()})
    rope = read_model_facts(gguf_folder(file)).rope
    found = (rope.kind, rope.factor, rope.original_max_position_embeddings, rope.beta_fast, rope.beta_slow)
    assert found[: len(expected)] == expected


def test_the_old_key_of_a_linear_scaling(good: Path, tmp_path: Path) -> None:
    file = copy_gguf(good, tmp_path / "old.gguf", metadata={"llama.rope.scale_linear": (4.0, Kind.FLOAT32)})
    rope = read_model_facts(gguf_folder(file)).rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_a_llama_with_a_window_is_a_mistral(good: Path, tmp_path: Path) -> None:
    file = copy_gguf(good, tmp_path / "window.gguf", metadata={"llama.attention.sliding_window": (16, Kind.UINT32)})
    facts = read_model_facts(gguf_folder(file))
    assert (facts.architecture, facts.sliding_window) == ("MistralForCausalLM", (16,))


def test_texts_end_with_eos_where_the_file_says_so(good: Path, tmp_path: Path) -> None:
    flags = {f"tokenizer.ggml.add_{name}_token": (True, Kind.BOOL) for name in ("bos", "eos")}
    tokenizer = Tokenizer(gguf_folder(copy_gguf(good, tmp_path / "eos.gguf", metadata=flags)))
    inner = tokenizer.words("ab")
    assert tokenizer.encode("ab") == [59, *inner, 60]


def test_a_folder_of_gguf_files_is_told_which_file(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    shutil.copy(good, folder / "model.gguf")
    for use in (model_folder, config_folder):
        with pytest.raises(CheckpointError, match=rf"a folder of GGUF files.*model\.path={folder}/model\.gguf"):
            use(str(folder))
    assert config_folder(str(folder / "model.gguf")) == model_folder(str(folder / "model.gguf"))


@pytest.mark.parametrize("name", ["a-00001-of-00000.gguf", "a-00003-of-00002.gguf", "a-00000-of-00001.gguf"])
def test_numbers_of_parts_that_no_split_model_has(name: str, good: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a part from 1 to"):
        gguf_folder(Path(shutil.copy(good, tmp_path / name)))


def test_a_cache_that_cannot_be_written_is_named(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ResourceError, match="cache folder: expected a place where"):
        gguf_folder(good)

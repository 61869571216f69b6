"""Checkpoint safety: no code runs, no file outside the folder is opened, and declared sizes cost neither memory nor time."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphspec.drafters.convert import convert
from graphspec.drafters.mtp.facts import read_tensor_names
from graphspec.errors import CheckpointError, ConfigError
from graphspec.facts import ModelFacts, read_model_facts
from graphspec.facts.files import MAX_CONFIG, find_file, read_json, read_shards
from graphspec.facts.keys import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_IDS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    Keys,
)
from graphspec.graphs import memory as memory_module
from graphspec.models.target import load_target
from graphspec.models.tensor_files import load_pickle, open_tensors
from graphspec.models.token_map import load_token_map
from tests.fuzz._checkpoints import bomb, program
from tests.support.checkpoints import build_hf, edit_json, write_hf
from tests.support.engines import Pair, mirror_pair

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(build_hf("llama", num_hidden_layers=2), tmp_path_factory.mktemp("written") / "checkpoint")


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "checkpoint")


def load(path: Path) -> Any:
    return load_target(read_model_facts(path), (), 16, torch.float32, "cpu")


def read_with(checkpoint: Path, **changes: Any) -> ModelFacts:
    edit_json(checkpoint / "config.json", **changes)
    return read_model_facts(checkpoint)


# ---- files


def test_a_snapshot_of_links_loads(checkpoint: Path, tmp_path: Path) -> None:
    """As the Hugging Face cache has it: blobs in one folder, links to them in another."""
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for file in checkpoint.iterdir():
        (snapshot / file.name).symlink_to(f"../../{checkpoint.name}/{file.name}")
    assert load(snapshot).norm.weight.equal(load(checkpoint).norm.weight)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_other_things_than_files_are_named_and_not_opened(name: str, checkpoint: Path) -> None:
    file = checkpoint / name
    others = {
        "a named pipe": lambda: os.mkfifo(file),
        "a folder": file.mkdir,
        "a link that leads nowhere": lambda: file.symlink_to("nowhere"),
        "Too many levels of symbolic links": lambda: file.symlink_to(file),
        "a device": lambda: file.symlink_to("/dev/zero"),
    }
    file.unlink()
    for found, make in others.items():
        make()
        with pytest.raises(CheckpointError, match=rf"{name}: expected a regular file, found .*{found}"):
            load(checkpoint)
        file.rmdir() if file.is_dir() else file.unlink()


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    for name in ("a\0b", "x" * 5000):
        with pytest.raises(CheckpointError):
            find_file(tmp_path / name)
        with pytest.raises(CheckpointError):
            read_model_facts(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"[" * 200_000, "RecursionError: it is nested too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "ValueError: Exceeds the limit"),
        (b'{"a": 1, "b": {"a": 1, "a": 2}}', "ValueError: the key 'a' is there twice, with different values"),
        (b'\xef\xbb\xbf{"a": 1}', "JSONDecodeError: Unexpected UTF-8 BOM"),
        (b"\xff", "UnicodeDecodeError"),
        (b'{"a": 1', "JSONDecodeError"),
        (b"[1]", "list"),
    ],
)
def test_json_that_is_refused(text: bytes, found: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(text)
    with pytest.raises(CheckpointError) as caught:
        read_json(file, MAX_CONFIG)
    assert str(caught.value.found).startswith(found)


def test_json_that_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a": 1, "a": 1, "b": [NaN, Infinity]}')
    assert read_json(file, MAX_CONFIG)["a"] == 1
    with pytest.raises(CheckpointError, match="expected a json file of at most 10 B, found 38 B"):
        read_json(file, 10)


def test_messages_stay_short_and_print(checkpoint: Path) -> None:
    nested: Any = 1
    for _ in range(700):
        nested = [nested]
    for value in (nested, "\x1b[31m\ud800" * 1000, [[0] * 10_000] * 10, 10**4000, {"a": "x" * 10**6}):
        with pytest.raises(CheckpointError) as caught:
            read_with(checkpoint, vocab_size=value)
        assert len(str(caught.value)) < 1000
        assert str(caught.value).isprintable()


# ---- an index


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../a.safetensors",
        "sub/../../a.safetensors",
        "a.bin",
        "config.json",
        "",
        ".",
        "a\0.safetensors",
        "\\\\a\\b.safetensors",
    ],
)
def test_an_index_stays_inside_and_of_its_kind(name: str, checkpoint: Path) -> None:
    save_file(load_file(checkpoint / "model.safetensors"), checkpoint.parent / "a.safetensors")
    torch.save(load_file(checkpoint / "model.safetensors"), checkpoint / "a.bin")
    (checkpoint / "model.safetensors").unlink()
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    for read in (load, read_tensor_names, lambda folder: convert(folder, folder.parent / "out", "sglang")):
        with pytest.raises(
            CheckpointError, match=r"weight_map: model\.norm\.weight: expected the name of a \.safetensors file in this folder"
        ):
            read(checkpoint)


def test_an_index_may_lead_into_a_folder_below(checkpoint: Path) -> None:
    tensors = load(checkpoint).state_dict()
    names = list(load_file(checkpoint / "model.safetensors"))
    (checkpoint / "sub").mkdir()
    (checkpoint / "model.safetensors").rename(checkpoint / "sub" / "a.safetensors")
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "sub/a.safetensors")}))
    assert set(read_shards(index)) == set(names)
    assert all(value.equal(tensors[name]) for name, value in load(checkpoint).state_dict().items())


# ---- sizes


LIMITS = {
    "hidden_size": MAX_WIDTH,
    "intermediate_size": MAX_WIDTH,
    "num_attention_heads": MAX_HEADS,
    "head_dim": MAX_HEAD_DIM,
    "vocab_size": MAX_VOCAB,
    "max_position_embeddings": MAX_POSITIONS,
    "num_hidden_layers": MAX_LAYERS,
}


@pytest.mark.parametrize("key", LIMITS)
def test_sizes_have_limits(key: str, checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", num_attention_heads=1, num_key_value_heads=1)
    read_with(checkpoint, **{key: LIMITS[key]})
    for value in (LIMITS[key] + 1, 10**12, 10**400, True, float(LIMITS[key]), str(LIMITS[key])):
        with pytest.raises(CheckpointError, match=f"{key}: expected an integer"):
            read_with(checkpoint, **{key: value})


def test_a_head_dim_that_follows_from_other_sizes_has_the_same_limit(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=f"head_dim: expected an even number .* at most {MAX_HEAD_DIM}, found {2 * MAX_HEAD_DIM}"):
        read_with(checkpoint, head_dim=None, hidden_size=2 * MAX_HEAD_DIM, num_attention_heads=1, num_key_value_heads=1)


def test_experts_of_all_layers_together_have_a_limit(checkpoint: Path) -> None:
    mixture = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    assert read_with(checkpoint, **mixture, num_experts=MAX_EXPERTS // 2).experts is not None
    with pytest.raises(CheckpointError, match=f"num_experts: expected at most {MAX_EXPERTS} experts in the 2 layers together"):
        read_with(checkpoint, num_experts=MAX_EXPERTS // 2 + 1)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        *(({"rms_norm_eps": value}, "rms_norm_eps") for value in (0, 1.5, 1e300, 10**400, float("nan"))),
        *(({"rope_parameters": None, "rope_theta": value}, "rope_theta") for value in (-1, 1, 1e13, "1e4", True)),
        ({"rope_theta": 500000.0}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.5}}, "factor"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2, "beta_fast": 1, "beta_slow": 32}}, "beta_fast"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2}, "head_dim": 2}, "head_dim"),
        ({"rope_scaling": False}, "rope_scaling"),
        ({"eos_token_id": [1] * (MAX_IDS + 1)}, "eos_token_id"),
        ({"eos_token_id": 10**9}, "eos_token_id"),
        ({"bos_token_id": "x"}, "bos_token_id"),
        ({"torch_dtype": ["float32"]}, "torch_dtype"),
        ({"quantization_config": False}, "quantization_config"),
        ({"sliding_window": -5}, "sliding_window"),
    ],
)
def test_values_that_were_taken_silently(changes: dict[str, Any], key: str, checkpoint: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_with(checkpoint, **changes)
    assert caught.value.key.endswith(f": {key}")


def test_numbers_are_exact() -> None:
    keys = Keys({"two": 2.0, "yes": True, "ids": [0, True], "many": [0] * (MAX_IDS + 1)}, "there")
    for key in ("two", "yes"):
        with pytest.raises(CheckpointError):
            keys.integer(key)
    with pytest.raises(CheckpointError):
        keys.number("yes")
    for key in ("ids", "many"):
        with pytest.raises(CheckpointError, match=f"there: {key}: expected ids"):
            keys.integers(key, "ids", 0, 1)
    assert (keys.integer("none", 7), keys.number("none", 0.0), keys.integers("none", "ids", 0, 1)) == (7, 0.0, [])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return mirror_pair(tmp_path_factory.mktemp("pair"))


def test_position_tables_are_counted_before_they_are_built(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few pages keep the pools small; the table alone would take 2 GiB."""
    target = shutil.copytree(pair.target, tmp_path / "target")
    edit_json(target / "config.json", max_position_embeddings=MAX_POSITIONS, head_dim=64)
    monkeypatch.setattr(memory_module, "parameter_bytes", lambda *_: pytest.fail("networks were built"))
    with pytest.raises(ConfigError, match=r"model\.max_context, .* position tables, not counted as weights 2\.0 GiB"):
        Pair(target, pair.draft, None).llm(variant="none", num_pages=4, memory_gib=1.0)


def test_position_tables_are_counted_right(pair: Pair) -> None:
    llm = pair.llm()
    networks = (llm.cycle.target, llm.cycle.draft)
    held = [buffer for network in networks if network is not None for name, buffer in network.named_buffers() if name == "rotary.table_LD"]
    assert len(held) == 2
    assert memory_module._tables(llm.plan) == sum(table.nbytes for table in held)


# ---- pickles


def test_a_pickle_may_name_parts_of_tensors_alone(tmp_path: Path) -> None:
    """``weights_only`` by itself takes a ``bytearray``, of any size."""
    file = tmp_path / "a.bin"
    file.write_bytes(program(bomb(5)))
    assert torch.load(file, weights_only=True) == bytearray(5)
    for size in (5, 2**62):
        file.write_bytes(program(bomb(size)))
        with pytest.raises(CheckpointError, match=r"found UnpicklingError: 'builtins bytearray', which is no part of a plain tensor"):
            load_pickle(file)


@pytest.mark.parametrize("legacy", [False, True])
def test_plain_tensors_of_every_kind_are_read(legacy: bool, tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
    tensors = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in dtypes}
    wanting = {"parameter": torch.nn.Parameter(torch.ones(2)), "gradient": torch.ones(2, requires_grad=True)}
    torch.save(torch.nn.ParameterDict(wanting).state_dict() | tensors | wanting, file, _use_new_zipfile_serialization=not legacy)
    opened = open_tensors(file)
    for name, tensor in (tensors | wanting).items():
        found = opened.tensor(name)
        assert type(found) is torch.Tensor
        assert not found.requires_grad
        assert found.dtype == tensor.dtype
        assert found.equal(tensor)


@pytest.mark.parametrize("legacy", [False, True])
def test_other_tensors_are_refused(legacy: bool, tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    for tensor in (torch.eye(3).to_sparse(), torch.ones(3, device="meta"), quantised):
        torch.save({"a": tensor}, file, _use_new_zipfile_serialization=not legacy)
        with pytest.raises(CheckpointError, match=r"'torch\._utils _rebuild_.*', which is no part of a plain tensor"):
            open_tensors(file)


def test_a_map_that_claims_more_than_it_has(tmp_path: Path) -> None:
    file = tmp_path / "map.pt"
    torch.save(torch.zeros(1, dtype=torch.int64).expand(2**40), file)
    assert file.stat().st_size < 10_000
    with pytest.raises(CheckpointError, match=f"expected at most 44 token ids, found {2**40}"):
        load_token_map(file, 44)
    torch.save([1, 10**30], file)
    with pytest.raises(CheckpointError, match=r"expected token ids in \[0, 44\), found 1000"):
        load_token_map(file, 44)

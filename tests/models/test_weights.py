"""Reading checkpoints: facts, files, tensors, and errors for every defect."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from graphspec.errors import CheckpointError
from graphspec.facts import ModelFacts, check_tokenizer, read_model_facts
from graphspec.models.checkpoint import Checkpoint
from graphspec.models.target import load_target
from tests.support.checkpoints import VOCAB_SIZE, build_hf, edit_json, edit_tensors, write_hf

if TYPE_CHECKING:
    from pathlib import Path

REMOVED = object()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_hf(build_hf("llama", num_hidden_layers=2), tmp_path / "checkpoint")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = write_hf(build_hf("llama", num_hidden_layers=2), tmp_path / "sharded", shard_size="40KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


def load(path: Path, **kwargs: Any) -> Any:
    return load_target(read_model_facts(path), (), 16, torch.float32, "cpu", **kwargs)


def refused(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load(path)
    return caught.value


# ---- facts


def test_facts_of_a_config(checkpoint: Path) -> None:
    facts = read_model_facts(str(checkpoint))
    assert facts.path == checkpoint
    assert (facts.vocab_size, facts.hidden_size, facts.intermediate_size, facts.num_layers) == (VOCAB_SIZE, 48, 40, 2)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.rms_norm_eps) == (3, 3, 16, 1e-5)
    assert (facts.bos_token_id, facts.eos_token_ids, facts.dtype) == (1, (2,), "float32")
    assert facts.sliding_window == (None, None)
    assert hash(facts) == hash(read_model_facts(checkpoint))


def test_facts_import_no_torch() -> None:
    code = "import sys, graphspec.facts, graphspec.facts.layouts; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def facts_with(checkpoint: Path, **changes: Any) -> ModelFacts:
    removed = [key for key, value in changes.items() if value is REMOVED]
    edit_json(checkpoint / "config.json", *removed, **{key: value for key, value in changes.items() if value is not REMOVED})
    return read_model_facts(checkpoint)


@pytest.mark.parametrize(("value", "expected"), [(2, (2,)), ([5, 2], (5, 2)), (None, ()), (REMOVED, ())])
def test_eos_ids(value: Any, expected: tuple[int, ...], checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").unlink()
    assert facts_with(checkpoint, eos_token_id=value).eos_token_ids == expected


def test_generation_config_overrides_eos(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert read_model_facts(checkpoint).eos_token_ids == (7, 9)
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert read_model_facts(checkpoint).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "attribute", "expected"),
    [
        ({"head_dim": REMOVED}, "head_dim", 16),
        ({"max_position_embeddings": REMOVED}, "max_position_embeddings", 2048),
        ({"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": None}, "max_position_embeddings", 32768),
        ({"num_key_value_heads": REMOVED}, "num_kv_heads", 3),
        ({"dtype": REMOVED, "torch_dtype": "bfloat16"}, "dtype", "bfloat16"),
        ({"dtype": REMOVED}, "dtype", "float32"),
        ({"attention_bias": True}, "output_bias", True),
        ({"architectures": ["Qwen2ForCausalLM"]}, "attention_bias", True),
        ({"architectures": ["Qwen2ForCausalLM"], "attention_bias": True}, "output_bias", False),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": REMOVED}, "head_dim", 128),
        ({"architectures": ["Qwen3ForCausalLM"]}, "qk_norm", True),
        ({"architectures": ["MistralForCausalLM"]}, "sliding_window", (4096, 4096)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, "sliding_window", (None, None)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "max_window_layers": 0}, "sliding_window", (None, None)),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "max_window_layers": 1, "use_sliding_window": True},
            "sliding_window",
            (None, 8),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "sliding_window",
            (8, None),
        ),
        ({"sliding_window": 8}, "sliding_window", (None, None)),
    ],
)
def test_derived_facts(changes: dict[str, Any], attribute: str, expected: Any, checkpoint: Path) -> None:
    assert getattr(facts_with(checkpoint, **changes), attribute) == expected


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": REMOVED}, "architectures"),
        ({"hidden_size": REMOVED}, "hidden_size"),
        ({"vocab_size": "61"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"rms_norm_eps": REMOVED}, "rms_norm_eps"),
        ({"rms_norm_eps": True}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"head_dim": 15}, "head_dim"),
        ({"head_dim": None, "num_attention_heads": 7, "num_key_value_heads": 7}, "head_dim"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": 61}, "eos_token_id"),
        ({"dtype": "float8_e4m3fn"}, "dtype"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config.quant_method"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_parameters: rope_type"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope_parameters: factor"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "default"}}}, "rope_parameters: full_attention"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": None, "rope_scaling": {"type": "ntk"}}, "rope_scaling: type"),
        ({"rope_parameters": None, "rope_theta": -1}, "rope_theta"),
    ],
)
def test_wrong_keys_are_named(changes: dict[str, Any], key: str, checkpoint: Path) -> None:
    generation = checkpoint / "generation_config.json"
    generation.unlink()
    with pytest.raises(CheckpointError) as caught:
        facts_with(checkpoint, **changes)
    assert caught.value.key == f"{checkpoint / 'config.json'}: {key}"


def test_missing_and_broken_json(checkpoint: Path, tmp_path: Path) -> None:
    for path, part in ((tmp_path / "nowhere", "nowhere"), (checkpoint / "config.json", "config.json")):
        with pytest.raises(CheckpointError, match=rf"{part}: expected a folder with a Hugging Face checkpoint"):
            read_model_facts(path)
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="expected a readable json file, found JSONDecodeError"):
        read_model_facts(checkpoint)
    (checkpoint / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected a json object, found list"):
        read_model_facts(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: expected the checkpoint's config\.json, found no such file"):
        read_model_facts(checkpoint)


# ---- tensors


def test_sharded_equals_single(checkpoint: Path, sharded: Path) -> None:
    for (name, one), (_, many) in zip(load(checkpoint).named_parameters(), load(sharded).named_parameters(), strict=True):
        assert torch.equal(one, many), name


def test_fused_projections_keep_their_order(checkpoint: Path) -> None:
    from safetensors.torch import load_file

    raw, model = load_file(checkpoint / "model.safetensors"), load(checkpoint)
    parts = [raw[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(model.layers[1].self_attn.qkv_proj.weight, torch.cat(parts))
    parts = [raw[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(model.layers[0].mlp.gate_up_proj.weight, torch.cat(parts))


def test_dtype_progress_and_frozen_parameters(checkpoint: Path) -> None:
    calls: list[tuple[int, int]] = []
    model = load_target(read_model_facts(checkpoint), (), 16, torch.bfloat16, "cpu", lambda done, total: calls.append((done, total)))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.rotary.table_LD.dtype == torch.float32
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())
    assert calls == [(done, 21) for done in range(1, 22)]


def test_a_head_that_equals_the_embedding_is_tied_and_another_one_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_hf(build_hf("llama", num_hidden_layers=1, tie_word_embeddings=True), tmp_path)
    file = path / "model.safetensors"
    model = load(path)
    assert model.lm_head.weight is model.embed_tokens.weight
    edit_tensors(file, lm_head__weight=model.embed_tokens.weight)
    copied = load(path)
    assert copied.lm_head.weight is copied.embed_tokens.weight
    assert not caplog.records
    other = model.embed_tokens.weight.clone()
    other[-1, -1] += 1
    edit_tensors(file, lm_head__weight=other)
    untied = load(path)
    assert torch.equal(untied.lm_head.weight, other)
    assert torch.equal(untied.embed_tokens.weight, model.embed_tokens.weight)
    assert [record.getMessage() for record in caplog.records] == [
        (
            f"{path}: config.json says tie_word_embeddings = true, but lm_head.weight differs from model.embed_tokens.weight; "
            "the tensors decide: the head is its own"
        )
    ]
    edit_tensors(file, lm_head__weight=other[1:])
    assert refused(path).key == f"{file}: lm_head.weight"


def test_a_tied_matrix_may_be_stored_as_the_head(tmp_path: Path) -> None:
    path = write_hf(build_hf("llama", num_hidden_layers=1, tie_word_embeddings=True), tmp_path)
    model = load(path)
    edit_tensors(path / "model.safetensors", "model.embed_tokens.weight", lm_head__weight=model.embed_tokens.weight)
    found = load(path)
    assert found.lm_head.weight is found.embed_tokens.weight
    assert torch.equal(found.embed_tokens.weight, model.embed_tokens.weight)


@pytest.mark.parametrize("changed", [0, 60])
def test_tensors_are_compared_in_parts_to_the_first_that_differs(changed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphspec.models.checkpoint._COMPARED", 10 * 48)
    own = torch.randn(VOCAB_SIZE, 48, generator=torch.Generator().manual_seed(3))
    other = own.clone()
    other[changed] += 1
    save_file({"own": own, "copy": own.clone(), "other": other, "rounded": own.bfloat16()}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    read: list[int] = []
    part = Checkpoint.part
    monkeypatch.setattr(Checkpoint, "part", lambda self, *place: read.append(place[2]) or part(self, *place))
    assert checkpoint.equals("own", checkpoint, "copy")
    assert read == [begin for begin in range(0, 61, 10) for _ in "ab"]
    read.clear()
    assert not checkpoint.equals("own", checkpoint, "other")
    assert read[-1] == changed // 10 * 10
    assert not checkpoint.equals("own", checkpoint, "rounded")
    assert checkpoint.equals("own", checkpoint, "rounded", rounded=True)
    assert checkpoint.equals("rounded", checkpoint, "own", rounded=True)
    assert not checkpoint.equals("other", checkpoint, "rounded", rounded=True)


def test_stored_rotary_frequencies_are_ignored(checkpoint: Path) -> None:
    edit_tensors(checkpoint / "model.safetensors", model__layers__1__self_attn__rotary_emb__inv_freq=torch.zeros(8))
    load(checkpoint)


def test_missing_tensor(checkpoint: Path) -> None:
    edit_tensors(checkpoint / "model.safetensors", "model.layers.1.self_attn.k_proj.weight")
    error = refused(checkpoint)
    assert error.key == f"{checkpoint}: model.layers.1.self_attn.k_proj.weight"
    assert (error.expected, error.found) == ("a tensor of shape [48, 48]", "no such tensor")


def test_untied_head_must_be_there(tmp_path: Path) -> None:
    path = write_hf(build_hf("llama", num_hidden_layers=1, tie_word_embeddings=True), tmp_path, tie_word_embeddings=False)
    error = refused(path)
    assert error.key == f"{path}: lm_head.weight"
    assert error.expected == "a head of its own, as tie_word_embeddings is not true in config.json"


@pytest.mark.parametrize("name", ["model__layers__0__self_attn__q_proj__bias", "model__layers__2__input_layernorm__weight", "extra"])
def test_unexpected_tensor(name: str, checkpoint: Path) -> None:
    edit_tensors(checkpoint / "model.safetensors", **{name: torch.zeros(48)})
    error = refused(checkpoint)
    assert error.key == f"{checkpoint / 'model.safetensors'}: {name.replace('__', '.')}"
    assert error.expected == "no such tensor"


@pytest.mark.parametrize(("name", "shape"), [("embed_tokens", [61, 48]), ("layers__0__mlp__up_proj", [40, 48]), ("norm", [48])])
def test_wrong_shape(name: str, shape: list[int], checkpoint: Path) -> None:
    edit_tensors(checkpoint / "model.safetensors", **{f"model__{name}__weight": torch.zeros(7, 48)})
    error = refused(checkpoint)
    assert name.replace("__", ".") in error.key
    assert "model.safetensors" in error.key
    assert (error.expected, error.found) == (f"shape {shape}", "shape [7, 48]")


def test_parts_of_a_fused_projection_are_checked_one_by_one(checkpoint: Path) -> None:
    """The sum of the rows would be right."""
    prefix = "model__layers__0__self_attn__"
    edit_tensors(
        checkpoint / "model.safetensors",
        **{f"{prefix}q_proj__weight": torch.zeros(32, 48), f"{prefix}k_proj__weight": torch.zeros(64, 48)},
    )
    assert "q_proj" in refused(checkpoint).key


def test_quantized_dtype(checkpoint: Path) -> None:
    edit_tensors(checkpoint / "model.safetensors", model__norm__weight=torch.zeros(48, dtype=torch.int8))
    error = refused(checkpoint)
    assert "model.norm.weight" in error.key
    assert error.found == "I8"
    assert "quantised" in error.hint
    edit_tensors(checkpoint / "model.safetensors", model__norm__weight=torch.ones(48), model__norm__weight_scale=torch.ones(1))
    assert "quantised" in refused(checkpoint).hint


def test_missing_and_truncated_files(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    data = file.read_bytes()
    for size in (0, 5, 100, len(data) - 1):
        file.write_bytes(data[:size])
        error = refused(checkpoint)
        assert error.key == str(file)
        assert error.expected == "a complete safetensors file"
        assert f"{size} bytes" in str(error.found)
    file.unlink()
    assert refused(checkpoint).found == "none of them"
    assert "pytorch_model.bin.index.json" in str(refused(checkpoint).expected)
    (checkpoint / "tiny-Q4_0.gguf").write_bytes(b"")
    error = refused(checkpoint)
    assert error.found == "tiny-Q4_0.gguf" and error.hint == f"model.path={checkpoint / 'tiny-Q4_0.gguf'}"


def as_pickles(folder: Path, *, shards: int = 1, **options: Any) -> dict[str, torch.Tensor]:
    """Replace the safetensors file of a checkpoint by what ``torch.save`` writes."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin", **options)
        return tensors
    owner = {name: f"pytorch_model-{index % shards}.bin" for index, name in enumerate(tensors)}
    for file in set(owner.values()):
        torch.save({name: tensor for name, tensor in tensors.items() if owner[name] == file}, folder / file, **options)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": owner}))
    return tensors


@pytest.mark.parametrize(
    ("shards", "options"), [(1, {}), (3, {}), (1, {"_use_new_zipfile_serialization": False})], ids=["single", "sharded", "before torch 1.6"]
)
def test_pickles_equal_safetensors(shards: int, options: dict[str, Any], checkpoint: Path) -> None:
    expected = load(checkpoint)
    as_pickles(checkpoint, shards=shards, **options)
    for (name, one), (_, other) in zip(load(checkpoint).named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_broken_pickles(checkpoint: Path) -> None:
    tensors = as_pickles(checkpoint)
    file = checkpoint / "pytorch_model.bin"
    data = file.read_bytes()
    for size in (0, 5, 100, len(data) // 2):
        file.write_bytes(data[:size])
        error = refused(checkpoint)
        assert error.key == str(file)
        assert error.expected == "a complete file of plain tensors, written by torch.save"
        assert f"{size} bytes" in str(error.found)
    torch.save({**tensors, "step": 3}, file)
    assert refused(checkpoint).found == "step of type int"
    torch.save(list(tensors.values()), file)
    assert refused(checkpoint).found == "list"
    torch.save({**tensors, "code": subprocess.CompletedProcess([], 0)}, file)  # weights only: nothing in a file is run
    assert "UnpicklingError" in str(refused(checkpoint).found)
    torch.save({**tensors, "model.norm.weight": torch.zeros(7)}, file)
    assert (refused(checkpoint).key, refused(checkpoint).found) == (f"{file}: model.norm.weight", "shape [7]")


def test_broken_shards(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    name, owner = next(iter(table["weight_map"].items()))
    other = next(file for file in table["weight_map"].values() if file != owner)
    edit_json(index, weight_map={**table["weight_map"], name: other})
    error = refused(sharded)
    assert error.key == f"{sharded / other}: {name}"
    assert error.found == "no such tensor"
    edit_json(index, weight_map={**table["weight_map"], name: "gone.safetensors"})
    assert refused(sharded).key == str(sharded / "gone.safetensors")
    edit_json(index, weight_map=[])
    assert refused(sharded).key == f"{index}: weight_map"
    index.write_text("nonsense")
    assert refused(sharded).expected == "a readable json file"


def test_a_checkpoint_of_other_sizes_than_its_facts(checkpoint: Path) -> None:
    facts = replace(read_model_facts(checkpoint), num_layers=3, sliding_window=(None,) * 3)
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\..*no such tensor"):
        load_target(facts, (), 16, torch.float32, "cpu")


# ---- tokenizers


def write_tokenizer(folder: Path, vocab: Any, added: tuple[tuple[int, str], ...] = ()) -> Path:
    folder.mkdir(exist_ok=True)
    tokens = [{"id": token_id, "content": text, "special": True} for token_id, text in added]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocab}, "added_tokens": tokens}))
    return folder


def test_one_tokenizer_in_two_spellings_agrees(tmp_path: Path) -> None:
    target = write_tokenizer(tmp_path / "target", {"a": 0, "b": 1}, ((2, "<s>"), (3, "</s>")))
    check_tokenizer(write_tokenizer(tmp_path / "same", {"b": 1, "a": 0}, ((3, "</s>"), (2, "<s>"))), target)
    check_tokenizer(write_tokenizer(tmp_path / "merged", {"a": 0, "b": 1, "<s>": 2}, ((2, "<s>"), (3, "</s>"))), target)
    check_tokenizer(write_tokenizer(tmp_path / "unigram", [["a", -1.0], ["b", -2.0]], ((2, "<s>"), (3, "</s>"))), target)
    check_tokenizer(target, target)
    (tmp_path / "none").mkdir()
    check_tokenizer(tmp_path / "none", target)
    check_tokenizer(target, tmp_path / "none")


@pytest.mark.parametrize(
    ("vocab", "added", "token", "expected", "found"),
    [
        ({"a": 0, "c": 1}, ((2, "<s>"),), 1, "'b'", "'c'"),
        ({"a": 0, "b": 1}, ((2, "<t>"),), 2, "'<s>'", "'<t>'"),
        ({"a": 0, "b": 1}, (), 2, "'<s>'", "no such token"),
        ({"a": 0, "b": 1}, ((2, "<s>"), (3, "</s>")), 3, "no such token", "'</s>'"),
        ({"b": 0, "a": 1}, ((2, "<s>"),), 0, "'a'", "'b'"),
    ],
)
def test_the_first_token_that_differs_is_named(
    vocab: Any, added: tuple[tuple[int, str], ...], token: int, expected: str, found: str, tmp_path: Path
) -> None:
    target = write_tokenizer(tmp_path / "target", {"a": 0, "b": 1}, ((2, "<s>"),))
    with pytest.raises(CheckpointError) as caught:
        check_tokenizer(write_tokenizer(tmp_path / "draft", vocab, added), target)
    assert caught.value.key == f"{tmp_path / 'draft' / 'tokenizer.json'}: token {token}"
    assert str(caught.value.expected).startswith(expected)
    assert caught.value.found == found


def test_damaged_tokenizers(tmp_path: Path) -> None:
    target = write_tokenizer(tmp_path / "target", {"a": 0})
    for vocab in ("abc", None, [1, 2]):
        with pytest.raises(CheckpointError, match=r"model\.vocab"):
            check_tokenizer(write_tokenizer(tmp_path / "draft", vocab), target)
    (tmp_path / "draft" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}, "added_tokens": [3]}))
    with pytest.raises(CheckpointError, match="added_tokens"):
        check_tokenizer(tmp_path / "draft", target)

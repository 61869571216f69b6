"""``graphspec convert``: every head in every layout that can express it, and back, bit for bit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from graphspec.cli.main import main
from graphspec.drafters.convert import convert
from graphspec.drafters.eagle.facts import read_eagle_facts
from graphspec.drafters.eagle.loading import load_eagle
from graphspec.drafters.eagle3.facts import read_eagle3_facts
from graphspec.drafters.eagle3.loading import load_eagle3
from graphspec.errors import CheckpointError, ConfigError
from graphspec.facts import read_model_facts
from graphspec.models.target import load_target
from tests.support.checkpoints import (
    VOCAB_SIZE,
    DenseAttention,
    build_hf,
    eagle3_tensors,
    eagle_tensors,
    edit_json,
    edit_tensors,
    publish_eagle,
    publish_eagle3,
    write_hf,
)

if TYPE_CHECKING:
    from pathlib import Path

EAGLE3 = ("safeailab", "sglang", "speculators", "modelopt")
EAGLE = ("safeailab", "hass", "speculators-old")
NORMS_31 = {"fc_norm": True, "norm_output": True}
BIASES = {"layer": {"attention_bias": True, "mlp_bias": True}}
ALONE = {"taps": None, "eagle_config": {"use_aux_hidden_state": False}}

# name: layout of the source, arguments of eagle3_tensors, arguments of publish_eagle3, layouts that can express it
HEADS: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "default taps": ("safeailab", {}, {"taps": None}, EAGLE3),
    "named taps": ("sglang", {}, {}, ("sglang", "speculators", "modelopt")),
    "deep": ("modelopt", {"num_layers": 3}, {}, ("sglang", "speculators", "modelopt")),
    "3.1": ("sglang", {"extras": ("fc_norm",)}, NORMS_31, ("sglang", "speculators")),
    "norm before fc": ("speculators", {"extras": ("input_norm",)}, {"norm_before_fc": True}, ("sglang", "speculators")),
    "norm before residual": ("speculators", {}, {"norm_before_residual": True}, ("speculators",)),
    "biases": ("modelopt", {"extras": ("biases",)}, BIASES, ("speculators", "modelopt")),
    "query and key norms": ("speculators", {"extras": ("qk_norm",)}, {"layer": {"model_type": "qwen3"}}, ("speculators",)),
    "fc bias": ("sglang", {"extras": ("fc_bias",)}, {"bias": True}, ("sglang",)),
    "own embedding": ("speculators", {"extras": ("embedding",)}, {"taps": None}, ("safeailab", "sglang", "speculators")),
    "own width": (
        "safeailab",
        {"hidden_size": 32, "extras": ("embedding",)},
        {"taps": None, "target_hidden_size": 48},
        ("safeailab", "sglang", "speculators"),
    ),
    "the last layer": ("speculators", {}, {"taps": (2, 4, 9)}, ("sglang", "speculators", "modelopt")),
    "the final hidden state": ("modelopt", {"num_taps": 1}, ALONE, ("sglang", "modelopt")),
    "partial rotary": ("speculators", {}, {"layer": {"partial_rotary_factor": 0.5}}, ("sglang", "speculators", "modelopt")),
    "no context": ("sglang", {}, {"layer": {"max_position_embeddings": None}}, ("sglang", "speculators", "modelopt")),
    "five taps": ("sglang", {"num_taps": 5}, {"taps": (0, 2, 4, 6, 8)}, ("sglang", "speculators", "modelopt")),
}


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_hf(build_hf("llama", num_hidden_layers=9), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_path: Any) -> Any:
    return load_target(read_model_facts(target_path), (2, 4, 6), 64, torch.float32, "cpu")


def canonical(path: Path, *dropped: str) -> dict[str, torch.Tensor]:
    """Tensors of a folder under names of no layout's own, spelled out here once more."""
    names = {
        "midlayer.": "layers.0.", "fusion_fc.": "fc.", "transformer.input_layernorm.": "hidden_layernorm.", "transformer.": "layers.0.",
        "embedding_layernorm.": "embed_layernorm.", "pre_lm_head_layernorm.": "lm_head_layernorm.",
    }  # fmt: skip
    found = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        prefix = next((prefix for prefix in names if name.startswith(prefix)), "")
        name = names.get(prefix, "") + name.removeprefix(prefix)
        if not name.startswith("layers.0."):
            name = name.replace(".hidden_norm.", ".input_layernorm.") if name.startswith("layers.") else name
        found[name] = tensor
    return {name: tensor for name, tensor in found.items() if name not in dropped}


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


@torch.inference_mode()
def outputs(path: Path, target: Any, third: bool) -> tuple[torch.Tensor, ...]:
    """What the loaded head computes."""
    facts = (read_eagle3_facts if third else read_eagle_facts)(path, target.facts)
    draft = (load_eagle3 if third else load_eagle)(facts, target, 64, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(3)
    fused = draft.fuse(torch.randn(1, 4, facts.feature_size, generator=generator))
    hidden = draft(torch.tensor([[3, 7, 60, 2]]), fused, DenseAttention.prompt(1, 4))
    ids = draft.target_token_Vd
    return fused, hidden, draft.logits(hidden), torch.tensor(facts.tap_layers), torch.empty(0) if ids is None else ids


def assert_same_outputs(left: Path, right: Path, target: Any, third: bool) -> None:
    for mine, theirs in zip(outputs(left, target, third), outputs(right, target, third), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", HEADS)
def test_eagle3_heads_between_all_layouts(name: str, tmp_path: Path, target: Any) -> None:
    layout, sizes, spelling, able = HEADS[name]
    source = publish_eagle3(tmp_path / "source", eagle3_tensors(**sizes), layout, **spelling)
    for first in EAGLE3:
        if first not in able:
            with pytest.raises(CheckpointError, match=rf"layout {first} can express|only ones that this layout can express"):
                convert(source, tmp_path / first, first)
            assert not (tmp_path / first).exists()
            continue
        convert(source, tmp_path / first, first)
        assert_same_bits(canonical(source, "t2d"), canonical(tmp_path / first, "t2d"))
        assert_same_outputs(source, tmp_path / first, target, third=True)
    for first in able:
        for second in able:
            there = tmp_path / f"{first} {second}"
            convert(tmp_path / first, there, second)
            # the long way round ends where the short one does, to the byte
            assert_same_bits(load_file(there / "model.safetensors"), load_file(tmp_path / second / "model.safetensors"))
            ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (there, tmp_path / second))
            assert ours == theirs, (first, second)


def test_names_and_keys_are_the_published_ones(tmp_path: Path, target_path: Any) -> None:
    source = publish_eagle3(tmp_path / "source", eagle3_tensors(), "sglang", taps=(2, 4, 6), layer={"rope_theta": 777.0})
    for layout in EAGLE3:
        convert(source, tmp_path / layout, layout, target_path)
    names = {layout: set(load_file(tmp_path / layout / "model.safetensors")) for layout in EAGLE3}
    config = {layout: json.loads((tmp_path / layout / "config.json").read_text()) for layout in EAGLE3}
    assert "midlayer.hidden_norm.weight" in names["safeailab"] & names["sglang"]
    assert "layers.0.hidden_norm.weight" in names["speculators"] & names["modelopt"]
    assert [{"d2t", "t2d"} & names[layout] for layout in EAGLE3] == [{"d2t", "t2d"}] * 3 + [{"d2t"}]
    assert config["safeailab"]["architectures"] == ["LlamaForCausalLM"]
    assert "eagle_config" not in config["safeailab"]
    for layout in ("sglang", "modelopt"):
        assert config[layout]["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config[layout]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]  # by the layer whose output is tapped
        assert config[layout]["rope_theta"] == 777.0
    assert config["modelopt"]["eagle_config"]["use_last_layernorm"] is True
    speculators = config["speculators"]
    assert speculators["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]  # by the layer entered
    assert (speculators["speculators_model_type"], speculators["norm_before_residual"]) == ("eagle3", False)
    assert (speculators["transformer_layer_config"]["rope_theta"], speculators["draft_vocab_size"]) == (777.0, 23)
    assert speculators["speculators_config"]["verifier"] == {"name_or_path": str(target_path), "architectures": ["LlamaForCausalLM"]}


def test_a_map_is_rebuilt_from_its_offsets(tmp_path: Path) -> None:
    tensors = eagle3_tensors()
    source = publish_eagle3(tmp_path / "source", tensors, "modelopt", taps=None)
    assert "t2d" not in load_file(source / "model.safetensors")
    convert(source, tmp_path / "out", "safeailab")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["t2d"], tensors["t2d"])
    assert torch.equal(found["d2t"], tensors["d2t"])


def test_named_taps_go_to_safeailab_when_they_are_the_default(tmp_path: Path, target_path: Any, target: Any) -> None:
    same = publish_eagle3(tmp_path / "same", eagle3_tensors(), "speculators", taps=(2, 4, 6))
    other = publish_eagle3(tmp_path / "other", eagle3_tensors(), "speculators", taps=(1, 3, 5))
    convert(same, tmp_path / "out", "safeailab", target_path)
    assert_same_outputs(same, tmp_path / "out", target, third=True)
    for path, hint in ((same, None), (other, target_path)):
        with pytest.raises(CheckpointError, match="the default layers, the only ones that this layout can express"):
            convert(path, tmp_path / "no", "safeailab", hint)


def test_shared_heads(tmp_path: Path, target: Any) -> None:
    tensors = eagle3_tensors(draft_vocab_size=VOCAB_SIZE)
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    source = publish_eagle3(tmp_path / "source", tensors, "sglang")
    for layout in ("sglang", "speculators", "modelopt"):
        convert(source, tmp_path / layout, layout)
        assert_same_outputs(source, tmp_path / layout, target, third=True)
    with pytest.raises(CheckpointError, match=r"one with no lm_head|only ones"):
        convert(publish_eagle3(tmp_path / "default", tensors, "sglang", taps=None), tmp_path / "no", "safeailab")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_and_odd_bits_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in eagle3_tensors().items()}
    tensors["norm.weight"][3] = float("nan")
    source = publish_eagle3(tmp_path / "source", tensors, "sglang", layer={"torch_dtype": str(dtype).removeprefix("torch.")})
    convert(source, tmp_path / "out", "speculators")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["norm.weight"].dtype == dtype
    assert torch.equal(found["norm.weight"].view(torch.int16), tensors["norm.weight"].view(torch.int16))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["transformer_layer_config"]["torch_dtype"] == str(dtype).removeprefix("torch.")


# ---- EAGLE-1/2

FIRST: dict[str, tuple[str, tuple[str, ...], dict[str, Any], tuple[str, ...]]] = {
    "plain": ("safeailab", ("fc_bias",), {}, EAGLE),
    "with a copied embedding": ("safeailab", ("embedding",), {}, EAGLE),
    "hass": ("hass", ("fc_bias", "norms"), {}, ("hass", "speculators-old")),
    "qwen2": ("safeailab", ("qkv_biases",), {"architectures": ["Qwen2ForCausalLMEagle"]}, ("safeailab", "hass")),
    "biases": ("speculators-old", ("biases",), BIASES, ("speculators-old",)),
}


@pytest.mark.parametrize("name", FIRST)
def test_eagle_heads_between_all_layouts(name: str, tmp_path: Path, target: Any) -> None:
    layout, extras, spelling, able = FIRST[name]
    tensors = eagle_tensors(extras=extras)
    if "embedding" in extras:
        tensors["embed_tokens.weight"] = target.embed_tokens.weight
    source, folder = publish_eagle(tmp_path / "source", tensors, layout, **spelling), target.facts.path
    for first in EAGLE:
        if first not in able:
            with pytest.raises(CheckpointError, match=f"layout {first} can express"):
                convert(source, tmp_path / first, first, folder)
            continue
        convert(source, tmp_path / first, first, folder)
        dropped = ("embed_tokens.weight",) if first == "speculators-old" else ()
        assert_same_bits(canonical(source, *dropped), canonical(tmp_path / first))
        assert_same_outputs(source, tmp_path / first, target, third=False)
    for first in able:
        for second in able:
            there = tmp_path / f"{first} {second}"
            convert(tmp_path / first, there, second, folder)
            assert_same_bits(canonical(there, "embed_tokens.weight"), canonical(tmp_path / second, "embed_tokens.weight"))
            assert_same_outputs(source, there, target, third=False)


def test_an_embedding_of_its_own_has_no_place_in_speculators(tmp_path: Path, target: Any) -> None:
    """Nor has one that can't be compared to the target's."""
    source = publish_eagle(tmp_path / "source", eagle_tensors(extras=("embedding",)), "safeailab")
    for folder in (None, target.facts.path):
        with pytest.raises(CheckpointError, match="can express, found one with an embedding that is not known to be the target's"):
            convert(source, tmp_path / "no", "speculators-old", folder)
        convert(source, tmp_path / f"kept {folder is None}", "hass", folder)
        assert_same_outputs(source, tmp_path / f"kept {folder is None}", target, third=False)


def test_some_norms_alone_have_no_place_in_speculators(tmp_path: Path) -> None:
    source = publish_eagle(tmp_path / "source", eagle_tensors(extras=("norms",)), "hass")
    edit_tensors(source / "model.safetensors", "embed_layernorm.weight")
    convert(source, tmp_path / "hass", "hass")
    with pytest.raises(CheckpointError, match="layout speculators-old can express, found one with layer norms"):
        convert(source, tmp_path / "no", "speculators-old")


def test_names_of_speculators_before_it_dropped_eagle(tmp_path: Path) -> None:
    source = publish_eagle(tmp_path / "source", eagle_tensors(extras=("norms", "fc_bias")), "hass")
    convert(source, tmp_path / "out", "speculators-old")
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert {"fusion_fc.bias", "transformer.input_layernorm.weight", "embedding_layernorm.weight", "pre_lm_head_layernorm.weight"} < names
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["speculators_model_type"], config["layernorms"], config["fusion_bias"]) == ("eagle", True, True)


# ---- refusals and the command line


def test_what_is_no_eagle_head_is_named(tmp_path: Path) -> None:
    whole = write_hf(build_hf("llama", num_hidden_layers=1), tmp_path / "whole")
    with pytest.raises(
        CheckpointError,
        match="a P-EAGLE head or a block drafter, found this looks like a whole language model",
    ):
        convert(whole, tmp_path / "out", "safeailab")
    source = publish_eagle3(tmp_path / "source", eagle3_tensors(), "sglang")
    edit_json(source / "config.json", parallel_drafting=True)
    with pytest.raises(CheckpointError, match="parallel_drafting"):
        convert(source, tmp_path / "out", "speculators")
    bad = publish_eagle3(tmp_path / "bad", {**eagle3_tensors(), "d2t": torch.zeros(23, dtype=torch.int64)}, "sglang")
    with pytest.raises(CheckpointError, match="d2t"):
        convert(bad, tmp_path / "out", "speculators")
    assert not (tmp_path / "out").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "source", "bad"}  # nothing half written


def test_layouts_and_destinations_are_checked(tmp_path: Path) -> None:
    third = publish_eagle3(tmp_path / "third", eagle3_tensors(), "sglang")
    first = publish_eagle(tmp_path / "first", eagle_tensors(), "safeailab")
    for path, layout, expected in (
        (third, "hass", "one of safeailab, sglang"),
        (first, "modelopt", "one of safeailab, hass, speculators-old"),
    ):
        with pytest.raises(ConfigError, match=f"layout: expected {expected}"):
            convert(path, tmp_path / "out", layout)
    for occupied in (first, first / "config.json"):
        with pytest.raises(ConfigError, match="DST: expected a folder that doesn't exist yet"):
            convert(third, occupied, "speculators")
    (tmp_path / "empty").mkdir()
    convert(third, tmp_path / "empty", "speculators")
    assert {file.name for file in (tmp_path / "empty").iterdir()} == {"config.json", "model.safetensors"}


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["convert", *words])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_command(tmp_path: Path, target_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    source = publish_eagle3(tmp_path / "source", eagle3_tensors(), "speculators", taps=(2, 4, 6))
    assert command(str(source), str(tmp_path / "a=b" / "out"), "layout=safeailab", f"target={target_path}") == 0
    file = tmp_path / "a=b" / "out" / "model.safetensors"
    count = len(load_file(file))
    output = capsys.readouterr().out
    assert output.startswith(f"{file.parent}: EAGLE-3 head in the layout safeailab; ") and f" {count} tensors, " in output
    assert command("--help") == 0
    assert "SRC DST layout=NAME" in capsys.readouterr().out
    for words in ((), (str(source), "layout=sglang"), (str(source), str(tmp_path / "x"))):
        assert command(*words) == 2
        assert "SRC DST layout=NAME" in capsys.readouterr().err

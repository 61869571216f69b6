"""``graphspec convert format=...``: codes are those of compressed-tensors and GGUF, transformers loads them, and drafts stay exact."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

from graphspec import LLM, SamplingParams
from graphspec.cli.main import main
from graphspec.drafters.convert import convert
from graphspec.errors import CheckpointError, ConfigError
from graphspec.kernels.linear.packed import dequantise
from graphspec.models import write
from graphspec.models.checkpoint import Checkpoint
from graphspec.models.quantise import from_words, quantise
from graphspec.weights.rounding import ROUNDED, round_to
from tests.support.checkpoints import build_hf, eagle3_tensors, edit_json, publish_eagle3, write_hf
from tests.support.engines import assert_tokens_of
from tests.support.hybrid_checkpoints import build_hybrid
from tests.support.moe_checkpoints import write_mixture

DEMO = Path(str(files("graphspec"))) / "demo"
PROMPTS = [[5, 9, 3, 22, 5, 9, 3], [40, 2, 17, 33, 8, 40, 2, 17]]
LAYERS = 2


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}
    model = build_hf("llama", head_dim=16, max_position_embeddings=128, **sizes)
    return write_hf(model, tmp_path_factory.mktemp("source") / "model")


@pytest.mark.parametrize("code", ["int4", "int8", "fp8"])
def test_codes_and_scales_are_those_of_compressed_tensors(code: str, source: Path, tmp_path: Path) -> None:
    result = quantise(source, tmp_path / "out", code)
    assert (result.layers, result.group) == (7 * LAYERS, 0 if code == "fp8" else 32)
    written, numbers = load_file(tmp_path / "out" / "model.safetensors"), load_file(source / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(config)
    assert parsed.quantization_status == QuantizationStatus.COMPRESSED and parsed.ignore == ["lm_head"]
    scheme = parsed.config_groups["group_0"]
    for name, weight in numbers.items():
        if not name.endswith("_proj.weight"):
            assert torch.equal(written[name], weight)
            continue
        groups = weight.unflatten(1, (-1, result.group or weight.shape[1]))
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        expected = BaseCompressor.get_value_from_registry(config["format"]).compress(state, scheme)
        expected.pop("weight_zero_point", None)
        prefix = name.removesuffix("weight")
        found = {key.removeprefix(prefix): value for key, value in written.items() if key.startswith(prefix)}
        assert found.keys() == expected.keys()
        for part, value in expected.items():
            assert torch.equal(found[part].view(torch.uint8), value.view(torch.uint8)), (name, part)


def test_numbers_of_q8_0_are_those_of_gguf(source: Path, tmp_path: Path) -> None:
    quantise(source, tmp_path / "out", "q8_0")
    checkpoint = Checkpoint(tmp_path / "out")
    for name, weight in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            blocks = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
            expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
            assert np.array_equal(checkpoint.raw(name).numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_groups_of_nothing_and_ties_are_rounded(dtype: torch.dtype, source: Path, tmp_path: Path) -> None:
    """Zeros have a scale too, and no code is beyond its range."""
    folder, weight = tmp_path / "source", torch.zeros(64, 64, dtype=dtype)
    weight[1] = torch.linspace(-1, 1, 64)
    weight[2, :2] = torch.tensor([1e-30, -3e38])
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.o_proj.weight": weight}, folder / "model.safetensors", metadata={"format": "pt"})
    for code in ("int4", "int8", "fp8"):
        quantise(folder, tmp_path / code, code)
        found = Checkpoint(tmp_path / code).raw("model.layers.0.self_attn.o_proj.weight")
        step = weight.float().abs().amax(1, keepdim=True) / {"int4": 7, "int8": 127, "fp8": 16}[code]
        assert found.isfinite().all() and ((found - weight.float()).abs() <= step / 1.9).all()
    weight[3, 5] = torch.inf
    save_file(tensors | {"model.layers.0.self_attn.o_proj.weight": weight}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"o_proj\.weight: expected finite numbers"):
        quantise(folder, tmp_path / "out", "int8")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("code", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_of_least_squares_lose_less_in_every_group(code: str, dtype: torch.dtype) -> None:
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[0], weight[1, 5] = 0, 40.0
    row, group = ROUNDED[code], 128 if code == "fp8" else 32

    def errors(observer: str) -> torch.Tensor:
        packed = round_to(weight, row, group, observer)
        assert packed.scales.dtype == (torch.float32 if code == "fp8" else dtype)
        return (dequantise(packed, torch.float32) - weight.float()).unflatten(1, (-1, group)).square().sum(-1)

    usual, best = errors("minmax"), errors("mse")
    assert bool((best <= usual).all()) and float(best[0].max()) == 0
    # An outlier is cut off only where that pays: here it would lose most of its square.
    assert float(best[1, 0]) <= float(usual[1, 0]) < 40.0**2 / 10
    if code == "int4":
        assert float(best.sum()) < 0.95 * float(usual.sum())


def test_what_was_rounded_once_is_found_again() -> None:
    """A head that is trained further starts from the numbers of its codes."""
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    once = dequantise(round_to(weight, ROUNDED["int4"], 32), torch.float32)
    found = {name: dequantise(round_to(once, ROUNDED["int4"], 32, name), torch.float32) for name in ("minmax", "mse")}
    # The usual scale makes 7.5 steps of the largest number, which was 7 or 8 of them.
    assert torch.allclose(found["mse"], once, rtol=1e-6) and not torch.allclose(found["minmax"], once, rtol=1e-2)


def test_an_observer_is_named_and_known(source: Path, tmp_path: Path) -> None:
    usual, best = quantise(source, tmp_path / "usual", "int4"), quantise(source, tmp_path / "best", "int4", observer="mse")
    assert best.error < usual.error and best.after == usual.after
    words = [f"model={source}", f"out={tmp_path / 'words'}", "format=int4", "observer=mse"]
    from_words(words)
    same = (tmp_path / name / "model.safetensors" for name in ("words", "best"))
    assert len({file.read_bytes() for file in same}) == 1
    with pytest.raises(ConfigError, match=r"observer: expected minmax or mse with format=int4, found 'entropy'"):
        quantise(source, tmp_path / "none", "int4", observer="entropy")
    with pytest.raises(ConfigError, match=r"observer: expected minmax with format=q8_0"):
        quantise(source, tmp_path / "none", "q8_0", observer="mse")


@pytest.mark.parametrize("code", ROUNDED)
def test_transformers_loads_it_and_engines_emit_its_tokens(code: str, source: Path, tmp_path: Path) -> None:
    quantise(source, tmp_path / "out", code, ["layers", "lm_head"] if code == "int8" else ["layers"])
    edit_json(tmp_path / "out" / "config.json", dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    shapes = ({"variant": "none"}, {"variant": "ngram", "num_steps": 3, "topk": 1, "num_draft_tokens": 4})
    assert_tokens_of(model, tmp_path / "out", PROMPTS, 16, *shapes)


def test_large_checkpoints_are_written_in_shards(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantise(source, tmp_path / "whole", "int8")
    monkeypatch.setattr(write, "SHARD", 20_000)
    assert quantise(source, tmp_path / "parts", "int8").after == whole.after
    assert len(list((tmp_path / "parts").glob("model-*-of-*.safetensors"))) > 2
    one, other = Checkpoint(tmp_path / "whole"), Checkpoint(tmp_path / "parts")
    assert all(torch.equal(one.raw(name), other.raw(name)) for name in one.names())


def test_recurrent_layers_keep_gates_and_steps(tmp_path: Path) -> None:
    quantise(write_hf(build_hybrid("qwen3_5"), tmp_path / "source"), tmp_path / "out", "int8", group=8)
    names = {name.split(".")[-2] for name in load_file(tmp_path / "out" / "model.safetensors") if name.endswith("weight_packed")}
    assert {"in_proj_qkv", "in_proj_z", "out_proj"} <= names and not names & {"in_proj_a", "in_proj_b"}
    assert load_and_generate(tmp_path / "out", variant="ngram") == load_and_generate(tmp_path / "out", variant="none")


def test_experts_keep_their_numbers(tmp_path: Path) -> None:
    """The shared ones are ordinary layers."""
    source, _ = write_mixture(tmp_path / "source", "deepseek_v3")
    quantise(source, tmp_path / "out", "int8", ["gate_proj", "up_proj"], group=8)
    checkpoint = Checkpoint(tmp_path / "out")
    packed = [name for name in checkpoint.names() if checkpoint.is_packed(name)]
    assert any("shared_experts" in name for name in packed) and not any(".experts." in name or ".gate." in name for name in packed)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert any(".mlp.experts.0." in name for name in ignored)
    assert load_and_generate(tmp_path / "out", variant="ngram") == load_and_generate(tmp_path / "out", variant="none")


@pytest.mark.parametrize("code", ["int4", "fp8"])
def test_experts_that_are_stored_one_by_one(code: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32}
    source, _ = write_mixture(tmp_path / "source", "qwen3_moe", **sizes)
    result = quantise(source, tmp_path / "out", code, ["layers", "experts"])
    names = load_file(source / "model.safetensors")
    experts = [name for name in names if ".experts." in name]
    assert experts and result.layers == len(experts) + sum("self_attn" in name and "_proj" in name for name in names)
    checkpoint = Checkpoint(tmp_path / "out")
    assert all(map(checkpoint.is_packed, experts)) and not any(
        checkpoint.is_packed(name) for name in checkpoint.names() if ".gate." in name
    )
    assert load_and_generate(tmp_path / "out", variant="ngram") == load_and_generate(tmp_path / "out", variant="none")


def test_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    source, _ = write_mixture(tmp_path / "source", "gpt_oss")
    with pytest.raises(ConfigError, match="experts where they are stored one by one"):
        quantise(source, tmp_path / "out", "int8", ["experts"])


def load_and_generate(model: str | Path, prompts: Any = PROMPTS, **options: Any) -> list[tuple[int, ...]]:
    llm = LLM(str(model), runtime="eager", max_context=64, page_size=8, max_rows=2, buckets=[2], **options)
    return [output.token_ids for output in llm.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True))]


@pytest.mark.parametrize("variant", ["eagle3", "eagle", "p_eagle", "dflash", "mtp", "standalone"])
def test_a_packed_draft_is_smaller_and_changes_no_token(variant: str, tmp_path: Path) -> None:
    """All of its linear layers, the language-model head among them where it has one."""
    names = {name.split(".")[-2] for name in Checkpoint(DEMO / variant).names() if name.endswith(".weight")}
    modules = ["layers", *(name for name in ("fc", "lm_head") if name in names)]
    quantise(DEMO / variant, tmp_path / "out", "int8", modules)
    size = {folder: (folder / "model.safetensors").stat().st_size for folder in (DEMO / variant, tmp_path / "out")}
    assert size[tmp_path / "out"] < 0.9 * size[DEMO / variant]
    plain = load_and_generate("demo", variant="none")
    assert load_and_generate("demo", variant=variant, draft=str(tmp_path / "out")) == plain


def test_the_head_of_a_draft_alone(tmp_path: Path) -> None:
    quantise(DEMO / "eagle3", tmp_path / "out", "fp8", ["lm_head"])
    checkpoint = Checkpoint(tmp_path / "out")
    assert [name for name in checkpoint.names() if checkpoint.is_packed(name)] == ["lm_head.weight"]
    assert load_and_generate("demo", variant="eagle3", draft=str(tmp_path / "out")) == load_and_generate("demo", variant="none")


def test_a_packed_head_in_another_layout_keeps_its_codes(tmp_path: Path) -> None:
    """A sidecar of the quantisation becomes part of the config, and lists of layers follow their names."""
    source = publish_eagle3(tmp_path / "source", eagle3_tensors(hidden_size=64), "sglang", taps=None)
    quantise(source, tmp_path / "packed", "int8", ["layers", "lm_head"], group=8)
    packed, sidecar = load_file(tmp_path / "packed" / "model.safetensors"), tmp_path / "packed" / "hf_quant_config.json"
    convert(tmp_path / "packed", tmp_path / "speculators", "speculators")
    convert(tmp_path / "speculators", tmp_path / "back", "sglang")
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert written.keys() == packed.keys() and all(torch.equal(written[name], packed[name]) for name in packed)
    ignored = {}
    for folder in ("packed", "back"):
        ignored[folder] = json.loads((tmp_path / folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored["packed"] == ignored["back"] == ["fc"]
    config = json.loads((tmp_path / "packed" / "config.json").read_text()).pop("quantization_config") | {"ignore": ["midlayer.mlp.gate"]}
    edit_json(tmp_path / "packed" / "config.json", "quantization_config")
    sidecar.write_text(json.dumps({"quantization": config}))
    convert(tmp_path / "packed", tmp_path / "other", "speculators")
    found = json.loads((tmp_path / "other" / "config.json").read_text())
    assert found["quantization_config"]["ignore"] == ["layers.0.mlp.gate"]
    assert "quantization_config" not in found["transformer_layer_config"]
    assert Checkpoint(tmp_path / "other").is_packed("layers.0.mlp.up_proj.weight")


def test_what_cannot_be_written(source: Path, tmp_path: Path) -> None:
    quantise(source, tmp_path / "out", "int8")
    for folder, code, options, message in (
        (source, "int3", {}, "format: expected one of int4, int8, fp8, q8_0"),
        (
            source,
            "int4",
            {"modules": ["nope"]},
            "modules: expected layers, experts where they are stored one by one, or names of linear layers: down_proj, .*lm_head",
        ),
        (source, "int4", {"modules": ["embed_tokens"]}, "modules: expected layers"),
        (source, "int4", {"group": 64}, r"group: expected a divisor of the 96 channels of .*down_proj\.weight, found 64"),
        (source, "int4", {"group": 4}, "group: expected a multiple of 8"),
        (source, "q8_0", {"group": 64}, "group: expected 32"),
        (source, "int4", {"out": tmp_path / "out"}, "out: expected a folder that doesn't exist yet"),
    ):
        arguments: dict[str, Any] = {"out": tmp_path / "no"} | options
        with pytest.raises(ConfigError, match=message):
            quantise(folder, code=code, **arguments)
    with pytest.raises(CheckpointError, match="expected weights in full precision"):
        quantise(tmp_path / "out", tmp_path / "no", "int4")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*words: str) -> int:
        with pytest.raises(SystemExit) as caught:
            main(["convert", *words])
        return int(caught.value.code or 0)

    assert command(f"model={source}", f"out={tmp_path / 'out'}", "format=int4", "modules=layers,lm_head") == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{tmp_path / 'out'}: 15 linear layers in int4, groups of 32 channels; ")
    assert command(f"model={source}", "format=int4") == 2 and command(f"model={source}", "out=x", "format=int4", "group=a") == 2
    assert "format=NAME [modules=NAME,NAME]" in capsys.readouterr().err

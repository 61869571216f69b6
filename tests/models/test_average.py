"""``graphspec convert`` to plain numbers: those that codes stand for, or the mean of several models, which engines load as its parts."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from graphspec import LLM, SamplingParams
from graphspec.cli.main import main
from graphspec.errors import CheckpointError, ConfigError
from graphspec.kernels.linear.packed import dequantise
from graphspec.models.average import NUMBERS, average
from graphspec.models.checkpoint import Checkpoint
from graphspec.models.quantise import from_words, quantise
from tests.support.checkpoints import build_hf, edit_json, write_hf
from tests.support.engines import assert_tokens_of
from tests.support.gguf_files import write_gguf
from tests.support.moe_checkpoints import write_mixture
from tests.support.quantised_checkpoints import quantise_gpt_oss

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models of one architecture; the last is in 4 bits."""
    folder, made = tmp_path_factory.mktemp("sources"), []
    for seed in range(3):
        model = build_hf("llama", head_dim=16, max_position_embeddings=128, seed=seed, **SIZES)
        made.append(write_hf(model, folder / str(seed)))
    return [*made[:2], quantise(made[2], folder / "packed", "int4", ["layers", "lm_head"]).folder]


def changed(source: Path, out: Path, edit: dict[str, torch.Tensor], **config: object) -> Path:
    """A copy with some tensors, and some keys of its config, exchanged."""
    out.mkdir()
    save_file(load_file(source / "model.safetensors") | edit, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_bytes((source / "config.json").read_bytes())
    edit_json(out / "config.json", **config)
    return out


@pytest.mark.parametrize("numbers", list(NUMBERS))
def test_codes_become_the_numbers_that_they_stand_for(numbers: str, sources: list[Path], tmp_path: Path) -> None:
    packed = sources[2]
    result = average([packed], tmp_path / "out", numbers)
    assert (result.models, result.codes, result.distance) == (1, 8, 0.0)
    before, after = Checkpoint(packed), load_file(tmp_path / "out" / "model.safetensors")
    assert set(after) == set(before.names()) == set(Checkpoint(sources[0]).names())
    for name, tensor in after.items():
        expected = dequantise(before.codes(name), torch.float32).to(NUMBERS[numbers]) if before.is_packed(name) else before.tensor(name)
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), name
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    if numbers == "float32":
        # Nothing was rounded, so these are the tokens of the codes, and transformers has them from plain numbers.
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
        assert_tokens_of(model, packed, [[5, 9, 3, 22, 5, 9, 3], [40, 2, 17, 33, 8, 40, 2, 17]], 16, {"variant": "none"})


def test_a_packed_head_becomes_numbers_in_its_own_layout(tmp_path: Path) -> None:
    head = files("graphspec") / "heads" / "smollm2" / "eagle3"
    from_words([f"model={head}", f"out={tmp_path / 'out'}", "format=float32"])
    before, after = Checkpoint(Path(str(head))), Checkpoint(tmp_path / "out")
    assert before.names() and set(before.names()) == set(after.names()) and not any(map(after.is_packed, after.names()))
    assert all(torch.equal(before.raw(name), after.raw(name)) for name in before.names())


def test_one_without_codes_is_refused(sources: list[Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected weights in low precision, found full precision"):
        average(sources[:1], tmp_path / "out", "bfloat16")
    words = [f"model={sources[0]}", f"out={tmp_path / 'out'}"]
    with pytest.raises(ConfigError, match=r"format: expected one of int4, int8, fp8, q8_0, bfloat16, float16, float32, found 'bf16'"):
        from_words([*words, "format=bf16"])
    with pytest.raises(ConfigError, match="format: expected one of bfloat16, float16, float32, found 'int4'"):
        average(sources, tmp_path / "out", "int4")
    assert not (tmp_path / "out").exists()


def test_experts_of_low_precision_in_one_tensor_are_refused(tmp_path: Path) -> None:
    source, _ = write_mixture(tmp_path / "source", "gpt_oss", hidden_size=64, intermediate_size=32)
    packed, _ = quantise_gpt_oss(source, tmp_path)
    for models in ([packed], [packed, packed]):
        with pytest.raises(
            CheckpointError, match=r"experts\.\w+_proj.*: expected codes of one linear layer each, found those of all experts"
        ):
            average(models, tmp_path / "out", "bfloat16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("numbers", list(NUMBERS))
def test_every_number_is_the_mean_in_float32(numbers: str, sources: list[Path], tmp_path: Path) -> None:
    result = average(sources, tmp_path / "out", numbers)
    parts, written = [Checkpoint(source) for source in sources], load_file(tmp_path / "out" / "model.safetensors")
    assert parts[2].is_packed("model.layers.0.mlp.up_proj.weight") and set(written) == set(parts[0].names())
    distance = total = 0.0
    for name, tensor in written.items():
        values = [part.raw(name).double() for part in parts]
        exact = sum(values) / 3
        # Two sums and a quotient in float32, and once rounded to the format.
        bound = 2**-23 * sum(value.abs() for value in values) + torch.finfo(NUMBERS[numbers]).eps * exact.abs()
        assert tensor.dtype == NUMBERS[numbers] and bool(((tensor.double() - exact).abs() <= bound).all())
        distance += sum(float((value - exact).square().sum()) for value in values) / 3
        total += float(exact.square().sum())
    assert result.distance == pytest.approx((distance / total) ** 0.5, rel=1e-4) and result.models == 3
    config = (tmp_path / "out" / "config.json").read_text()
    assert "quantization_config" not in config
    prompt = [[5, 9, 3, 22, 5, 9, 3]]
    with LLM(tmp_path / "out", variant="none", max_context=32) as llm:
        assert len(llm.generate(prompt, SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


def test_the_mean_of_one_twice_is_itself_in_the_format_asked_for(sources: list[Path], tmp_path: Path) -> None:
    """What a run froze in float32 is a number like others."""
    result = average([sources[0], sources[0]], tmp_path / "out", "bfloat16")
    before, after = load_file(sources[0] / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert result.distance == 0.0 and {tensor.dtype for tensor in before.values()} == {torch.float32}
    assert all(torch.equal(before[name].bfloat16(), after[name]) for name in before)


def test_a_head_keeps_its_draft_vocabulary(tmp_path: Path) -> None:
    """Ids have no mean: they are those of both, or there is none."""
    head = Path(str(files("graphspec"))) / "heads" / "smollm2" / "eagle3"
    average([head, head], tmp_path / "out", "bfloat16")
    before, after = Checkpoint(head), load_file(tmp_path / "out" / "model.safetensors")
    for name in ("d2t", "t2d"):
        assert after[name].dtype == before.tensor(name).dtype and torch.equal(after[name], before.tensor(name))
    other = changed(tmp_path / "out", tmp_path / "other", {"d2t": after["d2t"] + 1})
    with pytest.raises(CheckpointError, match=r"other.*d2t: expected the same torch.int64 numbers as in .*out, found others"):
        average([tmp_path / "out", other], tmp_path / "none", "bfloat16")
    for dtype in (torch.int32, torch.float32):
        other = changed(tmp_path / "out", tmp_path / str(dtype), {"d2t": after["d2t"].to(dtype)})
        for pair in ([tmp_path / "out", other], [other, tmp_path / "out"]):
            with pytest.raises(CheckpointError, match=r"d2t: expected the same torch\.\w+ numbers as in .*, found others \(torch\.\w+\)"):
                average(pair, tmp_path / "none", "bfloat16")
    assert not (tmp_path / "none").exists()


def test_what_has_no_mean(sources: list[Path], tmp_path: Path) -> None:
    weights = load_file(sources[0] / "model.safetensors")
    norm = "model.norm.weight"
    narrow = changed(sources[0], tmp_path / "narrow", {norm: weights[norm][:32].clone()})
    more = changed(sources[0], tmp_path / "more", {"extra.weight": weights[norm].clone()})
    base = changed(sources[0], tmp_path / "base", {}, rms_norm_eps=0.5)
    broken = changed(sources[0], tmp_path / "broken", {norm: torch.full_like(weights[norm], torch.nan)})
    for other, message in (
        (narrow, r"narrow.*norm\.weight: expected shape \[64\], as .*0 has it, found \[32\]"),
        (more, r"0: extra\.weight: expected the same tensors in every checkpoint, found no such tensor"),
        (base, r"base.*config\.json: rms_norm_eps: expected .* as .*0 has it, found 0\.5"),
        (broken, r"norm\.weight: expected finite numbers in every checkpoint, found infinity or NaN"),
    ):
        with pytest.raises(CheckpointError, match=message):
            average([sources[0], other], tmp_path / "out", "float32")
        assert not (tmp_path / "out").exists()


def test_the_command(sources: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"model={source}" for source in sources[:2]]
    with pytest.raises(SystemExit) as caught:
        main(["convert", *words, f"out={tmp_path / 'out'}", "format=bfloat16"])
    assert not caught.value.code
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'}: the mean of 2 checkpoints in bfloat16, ")
    for more, message in (
        ([f"out={tmp_path / 'out'}", "format=float32"], "out: expected a folder that doesn't exist yet"),
        (["out=x", "format=int4"], r"format: expected one of bfloat16, float16, float32 for the mean of several models, found 'int4'"),
        (["out=x", "format=float32", "group=32"], "group: expected nothing with format=float32, which has no codes, found '32'"),
        (["out=x", "out=y", "format=float32"], "convert: expected model=FOLDER"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_words([*words, *more])
    with pytest.raises(ConfigError, match="model: expected a checkpoint, or several, found none"):
        average([], tmp_path / "none", "float32")
    write_gguf(sources[0], tmp_path / "model.gguf", {}, arch="llama")
    with pytest.raises(CheckpointError, match=r"expected a folder with config\.json and safetensors, found GGUF"):
        average([sources[0], tmp_path / "model.gguf"], tmp_path / "none", "float32")

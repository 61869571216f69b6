"""``graphspec convert`` with several models: their mean, tensor by tensor, which engines load as they do its parts."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphspec import LLM, SamplingParams
from graphspec.cli.main import main
from graphspec.errors import CheckpointError, ConfigError
from graphspec.models.average import average, from_words
from graphspec.models.checkpoint import Checkpoint
from graphspec.models.quantise import NUMBERS, quantise
from tests.support.checkpoints import build_hf, edit_json, write_hf
from tests.support.gguf_files import write_gguf

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models of one architecture; the last is in 4 bits."""
    folder, made = tmp_path_factory.mktemp("sources"), []
    for seed in range(3):
        torch.manual_seed(seed)
        made.append(write_hf(build_hf("llama", head_dim=16, max_position_embeddings=128, **SIZES), folder / str(seed)))
    return [*made[:2], quantise(made[2], folder / "packed", "int4").folder]


def changed(source: Path, out: Path, edit: dict[str, torch.Tensor], **config: object) -> Path:
    """A copy with some tensors, and some keys of its config, exchanged."""
    out.mkdir()
    save_file(load_file(source / "model.safetensors") | edit, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_bytes((source / "config.json").read_bytes())
    edit_json(out / "config.json", **config)
    return out


@pytest.mark.parametrize("numbers", list(NUMBERS))
def test_every_number_is_the_mean_in_float32(numbers: str, sources: list[Path], tmp_path: Path) -> None:
    result = average(sources, tmp_path / "out", numbers)
    parts, written = [Checkpoint(source) for source in sources], load_file(tmp_path / "out" / "model.safetensors")
    assert parts[2].is_packed("model.layers.0.mlp.up_proj.weight") and set(written) == set(parts[0].names())
    distance = total = 0.0
    for name, tensor in written.items():
        exact = sum(part.raw(name).double() for part in parts) / 3
        torch.testing.assert_close(tensor, exact.to(NUMBERS[numbers]), rtol=1e-6 if numbers == "float32" else 1e-2, atol=1e-9)
        distance += sum(float((part.raw(name).double() - exact).square().sum()) for part in parts) / 3
        total += float(exact.square().sum())
    assert result.distance == pytest.approx((distance / total) ** 0.5, rel=1e-4) and result.models == 3
    config = (tmp_path / "out" / "config.json").read_text()
    assert "quantization_config" not in config
    prompt = [[5, 9, 3, 22, 5, 9, 3]]
    with LLM(tmp_path / "out", variant="none", max_context=32) as llm:
        assert len(llm.generate(prompt, SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


def test_one_checkpoint_twice_is_itself(sources: list[Path], tmp_path: Path) -> None:
    result = average([sources[0], sources[0]], tmp_path / "out", "float32")
    before, after = (load_file(folder / "model.safetensors") for folder in (sources[0], tmp_path / "out"))
    assert result.distance == 0.0 and all(torch.equal(before[name].float(), after[name]) for name in before)


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
        (["out=x", "format=int4"], r"format: expected one of bfloat16, float16, float32 for a mean, found 'int4'"),
        (["out=x", "format=float32", "group=32"], r"convert: expected model=FOLDER model=FOLDER \.\.\. out=FOLDER"),
        (["out=x", "out=y", "format=float32"], "convert: expected model=FOLDER"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_words([*words, *more])
    with pytest.raises(ConfigError, match="model: expected two or more checkpoints, found 1"):
        average(sources[:1], tmp_path / "none", "float32")
    write_gguf(sources[0], tmp_path / "model.gguf", {}, arch="llama")
    with pytest.raises(CheckpointError, match=r"expected a folder with config\.json and safetensors, found GGUF"):
        average([sources[0], tmp_path / "model.gguf"], tmp_path / "none", "float32")

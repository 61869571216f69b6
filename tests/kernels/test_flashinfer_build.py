"""Compiled kernels for a machine without a compiler: which are built, what is packed, and where it is installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.errors import GraphspecError
from graphspec.kernels.flashinfer import version
from graphspec.kernels.fused.launch import recording
from perf.gpu import build_flashinfer, flashinfer_ops, install, pack
from tests.support.checkpoints import build_hf, write_hf
from tests.support.moe_checkpoints import write_mixture

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_hf(build_hf("llama", head_dim=64, num_attention_heads=4, num_key_value_heads=2), tmp_path / "model")


def test_kernels_follow_from_the_model(model: Path) -> None:
    kernels = build_flashinfer.kernels_for(model, 32, "bfloat16", [8, 1, 8])
    prompts = build_flashinfer.Prefill("bfloat16", "fa3", 64, sliding_window=False)
    assert kernels == [prompts, *(build_flashinfer.Kernel("bfloat16", 32, 64, 2, tokens) for tokens in (1, 8))]
    with pytest.raises(GraphspecError, match=r"runtime\.page_size"):
        build_flashinfer.kernels_for(model, 4, "bfloat16", [8])


def test_dry_run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--out", str(tmp_path / "out"), "--model", str(model), "--tokens", "8", "--dtype", "float16", "--backend", "fa2"]
    assert build_flashinfer.main([*arguments, "--dry-run"]) == 0
    prompts, decode = capsys.readouterr().out.splitlines()
    assert prompts == "would compile prefill float16 fa2 head_dim=64 for 9.0a"
    assert decode == "would compile xqa float16 page_size=16 head_dim=64 queries_per_group=2 tokens=8 for 9.0a"
    assert build_flashinfer.main([*arguments, "--dry-run", "--page-size", "8"]) == 2
    assert "runtime.page_size" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_kernels_of_latent_rows_and_of_windows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """MLA kernels serve any page size and number of tokens; layers with and without a window have separate prefill kernels."""
    latent, _ = write_mixture(tmp_path / "latent", "deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64)
    assert build_flashinfer.kernels_for(latent, 1, "bfloat16", []) == [build_flashinfer.Latent("bfloat16", "fa3", 512, 64)]
    assert build_flashinfer.main(["--out", str(tmp_path / "out"), "--model", str(latent), "--dtype", "bfloat16", "--dry-run"]) == 0
    assert capsys.readouterr().out == "would compile mla bfloat16 fa3 compressed=512 rotated=64 for 9.0a\n"
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    mixed = write_hf(
        build_hf("qwen2", head_dim=None, hidden_size=128, num_attention_heads=2, num_key_value_heads=1, **windows), tmp_path / "mixed"
    )
    found = build_flashinfer.kernels_for(mixed, 16, "bfloat16", [])
    assert found == [build_flashinfer.Prefill("bfloat16", "fa3", 64, sliding) for sliding in (False, True)]


def test_a_model_of_which_only_xqa_serves_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = write_hf(build_hf("llama", head_dim=32, num_attention_heads=4, num_key_value_heads=2), tmp_path / "odd")
    arguments = ["--out", str(tmp_path / "out"), "--model", str(odd), "--dtype", "float16", "--dry-run"]
    assert build_flashinfer.main(arguments) == 2 and "--tokens" in capsys.readouterr().err
    assert build_flashinfer.main([*arguments, "--tokens", "4"]) == 0


def test_without_flashinfer(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(version, "installed", lambda: None)
    arguments = ["--out", str(tmp_path / "out"), "--model", str(model), "--tokens", "8", "--dtype", "float16"]
    assert build_flashinfer.main(arguments) == 2
    assert "not installed" in capsys.readouterr().err


def test_the_driver_stand_in_carries_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build_flashinfer.driver_stub(tmp_path / "stubs") / "libcuda.so"
    held = library.read_bytes()
    assert all(name.encode() + b"\0" in held for name in (build_flashinfer.DRIVER, *build_flashinfer.DRIVER_FUNCTIONS))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(SystemExit, match=r"libcuda.*no-such-compiler"):
        build_flashinfer.driver_stub(tmp_path / "more")


@pytest.mark.parametrize("more", [["--tokens", "0"], ["--dtype", "float32", "--tokens", "1"], ["--backend", "auto"]])
def test_bad_arguments(more: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        build_flashinfer.main(["--out", str(tmp_path / "out"), "--model", "m", *more])
    assert error.value.code == 2


def write_flashinfer(folder: Path, number: str) -> Path:
    """A wheel of that name and version, with no kernel in it."""
    folder.mkdir()
    wheel = folder / f"flashinfer_python-{number}-py3-none-any.whl"
    info = f"flashinfer_python-{number}.dist-info"
    files = {
        "flashinfer/__init__.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {number}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": "".join(f"{name},,\n" for name in files)}.items():
            archive.writestr(name, text)
    return wheel


@pytest.mark.parametrize("there", ["0.7.2", "0.7.1"])
def test_kernels_arrive_where_flashinfer_looks(there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, out = tmp_path / "kernels", tmp_path / "packed"
    (kernels / "xqa_a").mkdir(parents=True)
    (kernels / "xqa_a" / "xqa_a.so").write_bytes(b"compiled")
    (kernels / build_flashinfer.VERSION_FILE).write_text("0.7.2\n")
    wheel = write_flashinfer(tmp_path / "index", there)
    monkeypatch.setattr(pack, "wheel_command", lambda _, to, target: ["cp", str(wheel), str(to)])
    monkeypatch.setattr(pack, "repository_files", list)
    monkeypatch.setattr(pack, "copy_repository", lambda *_: None)
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    arguments = ["--out", str(out), "--python", running, "--requirement", "flashinfer-python", "--flashinfer", str(kernels)]
    assert pack.main(arguments) == 0
    packed = out / "repo" / install.FOLDER
    code = f"from pathlib import Path; from perf.gpu.install import install; install(Path({str(packed)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    placed = packed / "site" / "flashinfer" / "data" / "aot" / "xqa_a" / "xqa_a.so"
    if there == "0.7.2":
        assert done.returncode == 0, done.stderr
        assert placed.read_bytes() == b"compiled"
    else:
        assert done.returncode != 0 and "expected flashinfer-python 0.7.2, found 0.7.1" in done.stderr
        assert not placed.exists()


def test_a_folder_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pack.main(["--out", str(tmp_path / "out"), "--dry-run", "--flashinfer", str(tmp_path)])
    assert "perf.gpu.build_flashinfer" in capsys.readouterr().err


def test_ops_are_measured_on_the_same_work(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every pair can be made and called: ours launch one kernel, FlashInfer's get the shapes it documents. Without CUDA, no file."""
    module: Any = ModuleType("flashinfer")
    called = []

    def rotate(position: Tensor, query: Tensor, key: Tensor, dim: int, table: Tensor) -> None:
        assert query.shape == (len(position), 32 * dim) and key.shape == (len(position), 8 * dim) and table.dtype == torch.float32
        called.append("rotate")

    def append(key: Tensor, value: Tensor, lane: Tensor, position: Tensor, pool: Any, pages: Tensor, offsets: Tensor, last: Tensor) -> None:
        assert key.shape == value.shape == (len(lane), 8, 128) and len(position) == len(lane) and pool[0].shape == pool[1].shape
        assert {t.dtype for t in (lane, position, pages, offsets, last)} == {torch.int32} and len(offsets) == len(last) + 1
        called.append("append")

    module.apply_rope_with_cos_sin_cache_inplace, module.append_paged_kv_cache = rotate, append
    module.fused_add_rmsnorm = lambda x, residual, weight, eps: called.append("norm")
    module.sampling_from_logits = lambda rows, seed, offset: called.append("sample")
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    names = []
    for line, ours, theirs in flashinfer_ops.pairs(torch.device("meta")):
        names.append(line["name"])
        with recording() as launches:
            found = ours() if line["name"] != "add, norm" else None
        if line["name"] == "norm, linear":
            # An operator: without data it runs nothing.
            assert isinstance(found, Tensor) and found.shape == (line["lanes"] * line["tokens"], 6144)
        else:
            assert len(launches) == (line["name"] != "add, norm")
        theirs()
    assert names == ["add, norm", "norm, linear", "rope, write", "greedy", "drawn"] * 4
    assert called == ["norm", "norm", "rotate", "append", "sample"] * 4
    if not torch.cuda.is_available():
        assert flashinfer_ops.main([]) == 1 and "nothing measured" in capsys.readouterr().out

"""The tools around the GPU: their output with and without one, and the package for an offline machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from graphspec import LLM, SamplingParams
from graphspec.config.schema import Config
from graphspec.facts.folders import DEMO, model_folder
from graphspec.lab.measure import provenance
from perf import depth_cost, gpu_check, speed
from perf.gpu import machine, pack
from recipes.corpus import load_corpus

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120, env={**os.environ, **environment}
    )


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"hydra", "omegaconf", "rich", "transformers"}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
from perf.gpu_check import main
sys.exit(main(["--out", sys.argv[1]]))
"""


def test_without_a_device_nothing_is_claimed(tmp_path: Path) -> None:
    """And neither Hydra nor rich is needed to find that out."""
    done = python("-c", BLOCKED, str(tmp_path / "results"), CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (0, gpu_check.NO_DEVICE + "\n"), done.stderr
    assert not (tmp_path / "results").exists()


def test_gpu_tests_live_in_one_folder() -> None:
    """``make gpu-check`` looks nowhere else."""
    marked = {path for path in (ROOT / "tests").rglob("*.py") if "mark." + "gpu" in path.read_text(encoding="utf-8")}
    assert marked and {path.parent for path in marked} == {ROOT / "tests" / "gpu"}


def test_provenance_names_everything() -> None:
    record = provenance.provenance(Config(), {"buckets": (1, 2), "path": Path("x")})
    assert {
        "date", "command", "revision", "graphspec", "python", "platform", "torch", "triton", "transformers", "cuda", "driver", "gpus",
        "cpu", "cores",
    } <= set(record)  # fmt: skip
    assert record["config"]["runtime"]["page_size"] == 16
    assert record["torch"] and record["date"].endswith("+00:00")
    assert record["gpus"] or record["driver"] is None
    json.dumps(record, default=str)


def test_revision_of_a_tree_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.revision() is None
    (tmp_path / provenance.REVISION_FILE).write_text("abc-dirty\n")
    assert provenance.revision() == "abc-dirty"


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small git checkout that takes the repository's place."""
    root = tmp_path / "checkout"
    (root / "graphspec").mkdir(parents=True)
    (root / "graphspec" / "big.py").write_text("x = 1\n" * 1000)
    (root / "constraints.txt").write_text("# pins\nhydra-core==1.3.8\nPyYAML==6.0.3\n")
    (root / ".gitignore").write_text("*.log\n")
    (root / "noise.log").write_text("no\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    (root / "new.py").write_text("y = 2\n")
    monkeypatch.setattr(pack, "ROOT", root)
    monkeypatch.setattr(provenance, "ROOT", root)
    return root


def test_revision_says_dirty(checkout: Path) -> None:
    clean = provenance.revision()
    assert clean is not None and len(clean) == 40
    (checkout / "constraints.txt").write_text("")
    assert provenance.revision() == clean + "-dirty"


def test_requirements_are_pinned() -> None:
    constraints = "hydra-core==1.3.8\nPyYAML==6.0.3\n# a comment\n"
    assert [pack.pinned(r, constraints) for r in ("hydra_core", "pyyaml", "other", "hydra-core==1.4", "a>=2")] == [
        "hydra_core==1.3.8", "pyyaml==6.0.3", "other", "hydra-core==1.4", "a>=2",
    ]  # fmt: skip
    own = (ROOT / "constraints.txt").read_text()
    lacking = machine.lacking("3.12", ["grammar"])
    assert all("==" in pack.pinned(requirement, own) for requirement in lacking)
    # What these need comes with them; what the machine has does not.
    assert {"hydra-core", "omegaconf", "antlr4-python3-runtime", "xgrammar", "apache-tvm-ffi", "pydantic-core"} <= set(lacking)
    assert not {"torch", "numpy", "transformers", "pyyaml", "packaging"} & set(lacking)
    with pytest.raises(SystemExit, match=r"expected one of .*grammar.*, found 'no'"):
        machine.lacking("3.12", ["no"])


def test_pip_downloads_for_the_other_machine(tmp_path: Path) -> None:
    target = pack.Target("3.11", ("manylinux_2_35_aarch64", "linux_aarch64"))
    command = " ".join(pack.wheel_command("numpy==2.4.6", tmp_path, target))
    assert " download " in command and "--only-binary=:all:" in command and "--no-deps" in command
    assert "--python-version 3.11 --implementation cp --platform manylinux_2_35_aarch64 --platform linux_aarch64" in command
    assert command.endswith("numpy==2.4.6")
    assert " wheel " in " ".join(pack.wheel_command("antlr4-python3-runtime==4.9.3", tmp_path, target))


def test_a_dry_run_writes_nothing(checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "packed"
    other = ["--requirement", "hydra-core", "--platform", "linux_aarch64", "--python", "3.13"]
    assert pack.main(["--out", str(out), "--dry-run", *other]) == 0
    output = capsys.readouterr().out
    assert not out.exists()
    assert "repo/graphspec" in output and "noise.log" not in output
    assert "hydra-core==1.3.8" in output and "--platform linux_aarch64" in output and "3.13" in output
    with pytest.raises(SystemExit, match=r"limit-mib: expected at most 0\.001 MiB, found"):
        pack.main(["--out", str(out), "--dry-run", "--no-wheels", "--limit-mib", "0.001"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--python", "3"], "expected a version like 3.12"),
        (["--python", "3.x"], "expected a version like 3.12"),
        (["--no-wheels", "--requirement", "x"], "contradicts"),
        (["--in-tree"], "not allowed with"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pack.main(["--out", str(tmp_path / "out"), *arguments])
    assert message in capsys.readouterr().err


def test_the_folder_must_be_new_and_elsewhere(checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, message in ((tmp_path, "new or empty folder"), (checkout / "inside", "outside the repository")):
        with pytest.raises(SystemExit):
            pack.main(["--out", str(folder), "--dry-run"])
        assert message in capsys.readouterr().err


def write_wheel(folder: Path, name: str, tag: str) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "there = True\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_wheels_of_another_platform_are_refused(tmp_path: Path) -> None:
    target = pack.Target("3.12", ("manylinux_2_28_x86_64",))
    write_wheel(tmp_path, "pure", "py3-none-any")
    write_wheel(tmp_path, "native", "cp312-cp312-manylinux_2_28_x86_64.manylinux_2_17_x86_64")
    pack.check_wheels(tmp_path, target)
    write_wheel(tmp_path, "here", "cp312-cp312-linux_x86_64")
    with pytest.raises(SystemExit, match=r"here-1\.0.*built for linux_x86_64"):
        pack.check_wheels(tmp_path, target)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One small package in place of those that pip would download; returns the running Python's version."""
    (tmp_path / "index").mkdir()
    write_wheel(tmp_path / "index", "tinypack", "py3-none-any")
    monkeypatch.setattr(pack, "wheel_command", lambda r, to, target: ["cp", str(tmp_path / "index" / f"{r}-1.0-py3-none-any.whl"), str(to)])
    monkeypatch.setattr(pack, "lacking", lambda python, extras: ["tinypack"])
    return f"{sys.version_info.major}.{sys.version_info.minor}"


INSTALLED = """
import subprocess, sys
from pathlib import Path
from perf.gpu.install import install
site = install(Path(sys.argv[1]) / ".gpu-pack")
import tinypack
before = (site / "tinypack.py").stat().st_ino
assert install(Path(sys.argv[1]) / ".gpu-pack") == site and (site / "tinypack.py").stat().st_ino == before, "installed again"
print(subprocess.run([sys.executable, "-c", "import tinypack; print(tinypack.__file__)"], capture_output=True, text=True).stdout)
"""


def test_what_is_packed_installs_offline(checkout: Path, tmp_path: Path, stand_in: str) -> None:
    """Pack with a stand-in for the download, unpack elsewhere, install there as the first call does, import in a child process."""
    folder = tmp_path / "packed"
    assert pack.main(["--out", str(folder), "--tar", "--python", stand_in]) == 0
    with tarfile.open(tmp_path / "packed.tar.gz") as archive:
        archive.extractall(tmp_path / "there", filter="data")
    there = tmp_path / "there" / "packed" / "repo"
    assert (there / "new.py").is_file() and not (there / "noise.log").exists() and not (there / ".git").exists()
    assert (there / ".revision").read_text().strip() == provenance.revision()
    done = python("-c", INSTALLED, str(there))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(there / ".gpu-pack" / "site" / "tinypack.py")


def test_wheels_travel_in_a_tree_that_git_does_not_see(checkout: Path, tmp_path: Path, stand_in: str) -> None:
    """Those of an earlier pack are gone, and a pack that is too large leaves them."""
    (checkout / pack.FOLDER).mkdir()
    write_wheel(checkout / pack.FOLDER, "old", "py3-none-any")
    with pytest.raises(SystemExit, match="limit-mib"):
        pack.main(["--in-tree", "--limit-mib", "0.001", "--python", stand_in])
    assert [file.name for file in (checkout / pack.FOLDER).iterdir()] == ["old-1.0-py3-none-any.whl"]
    assert pack.main(["--in-tree", "--python", stand_in]) == 0
    assert [file.name for file in (checkout / pack.FOLDER).iterdir()] == ["tinypack-1.0-py3-none-any.whl"]
    assert f"/{pack.FOLDER}/" in (ROOT / ".gitignore").read_text().splitlines()
    (checkout / pack.FOLDER / "broken-1.0-py3-none-any.whl").write_bytes(b"")
    done = python("-c", INSTALLED, str(checkout))
    assert done.returncode == 1 and "expected wheels that pip installs into Python" in done.stderr


def test_a_side_with_other_tokens_gets_no_figure() -> None:
    sides = [
        speed.Decoder("reference", lambda batch: [[*prompt, 1] for prompt in batch]),
        speed.Decoder("same", lambda batch: [[*prompt, 1] for prompt in batch], "reference", acceptance=lambda: 2.5),
        speed.Decoder("other", lambda batch: [[*prompt, 2] for prompt in batch], "reference"),
    ]
    speed.measure(sides, [[[5]], [[6, 7]]], rounds=3)
    reference, same, other = speed.rows(sides)
    assert reference["ratio"] is None and reference["tokens_per_second"] > 0
    assert same["equal_to_hf"] and same["ratio"] > 0 and same["acceptance_length"] == 2.5 and len(same["rounds"]) == 3
    assert not other["equal_to_hf"] and other["tokens_per_second"] is None and other["ratio"] is None
    table = speed.table([reference, same, other], "caption")
    assert "| other | wrong output |  |  |" in table and table.endswith("caption")


def test_held_out_prompts_come_from_modules_no_training_step_saw() -> None:
    prompts = speed.held_out_prompts(lambda text: list(text.encode()), 3, 40)
    held_out = [text.encode() for text in load_corpus().held_out.values()]
    assert len(prompts) == 3 and all(len(prompt) == 40 for prompt in prompts)
    assert all(any(bytes(prompt) in text for text in held_out) for prompt in prompts)


def test_the_useless_draft_is_the_demos_with_other_matrices(tmp_path):
    """Same names, shapes and vocabulary map: only what it drafts is worth nothing."""
    demo = model_folder(DEMO).parent / "eagle3"
    made = depth_cost.useless_draft(tmp_path / "draft")
    [file] = made.glob("*.safetensors")
    given, found = load_file(demo / file.name), load_file(file)
    assert {name: (t.shape, t.dtype) for name, t in found.items()} == {name: (t.shape, t.dtype) for name, t in given.items()}
    for name, tensor in found.items():
        kept = tensor.ndim < 2 or not tensor.is_floating_point()
        assert torch.equal(tensor, given[name]) == kept, name
    assert (made / "config.json").read_text() == (demo / "config.json").read_text()


def test_engines_take_turns_cycle_by_cycle(tmp_path):
    """Both are timed over the same prompts to their ends, and a side whose tokens differ ends the measurement."""
    common = {"runtime": "eager", "max_rows": 2, "buckets": [2], "max_context": 128}
    adaptive = LLM(variant="eagle3", draft=depth_cost.useless_draft(tmp_path), **depth_cost.SHAPE, depths=[0], **common)
    plain = LLM(variant="none", **common)
    prompts = speed.held_out_prompts(plain.tokenizer.encode, 2, 20)
    turns: list[str] = []
    for name, llm in (("adaptive", adaptive), ("plain", plain)):
        llm.stream = partial(watched, llm.stream, name, turns)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    ours, theirs = depth_cost.take_turns(adaptive, plain, prompts, params, plain_first=True)
    assert ours > 0 and theirs > 0
    assert turns[:8] == ["plain", "plain", "adaptive", "adaptive"] * 2
    other = LLM(variant="none", **common)
    other.stream = lambda prompts, params: iter(())
    with pytest.raises(SystemExit, match="tokens are not those"):
        depth_cost.take_turns(adaptive, other, prompts, params, plain_first=False)


def watched(stream, name, turns, *args):
    for event in stream(*args):
        turns.append(name)
        yield event


def test_a_recorded_command_line_has_no_machine_paths():
    words = [str(ROOT / "perf" / "speed.py"), f"results={ROOT}/x", "--rounds=3"]
    assert provenance.command_line(words) == ["perf/speed.py", "results=x", "--rounds=3"]
    words = ["/usr/local/bin/graphspec", "profile", "--llama", "/opt/llama/llama-server", "variant.draft=/models/head", "url=http://a/b"]
    assert provenance.command_line(words) == ["graphspec", "profile", "--llama", "llama-server", "variant.draft=head", "url=http://a/b"]
    assert provenance.command_line([]) == []

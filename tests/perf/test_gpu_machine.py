"""Everything that runs on a GPU machine, run with the packages that such a machine has (``perf/gpu/machine.txt``) and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from perf.gpu import machine, probes, rehearse

ROOT = Path(__file__).resolve().parents[2]
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
LEFT_OUT = {"typer": "", "rich": "", "prometheus-client": ""}
"""On the machine, but of commands and servers; the first needs more in some versions than the machine has."""

IMPORTED = """
import importlib, pkgutil, sys
import perf.gpu
for found in pkgutil.iter_modules(perf.gpu.__path__):
    importlib.import_module(f"perf.gpu.{found.name}")
for name in ("perf.gpu_check", "perf.speed", "graphspec.api.llm", "graphspec.lab.measure.programmatic", "tests.gpu.smallest"):
    importlib.import_module(name)
for name in ("hydra", "omegaconf", "platformdirs", "rich", "pydantic", "xgrammar"):
    assert importlib.util.find_spec(name) is None, f"{name} is here: this shows nothing"
print("imported")
"""
GENERATED = """
from graphspec import LLM, SamplingParams
llm = LLM(runtime="eager", max_rows=1, buckets=[1], max_context=64, num_steps=2, topk=1, num_draft_tokens=3)
print(len(llm.generate("def f(x):", SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids), "tokens")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to the packages of the list, and to what those that are installed here need."""
    folder = tmp_path_factory.mktemp("machine")
    here = [name for name in machine.packages() if any(True for _ in metadata.distributions(name=name))]
    assert {"torch", "triton", "transformers", "pytest", "hypothesis"} <= set(here)
    names = machine.closure(here, RUNNING, LEFT_OUT)
    for name in names:
        found = metadata.distribution(name)
        tops = {file.parts[0] for file in found.files or () if file.parts[0] != ".." and file.parts[0] != "__pycache__"}
        for top in tops:
            target, link = Path(str(found.locate_file(top))), folder / top
            if target.exists() and not link.exists():
                link.symlink_to(target)
    return folder


def python(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python without its own site-packages, those of ``site`` instead."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{site}", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, "-S", *arguments], cwd=ROOT, capture_output=True, text=True, env=environment, timeout=200)


def test_what_runs_there_imports_nothing_else(site: Path) -> None:
    done = python(site, "-c", IMPORTED)
    assert (done.returncode, done.stdout) == (0, "imported\n"), done.stderr[-2000:]


def test_an_engine_generates_there(site: Path) -> None:
    """What is imported late is there too."""
    done = python(site, "-c", GENERATED)
    assert (done.returncode, done.stdout) == (0, "4 tokens\n"), done.stderr[-2000:]


def test_the_gpu_tests_are_collected_there(site: Path) -> None:
    done = python(
        site, "-m", "pytest", "tests/gpu", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "perf.gpu.records"
    )
    assert done.returncode == 0 and "test_captured_equals_direct_bitwise" in done.stdout, (done.stdout + done.stderr)[-2000:]


@pytest.mark.parametrize("tool", ["probes", "latency", "engine", "warm"])
def test_the_tools_start_there(site: Path, tool: str) -> None:
    arguments = ["--probe", probes.ESSENTIAL[-1]] if tool == "probes" else ["--help"]
    done = python(site, "-m", f"perf.gpu.{tool}", *arguments)
    wanted = "torch sees no CUDA device" if tool == "probes" else "usage:"
    assert wanted in done.stdout + done.stderr, (done.stdout + done.stderr)[-2000:]


def test_a_rehearsal_names_what_failed_and_installs_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [
        ("right", ["-c", "print('usage: x')"], (0,), "usage:"),
        ("other text", ["-c", "print('no')"], (0,), "usage:"),
        ("other code", ["-c", "raise SystemExit('no CUDA device')"], (0,), "no CUDA device"),
    ]
    assert rehearse.rehearse(Path(sys.executable), tmp_path, steps) == ["other text", "other code"]
    (tmp_path / ".installed").write_text(machine.MACHINE.read_text())
    rehearse.install(tmp_path, "no-such-python")
    assert "as it was" in capsys.readouterr().out
    names = [name for name, *_ in rehearse.steps(2)]
    assert names[-1] == "code" and {"imports", "collection", "probe", "first call", "budget"} <= set(names)
    assert f"/{rehearse.ENVIRONMENT.name}/" in (ROOT / ".gitignore").read_text().splitlines()

"""The first call on a GPU machine, rehearsed without one: ``make rehearse-gpu``. To be green before any time on a GPU is spent.

The tree is copied as git sees it, without ``.git``, and run with the packages of ``machine.txt`` alone, in an environment that is kept for
the next time. There everything is imported and the tests are collected, every tool starts and ends where it finds no device, and every
program of every structure is written by Inductor for CUDA and compiled by Triton and ptxas for sm_90. The time of every call is counted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from graphspec.lab.measure.provenance import ROOT
from perf.gpu.machine import MACHINE
from perf.gpu.pack import copy_repository, repository_files

ENVIRONMENT = ROOT / ".venv-gpu-replica"
NEEDED_GIB = 12.0
"""Room on disk to install the environment, with what pip downloads for it."""
IMPORTS = """
import importlib, pkgutil, perf.gpu
for found in pkgutil.iter_modules(perf.gpu.__path__):
    importlib.import_module(f"perf.gpu.{found.name}")
for name in ("perf.gpu_check", "perf.speed", "graphspec.api.llm", "graphspec.lab.measure.programmatic", "tests.gpu.smallest"):
    importlib.import_module(name)
"""
LAUNCH = """
from graphspec.graphs.graph_launch import graph_launch
try:
    graph_launch()(0, 0)
except RuntimeError as error:
    print(error)
"""
"""Launches nothing, through the function that replays graphs; without a device CUDA says so."""
Step = tuple[str, list[str], tuple[int, ...], str]
"""Name, arguments of Python, exit codes that are expected, and a text that its output has."""


def steps(processes: int) -> list[Step]:
    """Everything that is rehearsed, the quick before the slow."""
    quiet = ["-q", "-p", "no:cacheprovider"]
    spread = ["--numprocesses", str(processes)] if processes > 1 else []
    nothing = "no CUDA device"
    return [
        ("imports", ["-c", IMPORTS], (0,), ""),
        ("collection", ["-m", "pytest", "tests/gpu", "-m", "gpu", "--collect-only", *quiet], (0,), "test_captured_equals_direct_bitwise"),
        ("launch", ["-c", LAUNCH], (0,), "CUDA error: "),
        ("probe", ["-m", "perf.gpu.probes", "--probe", "engine-reference"], (1,), "CUDA device"),
        ("first call", ["-m", "perf.gpu_check", "--call", "first"], (0,), nothing),
        ("warm", ["-m", "perf.gpu.warm"], (0,), nothing),
        *((name, ["-m", f"perf.gpu.{name}", "--help"], (0,), "usage:") for name in ("latency", "engine", "flashinfer_ops")),
        ("linear", ["-m", "perf.gpu.linear"], (1,), nothing),
        ("programmatic", ["-m", "graphspec.lab.measure.programmatic"], (2,), "no CUDA device"),
        ("budget", ["-m", "pytest", "tests/perf/test_gpu_limits.py", *quiet], (0,), "passed"),
        ("code", ["-m", "pytest", "tests/kernels/test_cuda_code.py", "-m", "kernels", *quiet, *spread], (0,), "passed"),
    ]


def install(environment: Path, python: str) -> None:
    """Make the environment, unless it has what ``machine.txt`` lists.

    Raises:
        SystemExit: there is no room for it, or pip failed.
    """
    stamp, wanted = environment / ".installed", MACHINE.read_text(encoding="utf-8")
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        print(f"environment: {environment.name}, as it was")
        return
    free = shutil.disk_usage(environment.parent).free / 2**30
    if free < NEEDED_GIB:
        raise SystemExit(f"{environment.name}: expected {NEEDED_GIB:g} GiB of free disk, found {free:.1f}")
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    for command in (
        [python, "-m", "venv", "--clear", str(environment)],
        [*pip, "install", "--quiet", "--no-deps", "-r", str(MACHINE)],
    ):
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit(f"environment: expected {' '.join(command[:4])} to succeed")
    stamp.write_text(wanted, encoding="utf-8")
    size = sum(file.lstat().st_size for file in environment.rglob("*") if not file.is_dir())
    print(f"environment: {environment.name}, {size / 2**30:.1f} GiB")


def rehearse(python: Path, tree: Path, chosen: Sequence[Step]) -> list[str]:
    """Run steps in ``tree``; returns the names of those that did not end as expected, whose output is printed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    wrong = []
    for name, arguments, codes, text in chosen:
        began = time.monotonic()
        done = subprocess.run([python, *arguments], cwd=tree, env=environment, capture_output=True, text=True, check=False)
        right = done.returncode in codes and text in done.stdout + done.stderr
        print(f"{'passed' if right else 'FAILED'} {time.monotonic() - began:6.0f} s  {name}", flush=True)
        if not right:
            wrong.append(name)
            print((done.stdout + done.stderr)[-3000:], flush=True)
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit code 0: a GPU machine would come as far as it can be told without one."""
    every = [name for name, *_ in steps(1)]
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu.rehearse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="python3.12", help="makes the environment (default: python3.12)")
    parser.add_argument("--environment", type=Path, default=ENVIRONMENT, help=f"where it is kept (default: {ENVIRONMENT.name})")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="of the code step (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=every, metavar="STEP", help=f"these steps: {', '.join(every)}")
    options = parser.parse_args(argv)
    install(options.environment, options.python)
    with tempfile.TemporaryDirectory(prefix="graphspec-") as scratch:
        tree = Path(scratch) / "repo"
        copy_repository(repository_files(), tree)
        chosen = [step for step in steps(options.processes) if options.only is None or step[0] in options.only]
        wrong = rehearse(options.environment / "bin" / "python", tree, chosen)
    print(f"failed: {', '.join(wrong)}" if wrong else "nothing failed that can be told without a GPU")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

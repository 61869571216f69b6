"""Runs tests of ``tests/gpu`` in parallel in a separate process, and records each when it ends."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path

from perf.gpu.processes import run_command

PROCESSES = 12
NO_TESTS = 5
"""Pytest's exit code when nothing was left to run."""
SELECTIONS = {"core": "gpu and core", "tests": "gpu"}
"""Part of a call to its marker expression."""
SANITIZER = "tests/gpu/test_gpu.py::test_small_kernels_are_clean_under_the_sanitizer"


def left_out() -> list[tuple[str, str]]:
    """``(pytest argument, tool)`` of every group of checks whose optional tool is not installed here.

    These are deselected by name, and the result file records it; a check that skips itself keeps a run from being green.
    """
    groups = (
        ("FlashInfer", find_spec("flashinfer") is not None, "--ignore=tests/gpu/test_flashinfer.py"),
        ("compute-sanitizer", shutil.which("compute-sanitizer") is not None, f"--deselect={SANITIZER}"),
    )
    return [(argument, name) for name, there, argument in groups if not there]


def run_tests(part: str, arguments: Sequence[str], passed: Collection[str], file: Path, log: Path, seconds: float) -> int | None:
    """Run pytest on ``tests/gpu``; returns its exit code, None when the time was over.

    Only this folder is collected: others import packages that a GPU machine may lack (Hydra).

    Args:
        part: key of :data:`SELECTIONS`.
        arguments: further arguments of pytest.
        passed: names of tests that need not run again.
        file: for a record of every test.
        log: for the output.
        seconds: time limit.
    """
    before = file.with_suffix(".passed")
    before.write_text("".join(f"{name}\n" for name in sorted(passed)), encoding="utf-8")
    command = [
        sys.executable, "-m", "pytest", "tests/gpu", "-m", SELECTIONS[part], "-q", "-p", "no:cacheprovider", "-p", "no:benchmark",
        "-W", "default", "-p", "perf.gpu.records", f"--records={file}", f"--passed-before={before}", "--durations=15",
    ]  # fmt: skip
    if find_spec("xdist") is not None:
        # Most of the time is compilation on the host, and the device has room for several tests.
        command += ["--numprocesses", str(min(PROCESSES, os.cpu_count() or 1)), "--dist", "worksteal", "--max-worker-restart", "64"]
    # Every process has one core, so it needs no pool of compiler processes.
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    try:
        return run_command([*command, *arguments], seconds, log, environment=environment)
    finally:
        before.unlink()

"""Every check that needs a GPU, in one command: ``python -m perf.gpu_check``.

Runs the tests marked ``gpu`` and writes one file to ``perf/results``: where it ran, then one line for each check. Then measures latency
(``perf.gpu.latency``) and, when all checks were green, the demo model's speed (``perf.speed --runtime captured``); each writes a file of
its own. Latency of a run whose checks were not all green is marked as unverified, and README shows none of it. On a machine without a CUDA
device it says so and claims nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from graphspec.lab.provenance import ROOT, provenance, result_file, write_jsonl

NO_DEVICE = "no CUDA device: nothing was run, nothing is claimed"
PROCESSES = 6
SANITIZER = "tests/gpu/test_gpu.py::test_small_kernels_are_clean_under_the_sanitizer"
OUTCOMES = {"failure": "failed", "error": "error", "skipped": "skipped"}


def has_cuda() -> bool:
    """Torch is there and sees a device."""
    import torch

    return torch.cuda.is_available()


def read_junit(file: Path) -> list[dict[str, Any]]:
    """One record per test of a JUnit file: ``name``, ``outcome`` (passed, failed, error, skipped), ``seconds``, ``message``."""
    records = []
    for case in ET.parse(file).iter("testcase"):
        outcome, message = "passed", ""
        for child in case:
            if child.tag in OUTCOMES:
                outcome = OUTCOMES[child.tag]
                message = (child.get("message") or child.text or "").strip()[:2000]
        name = f"{case.get('classname', '')}::{case.get('name', '')}".removeprefix("::")
        records.append({"kind": "check", "name": name, "outcome": outcome, "seconds": float(case.get("time", 0)), "message": message})
    return records


def left_out() -> list[tuple[str, str]]:
    """``(pytest argument, tool)`` of every group of checks whose optional tool is not installed here.

    They are left out by name and the file says so; a check that skips itself still keeps a run from being green.
    """
    groups = (
        ("FlashInfer", find_spec("flashinfer") is not None, "--ignore=tests/gpu/test_flashinfer.py"),
        ("compute-sanitizer", shutil.which("compute-sanitizer") is not None, f"--deselect={SANITIZER}"),
    )
    return [(argument, name) for name, there, argument in groups if not there]


def run_tests(arguments: Sequence[str]) -> tuple[int, list[dict[str, Any]]]:
    """Pytest in a process of its own over ``tests/gpu``; its exit code and the records of :func:`read_junit`.

    The folder is named because collecting the others imports what a GPU machine may lack (Hydra).
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
        if find_spec("xdist") is not None:
            # Most of the time is compilation on the host; the tests themselves leave room on the device for several.
            command += ["--numprocesses", str(min(PROCESSES, os.cpu_count() or 1)), "--dist", "worksteal"]
        code = subprocess.run([*command, *arguments], cwd=ROOT, check=False).returncode
        return code, read_junit(report) if report.is_file() else []


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 when every check passed, or when there is no device to check."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "results", help="folder of the result file (default: perf/results)")
    parser.add_argument("--no-speed", action="store_true", help="checks only, no measurement")
    parser.add_argument("pytest", nargs="*", help="further arguments for pytest, behind --")
    options = parser.parse_args(argv)
    if not has_cuda():
        print(NO_DEVICE)
        return 0
    head, begin = provenance(), time.perf_counter()
    absent = left_out()
    code, checks = run_tests([*(argument for argument, _ in absent), *options.pytest])
    counts = Counter(check["outcome"] for check in checks)
    # A run in which nothing was checked is no green run, and neither is one that skipped a check on a machine that could do it.
    green = code == 0 and counts["passed"] == len(checks) > 0
    summary = {"kind": "summary", "green": green, "exit_code": code, "seconds": round(time.perf_counter() - begin, 1), **counts}
    summary |= {"not_installed": [name for _, name in absent]}
    file = result_file(options.out, "gpu-check")
    write_jsonl(file, [head, *checks, summary])
    print(f"{', '.join(f'{n} {outcome}' for outcome, n in sorted(counts.items())) or 'no check ran'}; written to {file}")
    if options.no_speed:
        return 0 if green else 1
    latency = [sys.executable, "-m", "perf.gpu.latency", "--out", str(options.out), *([] if green else ["--unverified"])]
    failed = subprocess.run(latency, cwd=ROOT, check=False).returncode
    if not green:
        return 1
    speed = [sys.executable, "-m", "perf.speed", "--runtime", "captured", "--out", str(options.out)]
    return subprocess.run(speed, cwd=ROOT, check=False).returncode or failed


if __name__ == "__main__":
    raise SystemExit(main())

"""Machine instructions of the host path per cycle: by callgrind, which simulates the processor, or by ``perf stat``, a hardware counter.

Both count a whole process, interpreter start and imports included. The difference of two runs that differ only in the number of cycles is
the cost of the additional cycles.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from graphspec.errors import ResourceError

ROOT = Path(__file__).resolve().parents[1]
FEW, MANY = 64, 320
"""Cycles of the two runs: both are past all one-time work, and no request of a steady scenario ends in them."""


def read_callgrind(text: str) -> int:
    """Instructions of the whole process, from the summary line of a ``callgrind.out`` file.

    Raises:
        ResourceError: there is no such line.
    """
    found = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
    if found is None:
        raise ResourceError("callgrind", "a line 'summary: N' or 'totals: N' in its output file", text[-200:] or "an empty file")
    return int(found[1])


def read_perf_stat(text: str) -> int:
    """Instructions of the whole process, from what ``perf stat -x, -e instructions:u`` prints.

    Raises:
        ResourceError: the machine doesn't count them; virtual machines often don't.
    """
    for line in text.splitlines():
        value, _, rest = line.partition(",")
        if "instructions" in rest and value.strip().isdigit():
            return int(value)
    hint = "the counter can't be read on this machine; use --callgrind"
    raise ResourceError("perf stat", "a count of instructions", text.strip() or "nothing", hint)


def per_cycle(count: Callable[[int], int]) -> float:
    """Cost of one cycle, from ``count``, which returns the cost of a run of that many cycles."""
    return (count(MANY) - count(FEW)) / (MANY - FEW)


def _environment() -> dict[str, str]:
    # One thread and no randomised hashes: only the number of cycles may differ between the two runs.
    fixed = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **fixed}


def _workload(scenario: str, cycles: int) -> list[str]:
    return [sys.executable, "-m", "perf.host_path", "--scenario", scenario, "--cycles", str(cycles)]


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ResourceError(name, "the program on PATH", "none", f"install {name}, or leave the flag out")
    return found


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ResourceError(Path(command[0]).name, "exit code 0", f"{done.returncode}: {done.stderr.strip()[-500:]}")
    return done


def by_callgrind(scenario: str) -> float:
    """Instructions per cycle of the scenario's host path. The two runs take minutes each: every import is simulated too.

    Raises:
        ResourceError: valgrind is not installed, or failed.
    """
    valgrind = _tool("valgrind")

    def count(cycles: int) -> int:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "callgrind.out"
            options = ["--tool=callgrind", "--cache-sim=no", f"--callgrind-out-file={out}"]
            _run([valgrind, *options, *_workload(scenario, cycles)])
            return read_callgrind(out.read_text(encoding="utf-8", errors="replace"))

    return per_cycle(count)


def by_perf_stat(scenario: str) -> float:
    """User-mode instructions per cycle of the scenario's host path, counted by the processor.

    Raises:
        ResourceError: perf is not installed, failed, or the machine doesn't count.
    """
    perf = _tool("perf")

    def count(cycles: int) -> int:
        return read_perf_stat(_run([perf, "stat", "-x,", "-e", "instructions:u", *_workload(scenario, cycles)]).stderr)

    return per_cycle(count)

"""Everything that needs a GPU, in one command: ``python -m perf.gpu_check``.

Four parts, in this order, each in processes of its own and within a limit, together in less than ten minutes: ``first`` tries everything
once (``perf.gpu.first``), ``tests`` runs the tests marked ``gpu``, ``latency`` measures cycles (``perf.gpu.latency``), ``speed`` the demo
model (``perf.speed --runtime captured``). ``--only`` runs some of them, arguments behind ``--`` go to pytest.

One file in ``perf/results`` says where it ran and has a line for each probe and check, written as they come; what the parts printed is
beside it in a ``.log``; latency and speed write files of their own. When the first part shows that nothing can work, the others are not
begun (``--keep-going``). Latency of a revision whose checks were not all green is marked as unverified, and README shows none of it; speed
is measured only when they were. On a machine without a CUDA device it says so and claims nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from graphspec.lab.provenance import ROOT, provenance, result_file, write_jsonl
from perf.gpu import first

NO_DEVICE = "no CUDA device: nothing was run, nothing is claimed"
PARTS = ("first", "tests", "latency", "speed")
LIMITS = {"first": 120.0, "tests": 270.0, "latency": 540.0, "speed": 150.0}
"""Most seconds of a part; what is left of the whole time ends it sooner."""
RESERVED = {"tests": 150.0, "latency": 60.0}
"""Seconds a part leaves to those behind it, where they are wanted."""
MINUTES = 9.5
PROCESSES = 12
GRACE = 10.0
"""Seconds between asking a part to end and ending it."""
AGAIN = 75
"""Exit code of ``perf.gpu.latency`` when CUDA gave up on its process and there was more to measure."""
SANITIZER = "tests/gpu/test_gpu.py::test_small_kernels_are_clean_under_the_sanitizer"
SHOWN = 25
"""Failures that are printed."""


def has_cuda() -> bool:
    """Torch is there and sees a device."""
    import torch

    return torch.cuda.is_available()


def append(file: Path, record: Mapping[str, Any]) -> None:
    """One more line; what was written before stays."""
    with file.open("a", encoding="utf-8") as sink:
        sink.write(json.dumps(record, default=str) + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    """Records of a result file; a line that was cut off is left out."""
    records = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
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


def run_command(command: Sequence[str], limit: float, log: Path, *, show: bool, environment: Mapping[str, str] | None = None) -> int | None:
    """Run a command in a process group of its own; everything it prints goes to ``log``, its standard output also here if ``show``.

    Returns:
        Its exit code; None when it was not over after ``limit`` seconds: it is asked to end (SIGINT), then ended.
    """
    late = threading.Event()
    with log.open("ab") as sink:
        sink.write(f"\n=== {' '.join(command[1:])}\n".encode())
        sink.flush()
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **(environment or {})}, stdout=subprocess.PIPE if show else sink, stderr=sink,
            start_new_session=True,
        )  # fmt: skip

        def end() -> None:
            late.set()
            for sign in (signal.SIGINT, signal.SIGKILL):
                try:
                    os.killpg(process.pid, sign)
                    process.wait(GRACE)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue

        timer = threading.Timer(max(1.0, limit), end)
        timer.start()
        try:
            if process.stdout is not None:
                for line in process.stdout:
                    sink.write(line)
                    print(line.decode(errors="replace"), end="", flush=True)
            code = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return None if late.is_set() else code


def run_tests(arguments: Sequence[str], file: Path, log: Path, limit: float) -> int | None:
    """Pytest in a process of its own over ``tests/gpu``, its records appended to ``file``; its exit code, None when the time was over.

    The folder is named because collecting the others imports what a GPU machine may lack (Hydra).
    """
    command = [
        sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-W", "default",
        "-p", "perf.gpu.records", f"--records={file}", "--durations=15",
    ]  # fmt: skip
    if find_spec("xdist") is not None:
        # Most of the time is compilation on the host; the tests themselves leave room on the device for several.
        command += ["--numprocesses", str(min(PROCESSES, os.cpu_count() or 1)), "--dist", "worksteal", "--max-worker-restart", "64"]
    # Every process has a core, and needs no pool of compiling processes beside it.
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return run_command([*command, *arguments], limit, log, show=False, environment=environment)


def was_green(folder: Path, head: Mapping[str, Any]) -> bool:
    """The newest check of this revision on this kind of device, in ``folder``, was green."""
    for file in sorted(folder.glob("*-gpu-check.jsonl"), reverse=True):
        records = read(file)
        if records and all(records[0].get(key) == head.get(key) for key in ("revision", "gpus", "torch")):
            return any(record["kind"] == "summary" and record["green"] for record in records)
    return False


class Check:
    """One run of some parts.

    Args:
        options: of the command line.
        head: where it runs.
    """

    def __init__(self, options: argparse.Namespace, head: dict[str, Any]) -> None:
        self.options, self.head, self.began = options, head, time.perf_counter()
        self.parts: tuple[str, ...] = tuple(part for part in PARTS if part in options.only)
        self.file = result_file(options.out, "gpu-check" if "tests" in self.parts else "gpu-parts")
        self.log = self.file.with_suffix(".log")
        self.green: bool | None = None
        self.bad: list[str] = []
        """Parts that failed or were cut short."""
        write_jsonl(self.file, [head])

    def left(self, part: str) -> float:
        """Seconds ``part`` may take."""
        behind = self.parts[self.parts.index(part) + 1 :]
        reserved = RESERVED.get(part, 0.0) if behind else 0.0
        return min(LIMITS[part], 60 * self.options.minutes - (time.perf_counter() - self.began) - reserved)

    def run(self) -> int:
        """Exit code: 0 when every part did what it should."""
        for part in self.parts:
            limit, began = self.left(part), time.perf_counter()
            if limit < 10:
                self.note(part, None, 0.0, "no time was left")
                continue
            print(f"== {part}, at most {limit:.0f} s", flush=True)
            code, why = getattr(self, part)(limit)
            self.note(part, code, time.perf_counter() - began, why)
            if part == "first" and why == "hopeless" and not self.options.keep_going:
                break
        self.summarise()
        return 1 if self.bad or self.green is False else 0

    def note(self, part: str, code: int | None, seconds: float, why: str) -> None:
        """A line for a part that is over."""
        append(self.file, {"kind": "part", "name": part, "exit_code": code, "seconds": round(seconds, 1), "message": why})
        if code != 0:
            self.bad.append(part)
        print(f"== {part}: exit code {code}, {seconds:.0f} s{', ' + why if why else ''}", flush=True)

    def first(self, limit: float) -> tuple[int, str]:
        """Every probe; ``hopeless`` when one of the essential ones failed."""
        failed: list[str] = []

        def put(record: dict[str, Any]) -> None:
            append(self.file, record)
            if record["outcome"] != "passed":
                failed.append(record["name"])
            with self.log.open("a", encoding="utf-8") as sink:
                sink.write(f"{first.line(record)}\n{record['message'] if record['outcome'] != 'passed' else ''}\n")
            if record["outcome"] != "passed" or record["name"] in first.ESSENTIAL:
                print(first.line(record), flush=True)

        sound = first.try_all(first.probes(), put, min(first.SECONDS, limit))
        hopeless = any(name in first.ESSENTIAL for name in failed)
        return (0 if sound else 1), "hopeless" if hopeless else f"{len(failed)} failed" if failed else ""

    def tests(self, limit: float) -> tuple[int | None, str]:
        """The tests, and the summary that says whether they were green."""
        began, absent = time.perf_counter(), left_out()
        code = run_tests([*(argument for argument, _ in absent), *self.options.pytest], self.file, self.log, limit)
        checks = [record for record in read(self.file) if record["kind"] == "check"]
        counts = Counter(check["outcome"] for check in checks)
        # A run in which nothing was checked is no green run, and neither is one that skipped a check on a machine that could do it.
        passed = code == 0 and counts["passed"] == len(checks) > 0
        self.green = passed and not self.options.pytest
        summary = {"kind": "summary", "green": self.green, "exit_code": code, "seconds": round(time.perf_counter() - began, 1), **counts}
        summary |= {"not_installed": [name for _, name in absent], "selected": self.options.pytest}
        append(self.file, summary)
        why = "" if code is not None else "not over: what is missing below did not run"
        if passed and not self.green:
            # A choice of tests that passes is what was asked for, and no proof of the whole.
            self.green = None
        return (1 if code == 0 and not passed else code), why

    def latency(self, limit: float) -> tuple[int | None, str]:
        """Latency; begun again where it left off when CUDA gave up on its process."""
        verified = self.green if self.green is not None else was_green(self.options.out, self.head)
        file, ends = result_file(self.options.out, "gpu-latency"), time.perf_counter() + limit
        command = [sys.executable, "-m", "perf.gpu.latency", "--file", str(file), *([] if verified else ["--unverified"])]
        while True:
            left, before = ends - time.perf_counter(), file.stat().st_size if file.is_file() else 0
            code = run_command([*command, "--seconds", f"{left - 30:.0f}"], left, self.log, show=True)
            crashed = code is not None and (code == AGAIN or code < 0)
            moved = file.is_file() and file.stat().st_size > before
            if not (crashed and moved) or ends - time.perf_counter() < 45:
                beside = self.flashinfer_ops(ends - time.perf_counter()) if code == 0 else 0
                return (beside if code == 0 else code), "" if verified else "unverified"

    def flashinfer_ops(self, limit: float) -> int | None:
        """Some of FlashInfer's ops beside ours, where it is installed and there is time."""
        if find_spec("flashinfer") is None or limit < 30:
            return 0
        return run_command([sys.executable, "-m", "perf.gpu.flashinfer_ops", "--out", str(self.options.out)], limit, self.log, show=True)

    def speed(self, limit: float) -> tuple[int | None, str]:
        """The demo model's speed, when the checks were green."""
        if not (self.green if self.green is not None else was_green(self.options.out, self.head)):
            return 1, "not measured: the checks were not all green"
        how = ["--runtime", "captured", "--rounds", "3", "--prompts", "4", "--out"]
        command = [sys.executable, "-m", "perf.speed", *how, str(self.options.out)]
        return run_command(command, limit, self.log, show=True), ""

    def summarise(self) -> None:
        """What failed, at the end of the output, where it is read first."""
        records = read(self.file)
        ran = [record for record in records if record["kind"] in ("probe", "check")]
        wrong = [record for record in ran if record["outcome"] != "passed"]
        print(f"\n{'-' * 40}")
        for record in wrong[:SHOWN]:
            words = record["message"].strip().splitlines() or [""]
            # Of a probe the last line of its traceback says most, of a check the first line of its message.
            said = words[-1] if record["kind"] == "probe" else words[0]
            print(f"{record['outcome']:7} {record['name'].removeprefix('tests/gpu/')}: {said[:170]}")
        if len(wrong) > SHOWN:
            print(f"... and {len(wrong) - SHOWN} more")
        for kind, name in (("probe", "probes"), ("check", "checks")):
            counts = Counter(record["outcome"] for record in ran if record["kind"] == kind)
            if counts:
                print(f"{name}: {', '.join(f'{n} {outcome}' for outcome, n in sorted(counts.items()))}")
        slowest = sorted((record for record in ran if record["kind"] == "check"), key=lambda record: -record["seconds"])[:3]
        if slowest:
            print("slowest: " + ", ".join(f"{r['name'].rpartition('::')[2][:60]} {r['seconds']:.0f} s" for r in slowest))
        print(f"parts that failed or are incomplete: {', '.join(self.bad) or 'none'}")
        print(f"written to {self.file}, printed output to {self.log.name}; {time.perf_counter() - self.began:.0f} s in all")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 when every part that was asked for did what it should, or when there is no device to check."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "results", help="folder of the result files (default: perf/results)")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part to run, may be repeated (default: all)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for everything (default: {MINUTES})")
    parser.add_argument("--keep-going", action="store_true", help="begin the other parts even when the first shows that nothing works")
    parser.add_argument("pytest", nargs="*", help="further arguments for pytest, behind --")
    options = parser.parse_args(argv)
    options.only, options.out = options.only or list(PARTS), options.out.resolve()
    if not has_cuda():
        print(NO_DEVICE)
        return 0
    return Check(options, provenance()).run()


if __name__ == "__main__":
    raise SystemExit(main())

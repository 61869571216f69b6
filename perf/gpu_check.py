"""Everything that needs a GPU, in three calls of ten minutes: ``python -m perf.gpu_check --call first``, then ``second``, then ``third``.

The first shows whether this code works on this machine and measures README's rows; the second runs every test; the third measures the whole
engine, batches and baselines. ``perf/gpu/RUNBOOK.md`` explains each outcome. Every part runs in separate processes and within a time that
leaves enough for the parts after it (``perf.gpu.budget``). ``--only`` runs some parts of any call; arguments after ``--`` go to pytest.

All calls write into the folder of ``--out``. The file of a call has its provenance and a line for each probe and check, written as they
come; the output of the parts is next to it in a ``.log``; latency and the whole engine have separate files. After each part, at the end and
on a signal all of them are packed into one archive, ``gpu-results.tar.gz``. Tests that passed and rows that were measured in an earlier
call, of the same code on the same kind of GPU, are left out, unless ``--again`` is given. On a machine without a CUDA device it reports
that and claims nothing.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from graphspec.lab.measure.provenance import ROOT, provenance, result_file, write_jsonl
from perf.gpu import checks, probes
from perf.gpu.budget import CALLS, MINUTES, SHORTEST, Part, all_parts, allowed, needed
from perf.gpu.install import install
from perf.gpu.processes import run_command
from perf.gpu.results import append, gather, pack_results, read, tree_digest

OUT = ROOT / "gpu-results"
"""Default of ``--out``; git ignores it."""
NO_DEVICE = "no CUDA device: nothing was run, nothing is claimed"
AGAIN = 75
"""Exit code of ``perf.gpu.latency`` when CUDA became unusable in its process and there was more to measure."""
LAST_CASE = 30.0
"""Seconds before the end of its part after which latency begins no further case."""
SHOWN = 25
"""Most failures that are printed."""
Outcome = tuple[int | None, str]
"""Exit code of a part, None when its time was over, and a remark."""


def has_cuda() -> bool:
    """Whether torch is installed and sees a device."""
    import torch

    return torch.cuda.is_available()


class Check:
    """One run of some parts.

    Args:
        options: of the command line.
        parts: in order.
        head: provenance.
        clock: returns seconds, like ``time.monotonic``.
        began: start of this process by that clock.
    """

    def __init__(
        self, options: argparse.Namespace, parts: Sequence[Part], head: dict[str, Any], clock: Callable[[], float], began: float
    ) -> None:
        self.options, self.parts, self.head, self.clock, self.began = options, parts, head, clock, began
        self.file = result_file(options.out, "gpu-check")
        self.log = self.file.with_suffix(".log")
        self.green: bool | None = None
        """Whether every test passed; None: none ran, or only a selection, which passed."""
        self.bad: list[str] = []
        """Parts that failed or were cut short."""
        self.unfinished: list[str] = []
        """Probes for which an earlier part had no time."""
        write_jsonl(self.file, [head])

    def run(self) -> int:
        """Run all parts. Exit code 0: all succeeded."""
        for part in self.parts:
            began = self.clock()
            seconds = allowed(self.parts, part.name, began - self.began, self.options.minutes)
            if seconds < SHORTEST:
                self.note(part.name, None, 0.0, "no time was left")
                continue
            print(f"== {part.name}, at most {seconds:.0f} s: {part.about}", flush=True)
            code, why = getattr(self, part.name)(seconds)
            self.note(part.name, code, self.clock() - began, why)
            pack_results(self.options.out)
            if why == "hopeless" and not self.options.keep_going:
                break
        self.summarise()
        return 1 if self.bad or self.green is False else 0

    def note(self, part: str, code: int | None, seconds: float, why: str) -> None:
        """Print and write a line for a part that has ended."""
        append(self.file, {"kind": "part", "name": part, "exit_code": code, "seconds": round(seconds, 1), "message": why})
        if code != 0:
            self.bad.append(part)
        print(f"== {part}: exit code {code}, {seconds:.0f} s{', ' + why if why else ''}", flush=True)

    def probes(self, seconds: float) -> Outcome:
        """The essential probes and those of the kernels; ``hopeless`` if an essential one did not pass."""
        outcomes = self.try_all(probes.early_probes(probes.all_probes()), seconds)
        self.unfinished = [name for name, outcome in outcomes.items() if outcome == "not_run"]
        hopeless = any(outcomes.get(name) != "passed" for name in probes.ESSENTIAL)
        return self.verdict(outcomes) if not hopeless else (1, "hopeless")

    def cache(self, seconds: float) -> Outcome:
        """Compile kernels ahead; one that does not compile shows in the rows and the tests, and stops nothing here."""
        command = [sys.executable, "-m", "perf.gpu.warm", "--seconds", f"{0.8 * seconds:.0f}", "--file", str(self.file)]
        code = run_command(command, seconds, self.log, show=True)
        return 0, "" if code == 0 else "some kernels were not compiled" if code == 1 else f"failed, exit code {code}: see the log"

    def rows(self, seconds: float) -> Outcome:
        """README's rows."""
        return self.latency(["rows"], seconds)

    def core(self, seconds: float) -> Outcome:
        """The tests that decide green."""
        return self.run_tests("core", seconds)

    def rest(self, seconds: float) -> Outcome:
        """The other probes, then stages and nodes of a cycle."""
        ends, early = self.clock() + seconds, probes.early_probes(probes.all_probes())
        outcomes = self.try_all([name for name in probes.all_probes() if name not in early or name in self.unfinished], seconds / 2)
        code, why = self.verdict(outcomes)
        left = ends - self.clock()
        if left < SHORTEST:
            return None, why or "no time for the nodes of cycles"
        inside, message = self.latency(["nodes"], left)
        return (inside if inside != 0 else code), ", ".join(words for words in (why, message) if words)

    def tests(self, seconds: float) -> Outcome:
        """Every test."""
        return self.run_tests("tests", seconds)

    def engine(self, seconds: float) -> Outcome:
        """The whole engine at 8B shapes."""
        command = [sys.executable, "-m", "perf.gpu.engine", "--out", str(self.options.out), "--seconds", f"{seconds - LAST_CASE:.0f}"]
        return run_command(command, seconds, self.log, show=True), ""

    def buckets(self, seconds: float) -> Outcome:
        """JetSpec's shape, baselines, other kernels, batches."""
        return self.latency(["parallel", "baselines", "buckets"], seconds)

    def ops(self, seconds: float) -> Outcome:
        """Some of FlashInfer's ops next to ours."""
        if find_spec("flashinfer") is None:
            return 0, "FlashInfer is not installed"
        return run_command(
            [sys.executable, "-m", "perf.gpu.flashinfer_ops", "--out", str(self.options.out)], seconds, self.log, show=True
        ), ""

    def speed(self, seconds: float) -> Outcome:
        """The demo model's speed, where the checks of this code were green."""
        evidence = gather(self.options.out, self.head)
        if evidence is None or not evidence.verified:
            return 1, "not measured: the checks were not all green"
        how = ["--runtime", "captured", "--rounds", "3", "--prompts", "4", "--out"]
        return run_command([sys.executable, "-m", "perf.speed", *how, str(self.options.out)], seconds, self.log, show=True), ""

    def try_all(self, names: Sequence[str], seconds: float) -> dict[str, str]:
        """Run probes; returns the outcome of each by name."""
        outcomes: dict[str, str] = {}

        def put(record: dict[str, Any]) -> None:
            append(self.file, record)
            outcomes[record["name"]] = record["outcome"]
            passed = record["outcome"] == "passed"
            with self.log.open("a", encoding="utf-8") as sink:
                sink.write(f"{probes.line(record)}\n{'' if passed else record['message']}\n")
            if not passed or record["name"] in probes.ESSENTIAL:
                print(probes.line(record), flush=True)

        probes.try_all(names, put, seconds)
        return outcomes

    @staticmethod
    def verdict(outcomes: dict[str, str]) -> Outcome:
        """Exit code and remark for probes."""
        counts = Counter(outcome for outcome in outcomes.values() if outcome != "passed")
        return (1 if counts else 0), ", ".join(f"{number} {outcome.replace('_', ' ')}" for outcome, number in sorted(counts.items()))

    def run_tests(self, part: str, seconds: float) -> Outcome:
        """Run tests and set :attr:`green`."""
        selected, absent, began = self.options.pytest, checks.left_out(), self.clock()
        evidence = None if selected or self.options.again else gather(self.options.out, self.head)
        before = {name for name, outcome in evidence.outcomes().items() if outcome == "passed"} if evidence else set()
        start = len(read(self.file))
        code = checks.run_tests(part, [*(argument for argument, _ in absent), *selected], before, self.file, self.log, seconds)
        counts = Counter(record["outcome"] for record in read(self.file)[start:] if record["kind"] == "check")
        # A run without a check is not green, nor is one that skipped a check which this machine can run.
        passed = (code == 0 and counts["passed"] == counts.total() > 0) or (code == checks.NO_TESTS and not counts and bool(before))
        green = passed and not selected
        summary = {"kind": "summary", "part": part, "green": green, "exit_code": code, "seconds": round(self.clock() - began, 1), **counts}
        append(self.file, summary | {"known": len(before), "not_installed": [name for _, name in absent], "selected": selected})
        # A selection of tests that passes is a success, but no proof of the whole.
        if not (passed and selected):
            self.green = green and self.green is not False
        why = "not over: what is missing below did not run" if code is None else f"{len(before)} passed before" if before else ""
        return (0 if passed else code or 1) if code is not None else None, why

    def latency(self, groups: list[str], seconds: float) -> Outcome:
        """Latency, in a new process where the last one left off when CUDA became unusable in that one."""
        evidence = None if self.options.again else gather(self.options.out, self.head)
        file, ends = result_file(self.options.out, "gpu-latency"), self.clock() + seconds
        command = [sys.executable, "-m", "perf.gpu.latency", "--file", str(file), "--groups", *groups]
        if evidence is not None and (known := evidence.measured()):
            command += ["--without", *known]
        while True:
            left, before = ends - self.clock(), file.stat().st_size if file.is_file() else 0
            code = run_command([*command, "--seconds", f"{left - LAST_CASE:.0f}"], left, self.log, show=True)
            crashed = code is not None and (code == AGAIN or code < 0)
            moved = file.is_file() and file.stat().st_size > before
            if not (crashed and moved) or ends - self.clock() < LAST_CASE + SHORTEST:
                return code, ""

    def summarise(self) -> None:
        """Print the failures, at the end of the output, where they are read first."""
        ran = [record for record in read(self.file) if record["kind"] in ("probe", "check")]
        wrong = [record for record in ran if record["outcome"] != "passed"]
        print(f"\n{'-' * 40}")
        for record in wrong[:SHOWN]:
            words = record["message"].strip().splitlines() or [""]
            # The most informative line: the last of a probe's traceback, the first of a check's message.
            message = words[-1] if record["kind"] == "probe" else words[0]
            print(f"{record['outcome']:7} {record['name'].removeprefix('tests/gpu/')}: {message[:170]}")
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
        evidence = gather(self.options.out, self.head)
        tests = {part: "green" if one["green"] else "red" for part, one in evidence.summaries.items()} if evidence else {}
        print(f"tests of this code on this kind of GPU: {', '.join(f'{part} {how}' for part, how in tests.items()) or 'none yet'}")
        print(f"written to {self.file}, printed output to {self.log.name}; {self.clock() - self.began:.0f} s in all")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit code 0: every selected part succeeded, or there is no device to check."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in all_parts()]
    calls = "; ".join(f"{call}: {', '.join(part.name for part in parts)}" for call, parts in CALLS.items())
    parser.add_argument("--call", choices=CALLS, default="first", help=f"which parts to run (default: first). {calls}")
    parser.add_argument("--only", action="append", choices=names, help="a part to run instead, of any call; may be repeated")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the result files (default: {OUT.name})")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for everything (default: {MINUTES})")
    parser.add_argument("--again", action="store_true", help="run and measure also what an earlier call has passed or measured")
    parser.add_argument("--keep-going", action="store_true", help="go on even when the probes show that nothing works")
    parser.add_argument("pytest", nargs="*", help="further arguments for pytest, after --")
    options = parser.parse_args(argv)
    parts = [part for part in all_parts() if part.name in options.only] if options.only else CALLS[options.call]
    if options.minutes < needed(parts):
        parser.error(f"--minutes: expected at least {needed(parts):.1f} for these parts, found {options.minutes:g}; --only runs fewer")
    options.out = options.out.resolve()
    install()
    if not has_cuda():
        print(NO_DEVICE)
        return 0
    for sign in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, _end)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        return Check(options, parts, {**provenance(), "tree": tree_digest()}, time.monotonic, began).run()
    finally:
        print(f"results and logs: {pack_results(options.out)}", flush=True)


def _end(sign: int, _: object) -> None:
    """Ends the call as an interrupt does: the running part is killed, and what there is is packed."""
    raise SystemExit(128 + sign)


if __name__ == "__main__":
    raise SystemExit(main())

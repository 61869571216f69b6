"""Measures ``graphspec demo``: seconds to the first streamed token, and to the end.

``python -m perf.first_token`` runs the demo in separate processes, alternating between empty caches (cold: C++ kernels and cycles are
compiled) and the caches of the run before (warm). Times count from the start of the process, imports included. A figure is the median over
rounds. The machine must be idle: compilers use both cores.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphspec.cli.input import DEMO_PROMPT
from graphspec.lab.measure.provenance import provenance, result_file, within_repository, write_jsonl

RESULTS = Path(__file__).parent / "results"
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "TMPDIR")
"""Environment variables of caches of compiled code. Inductor writes its precompiled header to ``TMPDIR``, whatever the first one is."""
STEP = re.compile(r"^(.+): ([0-9.]+) s$", re.MULTILINE)


def run_demo(words: Sequence[str], caches: Path) -> dict[str, Any]:
    """One run: seconds to the first token and to the end, and the times of its steps that the demo prints.

    Args:
        words: arguments after ``demo``.
        caches: folder of all caches.

    Raises:
        RuntimeError: the demo failed, or streamed nothing.
    """
    folders = {name: caches / name.lower() for name in CACHES}
    for folder in folders.values():
        folder.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryFile() as notes:
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "graphspec", "demo", *words],
            stdout=subprocess.PIPE,
            stderr=notes,
            env={**os.environ, **{name: str(folder) for name, folder in folders.items()}},
        )
        assert process.stdout is not None
        text, first = b"", None
        while piece := os.read(process.stdout.fileno(), 4096):
            text += piece
            if first is None and streamed(text.decode(errors="replace")):
                first = time.perf_counter() - started
        code = process.wait()
        total = time.perf_counter() - started
        notes.seek(0)
        output = notes.read().decode(errors="replace")
    if code or first is None:
        raise RuntimeError(f"graphspec demo: exit code {code}: {output[-500:]}")
    return {"first_token_seconds": first, "total_seconds": total, "steps": {what: float(took) for what, took in STEP.findall(output)}}


def streamed(shown: str) -> bool:
    """Whether text after the prompt has been shown."""
    return bool(shown.partition(DEMO_PROMPT)[2].strip())


def measure(words: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Runs in order, cold and warm alternating."""
    found: list[dict[str, Any]] = []
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="graphspec-first-token-") as folder:
            for caches in ("cold", "warm"):
                found.append({"kind": "run", "round": number, "caches": caches, **run_demo(words, Path(folder))})
                print(sentence(found[-1]))
    return found


def medians(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One record for cold and one for warm caches."""
    out = []
    for caches in ("cold", "warm"):
        mine = [run for run in runs if run["caches"] == caches]
        figures = {key: statistics.median(run[key] for run in mine) for key in ("first_token_seconds", "total_seconds")}
        out.append({"kind": "median", "caches": caches, "rounds": len(mine), **figures})
    return out


def sentence(record: Mapping[str, Any]) -> str:
    """A run, or a median, in words."""
    return f"{record['caches']}: first token after {record['first_token_seconds']:.1f} s, all after {record['total_seconds']:.1f} s"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write the records to ``perf/results``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument(
        "words", nargs="*", default=["experiment=demo_chain"], help="of the demo's command line; default: those of `make demo`"
    )
    args = parser.parse_args(argv)
    runs = measure(args.words, args.rounds)
    figures = medians(runs)
    print("\n".join(f"median {sentence(figure)}" for figure in figures))
    settings = {"kind": "settings", **vars(args), "out": within_repository(args.out)}
    write_jsonl(result_file(args.out, "first-token"), [provenance(), settings, *runs, *figures])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

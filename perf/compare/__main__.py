"""``python -m perf.compare BASE HEAD``: how much slower or faster HEAD is than BASE on this machine.

Each revision runs in its own process, from a temporary git worktree (``.`` is the working tree). The two take turns round by round, so that
a slow phase of the machine affects both; both processes are restarted several times, so that differences between two starts are not taken
for differences between revisions. Ratios are time of HEAD over time of BASE: below 1, HEAD is faster.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphspec.errors import GraphspecError
from graphspec.lab.measure.provenance import ROOT, provenance, write_jsonl
from perf.compare.revisions import Checkout, RevisionProcess, checkouts
from perf.compare.verdict import MIN, UNEQUAL, Comparison

CHAIN = {"variant": "eagle3", "num_steps": 4, "topk": 1, "num_draft_tokens": 5}
TREE = {"variant": "eagle3", "num_steps": 5, "topk": 4, "num_draft_tokens": 16}
WORKLOADS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"variant": "none"}, "decode"),
    "chain": (CHAIN, "decode"),
    "tree": (TREE, "decode"),
    "prefill": ({"variant": "none"}, "prefill"),
}
"""Name to the engine's keys, and whether decoding or the prompt is timed."""
TEXTS = (
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def put(self, item):\n        self.items.append(item)\n\n",
    "def read(path):\n    with open(path) as file:\n        for line in file:\n            yield line.strip()\n\n",
)


@dataclass
class Job:
    """The command line's options: how much is measured."""

    base: str
    head: str
    runtime: str = "compiled"
    rounds: int = 6
    starts: int = 3
    max_tokens: int = 64
    prompt_tokens: int = 384
    minimum: float = MIN
    threads: int | None = None
    workloads: list[str] = field(default_factory=lambda: list(WORKLOADS))
    repository: Path = ROOT


@dataclass
class Row:
    """Results of one workload."""

    workload: str
    base: list[list[float]] = field(default_factory=list)
    head: list[list[float]] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)

    def record(self, minimum: float) -> dict[str, Any]:
        """The row as one line of a result file; without ratios where tokens differ."""
        equal = all(tokens == self.tokens[0] for tokens in self.tokens)
        ratios = [[h / b for b, h in zip(*start, strict=True)] for start in zip(self.base, self.head, strict=True)]
        found = Comparison(ratios, equal, minimum)
        figures = {"median": found.median, "p10": found.p10, "p90": found.p90} if equal else dict.fromkeys(("median", "p10", "p90"))
        rounds = len(found.pooled)
        times = {"base_seconds": self.base, "head_seconds": self.head}
        return {"kind": "comparison", "workload": self.workload, "verdict": found.verdict, **figures, "rounds": rounds, **times}


def measure(job: Job, pair: Sequence[Checkout]) -> list[Row]:
    """Run every workload on both sides, which take turns.

    Raises:
        ResourceError: a revision lacks what a workload needs.
    """
    rows = [Row(name) for name in job.workloads]
    prompts: dict[str, list[list[int]]] = {}
    for start in range(1, job.starts + 1):
        with ExitStack() as stack:
            sides = [stack.enter_context(RevisionProcess(checkout, job.threads)) for checkout in pair]
            if not prompts:
                # One side encodes for both, so that a changed tokenizer does not give them different work.
                prompts["decode"] = sides[0].ask("encode", texts=TEXTS, tokens=32)["prompts"]
                prompts["prefill"] = sides[0].ask("encode", texts=TEXTS[:1], tokens=job.prompt_tokens)["prompts"]
            for row in rows:
                keys, kind = WORKLOADS[row.workload]
                engine = {**keys, "runtime": job.runtime, "max_rows": 1, "buckets": [1], "max_context": 512, "dtype": "float32"}
                limit = job.max_tokens if kind == "decode" else 1
                for which, side in zip(("BASE", "HEAD"), sides, strict=True):
                    print(f"start {start} of {job.starts}: {row.workload}, {which} {side.checkout.label}", file=sys.stderr)
                    side.ask("build", name=row.workload, keys=engine, prompts=prompts[kind], max_tokens=limit)
                row.base.append([])
                row.head.append([])
            for turn in range(job.rounds):
                for row in rows:
                    order = [(sides[0], row.base), (sides[1], row.head)]
                    for side, times in order if turn % 2 == 0 else order[::-1]:
                        answer = side.ask("run", name=row.workload)
                        times[-1].append(answer["seconds"])
                        row.tokens.append(answer["tokens"])
    return rows


def table(records: Sequence[dict[str, Any]]) -> str:
    """The records as aligned text."""
    lines = [("workload", "HEAD / BASE", "p10 .. p90", "rounds", "verdict")]
    for r in records:
        figures = (f"{r['median']:.3f}", f"{r['p10']:.3f} .. {r['p90']:.3f}") if r["median"] is not None else ("", "")
        lines.append((r["workload"], *figures, str(r["rounds"]), r["verdict"]))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def parse(argv: Sequence[str] | None) -> tuple[Job, Path | None]:
    """The job and the result file of a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="any revision, or . for the working tree")
    parser.add_argument("head", help="likewise")
    parser.add_argument("--runtime", default="compiled", choices=("eager", "compiled", "captured"))
    parser.add_argument("--rounds", type=int, default=6, help="per start")
    parser.add_argument("--starts", type=int, default=3, help="how often both processes are started")
    parser.add_argument("--max-tokens", type=int, default=64, help="new tokens per prompt of the decoding workloads")
    parser.add_argument("--prompt-tokens", type=int, default=384, help="of workload prefill")
    parser.add_argument("--minimum", type=float, default=MIN, help="share below which a difference is none")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of each process")
    parser.add_argument("--workloads", nargs="+", choices=tuple(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--repository", type=Path, default=ROOT, help="whose revisions; default this one")
    parser.add_argument("--json", type=Path, default=None, help="also write the records here, provenance first")
    args = vars(parser.parse_args(argv))
    for key in ("rounds", "starts", "max_tokens", "prompt_tokens"):
        if args[key] < 1:
            parser.error(f"--{key.replace('_', '-')}: expected at least 1, found {args[key]}")
    file = args.pop("json")
    return Job(**{**args, "repository": args["repository"].resolve()}), file


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; exit code 0, or 1 where tokens differ."""
    job, file = parse(argv)
    # Worktrees are removed at SIGTERM too.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with checkouts(job.repository, job.base, job.head) as pair:
            records = [row.record(job.minimum) for row in measure(job, pair)]
    except GraphspecError as error:
        raise SystemExit(str(error)) from error
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the worktrees are removed") from None
    finally:
        signal.signal(signal.SIGTERM, before)
    for label, checkout in zip(("BASE", "HEAD"), pair, strict=True):
        print(f"{label} {checkout.label} = {checkout.commit}")
    print(table(records))
    if file is not None:
        settings = {key: value for key, value in vars(job).items() if key != "repository"}
        commits = {"base_commit": pair[0].commit, "head_commit": pair[1].commit}
        write_jsonl(file, [provenance(), {"kind": "settings", **settings, **commits}, *records])
    return 1 if any(record["verdict"] == UNEQUAL for record in records) else 0


if __name__ == "__main__":
    raise SystemExit(main())

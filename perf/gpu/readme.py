"""README's GPU section, from the result files: ``python -m perf.gpu.readme`` rewrites it, ``--check`` says whether it is up to date.

What no file shows is said to be not yet run; nobody types a figure in here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from graphspec.lab.provenance import ROOT

RESULTS = ROOT / "perf" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- gpu section: python -m perf.gpu.readme -->", "<!-- end of gpu section -->"
NOT_RUN = "not yet run"

TARGETS: tuple[tuple[str, str, float, str], ...] = (
    ("plain decoding, batch 1", "none", 100 / 85, "<= 1.18x its floor (85 %)"),
    ("cycle, chain (7,1,8), batch 1", "chain (7,1,8)", 1.15, "<= 1.15x its floor"),
    ("cycle, tree (5,4,8), batch 1", "tree (5,4,8)", 1.15, "<= 1.15x its floor"),
    ("cycle, tree (5,4,32), batch 1", "tree (5,4,32)", 1.15, "<= 1.15x its floor"),
)
"""What the project aims at on an H200: Llama-3.1-8B shapes, bfloat16, context 2048, bytes at the bandwidth measured in the same run."""
HOST_MICROSECONDS = 50.0
DRAFT_STEP_MILLISECONDS = 0.30


def newest(name: str) -> list[dict[str, Any]]:
    """Records of the newest result file of that name; none without one, or where the checks of its run were not green.

    Of checks, files of runs that were cut short or were a choice of tests do not count.
    """
    for file in sorted(RESULTS.glob(f"*-{name}.jsonl"), reverse=True):
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        if name != "gpu-check" or any(r["kind"] == "summary" and not r.get("selected") for r in records):
            return records if not records or records[0].get("verified", True) else []
    return []


def _cycle(rows: Sequence[dict[str, Any]], case: str, lanes: int = 1) -> dict[str, Any] | None:
    return next((r for r in rows if r["kind"] == "cycle" and r["case"] == case and r["lanes"] == lanes), None)


def target_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table of aims and what was found."""
    lines = ["| aim on an H200 | bound | found |", "|---|---|---|"]
    for title, case, bound, words in TARGETS:
        row = _cycle(rows, case)
        found = NOT_RUN
        if row:
            ratio = row["milliseconds"] / row["floor_milliseconds"]
            found = f"{ratio:.2f}x ({row['milliseconds']:.2f} ms){'' if ratio <= bound else ', not met'}"
        lines.append(f"| {title} | {words} | {found} |")
    step = next((r for r in rows if r["kind"] == "draft_step"), None)
    found = f"{step['milliseconds']:.3f} ms{'' if step['milliseconds'] <= DRAFT_STEP_MILLISECONDS else ', not met'}" if step else NOT_RUN
    lines.append(f"| one draft step | <= {DRAFT_STEP_MILLISECONDS:.2f} ms | {found} |")
    hosts = [row["host_microseconds"] for _, case, _, _ in TARGETS if (row := _cycle(rows, case))]
    found = f"{max(hosts):.0f} us{'' if max(hosts) <= HOST_MICROSECONDS else ', not met'}" if hosts else NOT_RUN
    lines.append(f"| host time per cycle | <= {HOST_MICROSECONDS:.0f} us | {found} |")
    return lines


def cycle_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Every case that was measured."""
    lines = ["| case | batch | ms | floor | tokens/s at the forced length | host us |", "|---|---:|---:|---:|---:|---:|"]
    for row in rows:
        if row["kind"] == "cycle":
            speed = f"{row['tokens_per_second']:.0f} at {row['acceptance_length']:.1f}{' (synthetic)' if row['synthetic'] else ''}"
            floor = f"{row['percent_of_floor']:.0f} %"
            lines.append(
                f"| {row['case']} | {row['lanes']} | {row['milliseconds']:.2f} | {floor} | {speed} | {row['host_microseconds']:.0f} |"
            )
        elif row["kind"] == "baseline":
            lines.append(f"| {row['case']} | {row['lanes']} | {row['milliseconds']:.2f} | | | |")
        elif row["kind"] == "failed":
            lines.append(f"| {row.get('task', row['case'])} | {row.get('lanes', '')} | failed | | | |")
    return lines


def section(checks: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> str:
    """The whole section."""
    summary = next((r for r in checks if r["kind"] == "summary"), None)
    if summary is None:
        state = (
            "**No GPU has run this code yet.** `make gpu-check` runs every check and every measurement on one; until then, these are aims."
        )
    else:
        head = checks[0]
        gpu = head["gpus"][0]["name"] if head.get("gpus") else "a GPU"
        red = summary.get("failed", 0) + summary.get("error", 0)
        verdict = "all green" if summary["green"] else f"{red} red"
        where = f"one {gpu}, {head['date'][:10]}, revision {str(head['revision'])[:12]}"
        state = f"`make gpu-check` on {where}: {summary.get('passed', 0)} checks passed, {verdict}."
        if absent := summary.get("not_installed"):
            state += f" Left out, not installed there: {', '.join(absent)}."
    parts = [state, "\n".join(target_lines(rows))]
    if rows:
        bandwidth = next((r["bytes_per_second"] for r in rows if r["kind"] == "bandwidth"), 0.0)
        parts.append(f"Copy bandwidth in that run: {bandwidth / 1e12:.2f} TB/s. Weights are random; acceptance is forced where it says so.")
        parts.append("\n".join(cycle_lines(rows)))
    return "\n\n".join(parts)


def rewritten(readme: str) -> str:
    """``readme`` with the section between its marks made anew.

    Raises:
        SystemExit: the marks are not there.
    """
    before, mark, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"README.md: expected {BEGIN} and {END}, found no such marks")
    return f"{before}{BEGIN}\n\n{section(newest('gpu-check'), newest('gpu-latency'))}\n\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 with ``--check`` when the section differs from what the files say."""
    parser = argparse.ArgumentParser(prog="python -m perf.gpu.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    found = README.read_text(encoding="utf-8")
    wanted = rewritten(found)
    if options.check:
        return int(found != wanted)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

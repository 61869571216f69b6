"""Write the GPU section of docs/benchmarks.md from the result files: ``python -m perf.gpu.readme``; ``--check``: is it up to date?

A figure that is in no file is shown as not yet run; none is typed in by hand. Checks and latency come from different calls of ``make
gpu-check``: figures are shown if the checks of the same code on the same kind of GPU, with the same torch and Triton, were green. Every
kind of GPU has a column of its own.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import Any

from graphspec.lab.measure.provenance import ROOT
from perf.gpu.results import Evidence, gather_kinds, gpu_name

RESULTS = ROOT / "perf" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- gpu section: python -m perf.gpu.readme -->", "<!-- end of gpu section -->"
NOT_RUN = "not yet run"

TARGETS: tuple[tuple[str, str, float, str], ...] = (
    ("plain decoding, batch 1", "none", 100 / 85, "<= 1.18x its floor (85 %)"),
    ("cycle, chain (7,1,8), batch 1", "chain (7,1,8)", 1.15, "<= 1.15x its floor"),
    ("cycle, tree (5,4,8), batch 1", "tree (5,4,8)", 1.15, "<= 1.15x its floor"),
    ("cycle, tree (5,4,32), batch 1", "tree (5,4,32)", 1.15, "<= 1.15x its floor"),
    ("cycle, JetSpec (8,7,64) over Qwen3-8B, batch 1", "jetspec (8,7,64)", 1.2, "<= 1.20x its floor"),
    ("cycle, JetSpec (16,7,128) over Qwen3-8B, batch 1", "jetspec (16,7,128)", 1.2, "<= 1.20x its floor"),
)
"""The project's aims on an H200: bfloat16, context 2048, bytes at the bandwidth measured in the same run; Llama-3.1-8B shapes, unless a
row names another model."""
HOST_MICROSECONDS = 50.0
DRAFT_STEP_MILLISECONDS = 0.30


def _cycle(rows: Sequence[dict[str, Any]], case: str, lanes: int = 1) -> dict[str, Any] | None:
    return next((r for r in rows if r["kind"] == "cycle" and r["case"] == case and r["lanes"] == lanes), None)


def target_lines(found: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> list[str]:
    """The table of aims and results, a column for each GPU: its name, and its rows. The floors are of its own bandwidth."""
    columns = [(f"found{f' on {gpu}' if gpu else ''}", rows) for gpu, rows in found] or [("found", [])]
    lines = [f"| aim on an H200 | bound | {' | '.join(title for title, _ in columns)} |", "|---|---" + "|---" * len(columns) + "|"]
    for title, case, bound, words in TARGETS:
        lines.append(_line(title, words, [_ratio(_cycle(rows, case), bound) for _, rows in columns]))
    steps = [next((r["milliseconds"] for r in rows if r["kind"] == "draft_step"), None) for _, rows in columns]
    step, host = f"<= {DRAFT_STEP_MILLISECONDS:.2f} ms", f"<= {HOST_MICROSECONDS:.0f} us"
    lines.append(_line("one draft step", step, [_bounded(each, DRAFT_STEP_MILLISECONDS, ".3f", "ms") for each in steps]))
    hosts = [[row["host_microseconds"] for _, case, _, _ in TARGETS if (row := _cycle(rows, case))] for _, rows in columns]
    lines.append(_line("host time per cycle", host, [_bounded(max(each, default=None), HOST_MICROSECONDS, ".0f", "us") for each in hosts]))
    return lines


def _line(*cells: str | Sequence[str]) -> str:
    flat = [cell for part in cells for cell in ([part] if isinstance(part, str) else part)]
    return f"| {' | '.join(flat)} |"


def _ratio(row: dict[str, Any] | None, bound: float) -> str:
    if row is None:
        return NOT_RUN
    ratio = row["milliseconds"] / row["floor_milliseconds"]
    return f"{ratio:.2f}x ({row['milliseconds']:.2f} ms){'' if ratio <= bound else ', not met'}"


def _bounded(value: float | None, bound: float, digits: str, unit: str) -> str:
    return NOT_RUN if value is None else f"{value:{digits}} {unit}{'' if value <= bound else ', not met'}"


def cycle_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Every case that was measured."""
    lines = ["| case | batch | ms | floor | tokens/s at the accepted length | host us |", "|---|---:|---:|---:|---:|---:|"]
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


def engine_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The whole engine, and the first token of a long prompt."""
    lines = ["| whole engine | batch | found |", "|---|---:|---|"]
    for row in rows:
        if row["kind"] == "engine":
            speed = f"{row['tokens_per_second']:.0f} tokens/s at {row['acceptance_length']:.1f}{' (synthetic)' if row['synthetic'] else ''}"
            flight = f"{row['cycles_in_flight']} cycles in flight, {row['percent_of_replay']:.0f} % of replay alone"
            lines.append(f"| {row['case']} | {row['lanes']} | {speed}, {flight} |")
        elif row["kind"] == "first_token":
            lines.append(f"| first token, {row['case']} | 1 | {row['milliseconds']:.1f} ms for a prompt of {row['prompt_tokens']} tokens |")
        elif row["kind"] == "failed":
            lines.append(f"| {row['task']} | | failed |")
    return lines


def state(evidence: Evidence | None) -> str:
    """A sentence on the checks: where they ran, and their outcome."""
    if evidence is None:
        return (
            "**No GPU has run this code yet.** `make gpu-check` runs every check and every measurement on one; until then, these are aims."
        )
    head, summaries, outcomes = evidence.head, evidence.summaries, Counter(evidence.outcomes().values())
    red = outcomes["failed"] + outcomes["error"]
    verdict = "all green" if evidence.verified else f"{red} red" if red else "not green: some were skipped or did not run"
    where = f"one {gpu_name(head) or 'GPU'}, {head['date'][:10]}, revision {str(head['revision'])[:12]}"
    if not summaries:
        return f"`make gpu-check` on {where}: it has not come to the checks, so no figure of it is shown."
    text = f"`make gpu-check` on {where}: {outcomes['passed']} checks passed, {verdict}."
    if "tests" not in summaries:
        text += " These are the core checks; the others have not run there."
    absent = sorted({name for summary in summaries.values() for name in summary["not_installed"]})
    return text + (f" Left out, not installed there: {', '.join(absent)}." if absent else "")


def section(found: Sequence[Evidence]) -> str:
    """The whole section, from what belongs together on each kind of GPU."""
    shown = [evidence for evidence in found if evidence.verified]
    parts = [state(evidence) for evidence in found] or [state(None)]
    parts.append("\n".join(target_lines([(gpu_name(evidence.head), evidence.rows) for evidence in shown])))
    for evidence in shown:
        gpu, rows = gpu_name(evidence.head), evidence.rows
        if rows:
            widths = sorted({f"{row['bytes_per_second'] / 1e12:.2f}" for row in rows if row["kind"] == "bandwidth"})
            measured = (
                f"Copy bandwidth in the runs of these: {' to '.join(dict.fromkeys((widths[0], widths[-1])))} TB/s. " if widths else ""
            )
            where = f"On {gpu}. " if gpu else ""
            parts.append(f"{where}{measured}Weights are random; acceptance is forced where it says so.")
            parts.append("\n".join(cycle_lines(rows)))
        if evidence.engine:
            parts.append("\n".join(engine_lines(evidence.engine)))
    return "\n\n".join(parts)


def rewritten(page: str) -> str:
    """``page`` with the section between its marks rewritten.

    Raises:
        SystemExit: there are no such marks.
    """
    before, mark, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"docs/benchmarks.md: expected {BEGIN} and {END}, found no such marks")
    return f"{before}{BEGIN}\n\n{section(gather_kinds(RESULTS))}\n\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit code 1: with ``--check``, the section differs from the files."""
    parser = argparse.ArgumentParser(prog="python -m perf.gpu.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    found = PAGE.read_text(encoding="utf-8")
    wanted = rewritten(found)
    if options.check:
        return int(found != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

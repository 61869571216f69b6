"""``graphspec profile``: the configured engine and baselines, each in its own process. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ...config.command_options import CLOSED, LaunchConfig
from ...config.paths import check_writable, user_path
from ...config.schema import AcceptConfig
from ...errors import ConfigError
from ...facts.hub import pinned
from ...host import terminal
from ...host.core_wait import busy_caution
from ...host.terminal import say, status
from .compare import Bench, Measured, Say, records, set_verdicts
from .equality import Reference, Verdict, judge
from .open_loop import describe, read_trace
from .open_loop import table as open_table
from .provenance import result_file, write_jsonl
from .sides import PLAIN, SideConfig, plain_config, reference_of, sides_of
from .workload import file_texts

SECRETS = ("profile.api_key=",)
"""Prefixes of command-line words whose values are left out of result files."""


def run(config: LaunchConfig) -> int:
    """Measure, print a table (or one JSON document) and write a result file.

    Returns:
        1 when a side's output was wrong, else 0.

    Raises:
        GraphspecError: a side refused, died or took too long.
    """
    config = pinned(config)
    if config.workload.source == "file":
        file_texts(config.workload)
    if config.workload.trace is not None:
        read_trace(config.workload)
    trace = _writable(config.profile.trace)
    check_writable("results", config.results, folder=True)
    sides = sides_of(config)
    with status() as progress:
        measured, rows = profile(config, sides, progress)
    file = _write(config, measured[0], rows)
    if trace is not None:
        document = {"traceEvents": measured[0].trace, "displayTimeUnit": "ms"}
        write_jsonl(trace, [document], "profile.trace")
    found = [row for row in rows if row["kind"] == "side"]
    if config.format == "json":
        print(json.dumps({"file": str(file), "records": rows}, default=str))
    else:
        draw = table if config.workload.arrivals == CLOSED else open_table
        Console().print(draw(found, case_name(config, measured[0])))
        for row in found:
            mark = " SYNTHETIC acceptance, the text means nothing." if row["synthetic"] else " LOSSY acceptance." if row["lossy"] else ""
            say(f"{row['side']}: {row['equality']}.{mark}")
        if (busy := busy_caution({row["side"]: row["core_wait"] for row in found})) is not None:
            say(busy)
        say(f"written to {file}")
    return 1 if any(row["equal"] is False for row in found) else 0


def profile(config: LaunchConfig, sides: Sequence[SideConfig], say: Say = lambda text: None) -> tuple[list[Measured], list[dict[str, Any]]]:
    """Measure ``sides``, the first of them the subject, and judge them.

    Returns:
        What was measured, and the records (kinds ``side`` and ``generation``).
    """
    bench = Bench(config.profile, say)
    plain = reference_of(sides)
    reference = bench.reference(plain) if plain is not None else None
    measured = bench.measure(sides)
    checks = synthetic_checks(bench, measured, reference) if measured[0].about["synthetic"] else []
    set_verdicts(measured, reference, checks)
    return measured, records(case_name(config, measured[0]), measured)


def synthetic_checks(bench: Bench, measured: Sequence[Measured], reference: Measured | None) -> list[dict[str, Any]]:
    """Checks in place of equality where acceptance is forced.

    Two checks: the configured runtime equals its stages on the launches of this configuration, and an engine of the same shapes that
    accepts drafts only when they are right gives the tokens of plain decoding.
    """
    subject = measured[0].side
    twin = bench.reference(SideConfig(subject.role, replace(subject.config, accept=AcceptConfig())))
    plain = reference or next((one for one in measured if one.side.role == PLAIN), None)
    if plain is None:
        plain = bench.reference(SideConfig(PLAIN, plain_config(subject.config)))
    verdict: Verdict = judge(twin.side, twin.about, twin.outputs, Reference(*plain.outputs[0]), ())
    exactness = {"equal": verdict.equal is True, "sentence": f"the same shapes with rule match: {verdict.sentence}"}
    return [bench.check(subject), exactness]


def case_name(config: LaunchConfig, subject: Measured) -> str:
    """``eagle3 tree (5,4,16) on demo: held_out, 64 + 128 tokens, batch 1, greedy``."""
    workload, heat = config.workload, config.sampling.stated_temperature
    heat_text = f"temperature {heat:g}" if heat else "greedy"
    lengths = f"{round(subject.about['input_tokens'])} + {workload.output_tokens} tokens"
    model = Path(config.model.path).name
    load = "" if workload.arrivals == CLOSED else f", {describe(workload)}"
    return f"{subject.about['label']} on {model}: {workload.source}, {lengths}, batch {workload.batch}, {heat_text}{load}"


def _writable(name: str | None) -> Path | None:
    """The path of the trace, checked before anything is measured."""
    if name is None:
        return None
    path = check_writable("profile.trace", name)
    if not path.parent.is_dir():
        raise ConfigError("profile.trace", "a file in a folder that exists", repr(name))
    return path


def _write(config: LaunchConfig, subject: Measured, rows: Sequence[dict[str, Any]]) -> Path:
    """The records after a provenance record; secrets are left out."""
    head: dict[str, Any] = subject.about["provenance"]
    if config.profile.api_key is not None:
        head["config"]["profile"]["api_key"] = "***"
    head["command"] = [next((key + "***" for key in SECRETS if word.startswith(key)), word) for word in head["command"]]
    file = result_file(user_path("results", config.results), "profile")
    number = 1
    while file.exists():
        # Several cases of a sweep may end within one second.
        number += 1
        file = file.with_name(f"{file.stem.removesuffix(f'-{number - 1}')}-{number}.jsonl")
    if config.profile.trace is not None:
        # Relative, so that the two can be moved together.
        head["trace"] = os.path.relpath(user_path("profile.trace", config.profile.trace), file.parent)
    write_jsonl(file, [head, *rows])
    return file


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """All sides in one table; medians over rounds, latencies over the requests of all rounds."""
    cells = []
    for row in rows:
        if row["equal"] is False:
            cells.append((row["side"], *[""] * 7, "NO"))
            continue
        ratio = f"{row['ratio']['median']:.2f}x" if row["ratio"] else ""
        latencies = (f"{row[key][share]:.2f}" if row[key] else "" for key, share in LATENCIES)
        length = f"{row['acceptance_length']:.2f}" if row["acceptance_length"] else ""
        speed = f"{row['tokens_per_second']['median']:.1f}"
        cells.append((row["side"], speed, ratio, *latencies, length, "yes" if row["equal"] else "-"))
    named = dict.fromkeys(row["ratio"]["to"] for row in rows if row.get("ratio"))
    caption = "times in ms, p50 or as said; length: new tokens per cycle"
    caption += f"; ratio: tokens/s by those of {' and '.join(named)}" if named else ""
    headings = ("side", "tokens/s", "ratio", "TTFT", "TPOT", "ITL", "ITL p99", "length", "equal")
    return terminal.table(title, headings, cells, ("side", "equal"), caption=caption)


LATENCIES = (("ttft_ms", "p50"), ("tpot_ms", "p50"), ("itl_ms", "p50"), ("itl_ms", "p99"))

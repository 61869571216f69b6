"""``graphspec profile``: the configured engine and baselines, each in its own process. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...config.command_options import CLOSED, LaunchConfig
from ...config.paths import check_writable, user_path
from ...config.schema import AcceptConfig
from ...errors import ConfigError
from ...facts.hub import pinned
from ...host.core_wait import busy_caution
from .compare import Bench, Measured, Say, Schedule, records, set_verdicts
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
    err = Console(stderr=True)
    if err.is_terminal:
        with err.status("") as status:
            measured, rows = profile(config, sides, status.update)
    else:
        measured, rows = profile(config, sides)
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
            Console().print(Text(f"{row['side']}: {row['equality']}.{mark}"), soft_wrap=True)
            if row.get("next_to_grammar"):
                Console().print(Text(f"{row['side']}: {next_to_grammar(row['next_to_grammar'])}."), soft_wrap=True)
        if (busy := busy_caution({row["side"]: row["core_wait"] for row in found})) is not None:
            Console().print(Text(busy), soft_wrap=True)
        Console().print(Text(f"written to {file}"), soft_wrap=True)
    return 1 if any(row["equal"] is False or (row.get("next_to_grammar") or {}).get("equal") is False for row in found) else 0


def profile(config: LaunchConfig, sides: Sequence[SideConfig], say: Say = lambda text: None) -> tuple[list[Measured], list[dict[str, Any]]]:
    """Measure ``sides``, the first of them the subject, and judge them.

    Returns:
        What was measured, and the records (kinds ``side`` and ``generation``).
    """
    options = config.profile
    schedule = Schedule(
        rounds=options.rounds,
        warm_up_seconds=options.warm_up_seconds,
        interleave=options.interleave,
        timeout_seconds=options.timeout_seconds,
        cycles=True,
        generations=options.generations,
        trace=options.trace is not None,
    )
    bench = Bench(schedule, say)
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


def next_to_grammar(found: dict[str, Any]) -> str:
    """A record's ``next_to_grammar`` as a sentence without its full stop."""
    count, others = found["structured_rows"], found["rows"] - found["structured_rows"]
    where = f"next to {count} row{'s' * (count > 1)} with a grammar, {others} without {'have' if others > 1 else 'has'}"
    if found["equal"] is False:
        return f"{where} OTHER TOKENS than next to the same without a grammar"
    times = " against ".join(f"{found['tpot_ms'][name]['median']:.2f}" for name in ("with", "without"))
    note = "" if found["masked"] == 1 else f"; only {100 * found['masked']:.0f} % of their cycles had one"
    return f"{where} {found['ratio']['median']:.2f} times the time per token, {times} ms{note}"


def case_name(config: LaunchConfig, subject: Measured) -> str:
    """``eagle3 tree (5,4,16) on demo: held_out, 64 + 128 tokens, batch 1, greedy``."""
    workload, heat = config.workload, config.sampling.stated_temperature
    heat_text = f"temperature {heat:g}" if heat else "greedy"
    lengths = f"{round(subject.about['input_tokens'])} + {workload.output_tokens} tokens"
    model = Path(config.model.path).name
    load = "" if workload.arrivals == CLOSED else f", {describe(workload)}"
    return f"{subject.about['label']} on {model}: {workload.source}, {lengths}, batch {workload.batch}, {heat_text}{load}"


def _writable(name: str | None) -> Path | None:
    """The path of the trace, checked before anything is measured.

    Raises:
        ConfigError: its folder doesn't exist or can't be written.
    """
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
    write_jsonl(file, [head, *rows])
    return file


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """All sides in one table; medians over rounds, latencies over the requests of all rounds."""
    shown = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    shown.add_column("side")
    for heading in ("tokens/s", "ratio", "TTFT", "TPOT", "ITL", "ITL p99", "length"):
        shown.add_column(heading, justify="right", no_wrap=True)
    next_to = any(row.get("next_to_grammar") for row in rows)
    if next_to:
        shown.add_column("grammar", justify="right", no_wrap=True)
    shown.add_column("equal", no_wrap=True)
    shown.caption = "times in ms, p50 or as said; length: new tokens per cycle" + _ratio_to(rows)
    shown.caption += "; grammar: TPOT of rows without one next to rows with one, by that next to the same rows without" if next_to else ""
    for row in rows:
        if row["equal"] is False:
            shown.add_row(Text(row["side"]), *[""] * (7 + next_to), Text("NO"))
            continue
        ratio = f"{row['ratio']['median']:.2f}x" if row["ratio"] else ""
        latencies = [_milliseconds(row[f"{name}_ms"], share) for name, share in LATENCIES]
        length = f"{row['acceptance_length']:.2f}" if row["acceptance_length"] else ""
        equal = "yes" if row["equal"] else "-"
        paid = [_paid(row.get("next_to_grammar"))] if next_to else []
        shown.add_row(Text(row["side"]), f"{row['tokens_per_second']['median']:.1f}", Text(ratio), *latencies, length, *paid, equal)
    return shown


LATENCIES = (("ttft", "p50"), ("tpot", "p50"), ("itl", "p50"), ("itl", "p99"))


def _milliseconds(found: dict[str, float] | None, share: str) -> str:
    return f"{found[share]:.2f}" if found is not None else ""


def _paid(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    return f"{found['ratio']['median']:.2f}x" if found["ratio"] is not None else "NO"


def _ratio_to(rows: Sequence[dict[str, Any]]) -> str:
    named = dict.fromkeys(row["ratio"]["to"] for row in rows if row.get("ratio"))
    return f"; ratio: tokens/s by those of {' and '.join(named)}" if named else ""

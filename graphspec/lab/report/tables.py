"""The tables of the report, its numbers, and its text on provenance and caveats. Imports neither torch nor plotly."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import spell_bytes
from ...host.core_wait import busy_caution
from ..measure.results import ONCE, SPEEDS, Line, Results, SideRecord, hardware, model, on_cpu, unique

DASH = "\N{EN DASH}"
"""Shown in place of a missing value."""
TIMES = "\N{MULTIPLICATION SIGN}"
LONG_FORMS = {
    "S, K, N": "draft depth, branches of a step, tokens verified",
    "TTFT": "time to first token",
    "TPOT": "time per output token after the first",
    "ITL": "gap between two arrivals",
    "E2E": "whole request",
    ONCE: "measured in one round: nothing says how far the figures vary",
}
"""Meanings of the abbreviations on the page."""
VERSIONS = ("graphspec", "torch", "cuda", "driver", "triton", "transformers", "numpy", "python", "platform")
WORDS = re.compile(r"[A-Za-z]{4}")
"""Matches a cell of words; figures and units do not match."""
MAX_NAMES = 3
"""Maximum number of sides that a caveat names before it is unfolded."""
SECRETS = ("api_key",)
"""Keys of a recorded configuration whose values are not shown."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under headings; the first column names the row.

    Attributes:
        sides: of the rows, if each is one side, whose marks follow its name.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    title: str = ""
    note: str = ""
    sides: Sequence[SideRecord] = ()

    @property
    def words(self) -> list[bool]:
        """Per column, whether it has words, not figures and units."""
        return [any(WORDS.search(row[column]) for row in self.rows) for column in range(len(self.headings))]


@dataclass(frozen=True, slots=True)
class Notice:
    """A caveat: a short label, a sentence, and details that unfold on request."""

    lead: str
    text: str
    more: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """Provenance of one run: a title, names and values, and its configuration by name as JSON."""

    title: str
    rows: Sequence[tuple[str, object]]
    configurations: Sequence[tuple[str, str]]


def sides(results: Results) -> Table:
    """One row per side; those without a speed have the reason."""
    headings = ["side", "batch", "rounds", "tokens/s", "per user", "ratio", "acceptance length", "drafted/s", "accepted/s", "cycle, ms"]
    headings += ["% of floor", "runtime", "dtype", "T", "equal to plain decoding"]
    rows = []
    for side in results.sides:
        ratio = side.get("ratio", {})
        ratio_text = f"{spell(side.number('ratio', 'median'))}{TIMES} {ratio.get('to')}" if ratio else DASH
        equal = {True: "yes", False: "no"}.get(side.record["equal"], "not compared")
        keys = ("acceptance_length", "drafted_per_second", "accepted_per_second")
        rows.append([
            side.label, str(side.batch), str(side.rounds or DASH), *(spell(side.number(key, "median")) for key in SPEEDS[:2]), ratio_text,
            *(spell(side.number(key)) for key in keys), spell(side.number("cycle_ms", "median")),
            spell(side.percent_of_floor),
            *(str(side.get(key, DASH)) for key in ("runtime", "dtype", "temperature")), f"{equal}: {side.get('equality', DASH)}",
        ])  # fmt: skip
    return Table(headings, rows, "Every side that was measured", sides=results.sides)


def loads(results: Results) -> Table:
    """Sides of open loops: how requests were served under the load."""
    known = sorted((side for side in results.sides if side.open_loop), key=lambda side: side.open_loop.get("offered_per_second") or 0.0)
    rows = []
    for side in known:
        served, gap = side.open_loop.get("goodput") or {}, side.open_loop.get("gap_while_long_prompts_ms") or {}
        times = [spell(side.number(key, part)) for key in ("ttft_ms", "itl_ms") for part in ("p50", "p99")]
        limits = f"{spell(served.get('ttft_limit_ms'))} / {spell(served.get('itl_limit_ms'))}"
        requests = f"{served.get('within', DASH)} of {served.get('requests', DASH)}"
        offered = spell(side.open_loop.get("offered_per_second"))
        rows.append([side.label, str(side.get("arrivals", DASH)), offered, requests, limits, *times, spell(gap.get("p99"))])
    headings = ["side", "arrivals", "offered/s", "in time", "limits TTFT / ITL, ms", "TTFT p50, ms"]
    headings += ["p99", "ITL p50, ms", "p99", "gap p99, ms"]
    note = "in time: requests within both limits. gap: between tokens of a request while a long prompt of another waits or is read."
    return Table(headings, rows, "How requests were served under given loads", "Open loops", note if rows else "", known)


def memory(results: Results) -> Table:
    """Memory of each side."""
    known = [side for side in results.sides if side.get("memory")]
    names = unique(_short_name(line) for side in known for line in side.record["memory"])
    rows = []
    for side in known:
        lines = side.record["memory"]
        total = sum(line.get("bytes") or 0 for line in lines)
        parts = ([line for line in lines if _short_name(line) == name] for name in names)
        rows.append([f"{side.label}, batch {side.batch}", spell_bytes(total), *map(_part, parts)])
    note = "~ marks estimates." if any("~" in cell for row in rows for cell in row[2:]) else ""
    return Table(["side", "together", *names], rows, "Memory", "Memory", note, known)


def _short_name(line: Mapping[str, Any]) -> str:
    """A name without details that differ from side to side, such as the pages of a pool."""
    return str(line["name"]).partition(",")[0]


def _part(lines: Sequence[Mapping[str, Any]]) -> str:
    sizes = [line["bytes"] for line in lines if line.get("bytes") is not None]
    return ("~" if any(line.get("estimate") for line in lines) else "") + spell_bytes(sum(sizes)) if sizes else DASH


def build(results: Results) -> Table:
    """Build time and memory of each program."""
    programs = [(side, program) for side in results.sides for program in side.get("build", [])]
    rows = [
        [f"{side.label}, batch {side.batch}", str(program["program"]), spell(program.get("warm_up_s")), spell(program.get("capture_s")),
         spell_bytes(program["bytes"]) if program.get("bytes") is not None else DASH]
        for side, program in programs
    ]  # fmt: skip
    headings = ["side", "program", "warm-up, s", "capture, s", "memory"]
    return Table(headings, rows, "Programs built", "Build", sides=[side for side, _ in programs])


def host(results: Results) -> Table:
    """Host time, gaps and graph nodes of a cycle; where one was not measured, the reason."""
    keys = ("host_us", "gap_ms", "nodes")
    known = [side for side in results.sides if any(side.number(key) is not None for key in keys)]
    rows = [[f"{side.label}, batch {side.batch}", *(spell(side.number(key)) for key in keys)] for side in known]
    headings = ["side", "host, µs", "gaps, ms", "graph nodes"]
    reasons = []
    for side in known:
        why = side.get("not_measured", {})
        reasons.append("; ".join(f"{', '.join(key for key in why if why[key] == reason)}: {reason}" for reason in unique(why.values())))
    if len(set(reasons)) > 1:
        headings.append("not measured")
        rows = [[*row, reason] for row, reason in zip(rows, reasons, strict=True)]
        reasons = []
    note = f"Not measured: {reasons[0]}." if any(reasons) else ""
    return Table(headings, rows, "Host time of a cycle", "Host", note, sides=known)


def plans(results: Results) -> Table:
    """Predictions of ``graphspec plan``."""
    keys = ("floor_ms", "predicted_ms", "tokens_per_second", "plain_tokens_per_second", "ratio", "acceptance_length")
    rows = [
        [" ".join(str(line.record[key]) for key in ("variant", "model", "hardware") if line.get(key)) or "plan",
         str(line.record["batch"]), str(line.get("shape", DASH)), *(spell(line.get(key)) for key in keys),
         {True: "yes", False: "no"}.get(line.get("fits"), DASH)]
        for line in results.plans
    ]  # fmt: skip
    headings = ["what", "batch", "S, K, N", "floor, ms", "predicted, ms", "tokens/s"]
    headings += ["plain tokens/s", "ratio", "acceptance length", "fits"]
    return Table(headings, rows, "Planned shapes; predictions, not measurements", "Planned")


def facts(results: Results) -> list[tuple[str, str]]:
    """The line under the title: the measurement, its hardware and date."""
    found = results.provenances
    places = unique(side.hardware for side in results.sides) or unique(hardware(record) for record in found)
    dates = sorted(str(record["date"])[:10] for record in found if record.get("date"))
    when = " to ".join(unique([dates[0], dates[-1]])) if dates else "date unknown"
    work = unique(_work(side) for side in results.sides)
    batches = sorted({side.batch for side in results.sides})
    return [
        (name, text)
        for name, text in (
            ("Model", ", ".join(unique(model(record) for record in found))),
            ("On", "; ".join(places)),
            ("Work", "; ".join(work[:3]) + (f" and {len(work) - 3} others" if len(work) > 3 else "")),
            ("Batch", ", ".join(map(str, batches))),
            ("When", when),
        )
        if text
    ]


def _work(side: SideRecord) -> str:
    record = side.record
    if record.get("requests") is None:
        return ""
    temperature = record.get("temperature")
    sampling = "" if not isinstance(temperature, int | float) else ", greedy" if temperature == 0 else f", T={temperature:g}"
    lengths = [spell_count(side.number(key)) for key in ("input_tokens", "output_tokens")]
    return f"{plural(record['requests'], 'request')}, {lengths[0]} tokens in, {lengths[1]} out{sampling}"


def notices(results: Results) -> list[Notice]:
    """Caveats that apply."""
    cautions = []
    local = [side for side in results.sides if side.get("device")]
    if any(on_cpu(side) for side in local):
        which = "These figures come" if all(on_cpu(side) for side in local) else "Some of these figures come"
        cautions.append(Notice("CPU.", f"{which} from a CPU: they say how the program behaves, not what a GPU will do."))
    open_ = [side for side in results.sides if side.equal is None and not side.get("synthetic") and not side.get("lossy")]
    for lead, sentence, group in (
        ("Synthetic.", "Acceptance was set, not earned, in", [side for side in results.sides if side.get("synthetic")]),
        ("Lossy.", "The accept rule may change what is generated in", [side for side in results.sides if side.get("lossy")]),
        ("Not equal.", "Output differs from plain decoding, so no speed is shown, in", [s for s in results.sides if s.equal is False]),
        ("Not compared.", "Tokens could not be compared with plain decoding in", open_),
        ("One round.", f"Nothing says how far the figures marked {ONCE} vary, those of", [s for s in results.sides if ONCE in s.marks]),
    ):
        names = unique(side.label for side in group)
        if len(names) > MAX_NAMES:
            cautions.append(Notice(lead, f"{sentence} {len(names)} sides.", f"{', '.join(names)}."))
        elif names:
            cautions.append(Notice(lead, f"{sentence}: {', '.join(names)}."))
    waited: dict[str, float | None] = {f"{side.label}, batch {side.batch}": side.number("core_wait") for side in results.sides}
    if (busy := busy_caution(waited)) is not None:
        short, _, more = busy.partition(". ")
        cautions.append(Notice("Busy machine.", f"{short}.", more))
    if results.replaced:
        cautions.append(Notice("", f"{plural(results.replaced, 'older measurement')} of the same sides left out."))
    return cautions


def origins(results: Results) -> list[Origin]:
    """Versions, hardware and configuration of every run."""
    found = []
    for record in results.provenances:
        rows = [("date", record.get("date")), ("command", _command(record.get("command"))), ("revision", record.get("revision"))]
        rows += [("hardware", hardware(record)), ("processor", record.get("cpu"))]
        rows += [(name, record.get(name)) for name in VERSIONS]
        configuration = [(name, record[name]) for name in ("config", "plan") if record.get(name) is not None]
        found.append(Origin(
            " · ".join(unique([str(record.get("date") or "undated"), model(record), hardware(record)])),
            [(name, value) for name, value in rows if value is not None],
            [(name, json.dumps(_without_secrets(value), indent=2)) for name, value in configuration],
        ))  # fmt: skip
    return found


def speculates(results: Results) -> bool:
    """Whether any side on the page has a shape (S, K, N)."""
    lines: list[Line] = [*results.sides, *results.predictions, *results.plans]
    return any(line.get("shape") for line in lines)


def _command(command: object) -> str | None:
    if not isinstance(command, list):
        return None
    words = [str(word) for word in command]
    return " ".join(f"{word.partition('=')[0]}=…" if any(secret in word for secret in SECRETS) else word for word in words)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: "…" if key in SECRETS and inner is not None else _without_secrets(inner) for key, inner in value.items()}
    return [_without_secrets(inner) for inner in value] if isinstance(value, list) else value


def spell(value: float | None, unit: str = "") -> str:
    """Three significant digits, thousands separated: ``12,345``, ``885``, ``1.68``, ``0.0421``; a dash for a missing value."""
    if value is None or not math.isfinite(value):
        return DASH
    size = abs(value)
    if size and size < 0.001:
        text = f"{value:.1e}"
    else:
        digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 or not size else 2 - math.floor(math.log10(size))
        text = f"{value:,.{digits}f}"
    return f"{text} {unit}".rstrip()


def spell_tick(value: float) -> str:
    """A round number on an axis: ``0.05``, ``2``, ``10,000``."""
    return f"{value:,g}"


def spell_count(count: float | None) -> str:
    """A mean of whole numbers: ``64``, ``63.5``; a dash for a missing value."""
    return DASH if count is None else f"{count:.1f}".removesuffix(".0")


def plural(count: int, word: str) -> str:
    """``1 round``, ``5 rounds``."""
    return f"{count} {word}" + ("" if count == 1 else "s")

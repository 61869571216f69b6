"""The tables of the report, and the words about where its figures come from, as HTML. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..core_wait import busy_caution
from ..errors import spell_bytes
from .canvas import DASH, TIMES, Table, escape, plural, spell, spell_count
from .results import LATENCIES, SPEEDS, Results, Side, hardware, model, on_cpu, unique

LATENCY_NAMES = {
    "ttft_ms": ("TTFT", "time to first token"),
    "tpot_ms": ("TPOT", "time per output token after the first"),
    "itl_ms": ("ITL", "gap between two arrivals"),
    "e2e_ms": ("E2E", "whole request"),
}
VERSIONS = ("graphspec", "torch", "cuda", "driver", "triton", "transformers", "numpy", "python", "platform")
WORDS = re.compile(r"[A-Za-z]{4}")
"""What tells a column of words from one of figures and units."""
SECRETS = ("api_key",)
"""Keys of a recorded configuration whose value stays out of the page."""


def attribute(text: object) -> str:
    """``text`` for HTML, quotes too."""
    return escape(text).replace('"', "&quot;").replace("'", "&#39;")


def marks(side: Side) -> str:
    """Badges of what a reader has to know before any figure."""
    reason = attribute(side.get("equality", ""))
    return "".join(f' <span class="mark {_mark_class(mark)}" title="{reason}">{escape(mark)}</span>' for mark in side.marks)


def _mark_class(mark: str) -> str:
    return "quiet" if mark == "not compared" else "loud"


def render(table: Table, caption: str, first: Sequence[str] | None = None) -> str:
    """An HTML table in a box of its own that scrolls; ``first``: HTML of the first column instead of its text."""
    words = [any(WORDS.search(row[column]) for row in table.rows) for column in range(len(table.headings))]
    kinds = [' class="words"' if one else "" for one in words]
    head = "".join(f'<th scope="col"{kind}>{escape(heading)}</th>' for heading, kind in zip(table.headings, kinds, strict=True))
    body = ""
    for index, row in enumerate(table.rows):
        name = first[index] if first else escape(row[0])
        body += f'<tr><th scope="row">{name}</th>' + _cells(row[1:], kinds[1:]) + "</tr>"
    label = attribute(caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table><caption class="unseen">{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cells(row: Sequence[str], kinds: Sequence[str]) -> str:
    return "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))


def sides(results: Results) -> str:
    """Every side in one row, those without a speed too, with the reason."""
    headings = ["side", "batch", "tokens/s", "per user", "ratio", "acceptance length", "drafted/s", "accepted/s", "cycle, ms", "% of floor"]
    headings += ["runtime", "dtype", "T", "equal to plain decoding"]
    rows, first = [], []
    for side in results.sides:
        ratio = side.get("ratio", {})
        told = f"{spell(side.number('ratio', 'median'))}{TIMES} {ratio.get('to')}" if ratio else DASH
        equal = {True: "yes", False: "no"}.get(side.record["equal"], "not compared")
        keys = ("acceptance_length", "drafted_per_second", "accepted_per_second")
        rows.append([
            side.label, str(side.batch), *(spell(side.number(key, "median")) for key in SPEEDS[:2]), told,
            *(spell(side.number(key)) for key in keys), spell(side.number("cycle_ms", "median")),
            spell(side.number("percent_of_floor")),
            *(str(side.get(key, DASH)) for key in ("runtime", "dtype", "temperature")), f"{equal}: {side.get('equality', DASH)}",
        ])  # fmt: skip
        first.append(escape(side.label) + marks(side))
    return render(Table(headings, rows), "Every side that was measured", first)


def latencies(results: Results) -> str:
    """Mean, p50, p90 and p99 of the latencies; empty where no side has any."""
    known = [side for side in results.sides if any(side.get(key) for key in LATENCIES)]
    if not known:
        return ""
    parts = ("p50", "p90", "p99")
    groups = "".join(
        f'<th scope="colgroup" colspan="3"><abbr title="{long}">{short}</abbr>, ms</th>' for short, long in LATENCY_NAMES.values()
    )
    seconds = "".join(f'<th scope="col">{part}</th>' for _ in LATENCIES for part in parts)
    body = ""
    for side in known:
        cells = "".join(f"<td>{spell(side.number(key, part))}</td>" for key in LATENCIES for part in parts)
        aborted = side.get("aborted", 0)
        left_out = f' <span class="soft">{plural(aborted, "aborted request")} left out</span>' if aborted else ""
        body += f'<tr><th scope="row">{escape(side.label)}{marks(side)}{left_out}</th><td>{side.batch}</td>{cells}</tr>'
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Latency percentiles"><table class="grouped">'
        '<caption class="unseen">Latency percentiles</caption><thead><tr><th scope="col" rowspan="2">side</th>'
        f'<th scope="col" rowspan="2">batch</th>{groups}</tr><tr>{seconds}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def memory(results: Results) -> str:
    """What each side keeps in memory; empty where no side says."""
    known = [side for side in results.sides if side.get("memory")]
    names = unique(_short_name(line) for side in known for line in side.record["memory"])
    rows = []
    for side in known:
        lines = side.record["memory"]
        total = sum(line.get("bytes") or 0 for line in lines)
        parts = ([line for line in lines if _short_name(line) == name] for name in names)
        rows.append([f"{side.label}, batch {side.batch}", spell_bytes(total), *map(_part, parts)])
    note = '<p class="lede">~ marks estimates.</p>' if any("~" in cell for row in rows for cell in row[2:]) else ""
    return note + render(Table(["side", "together", *names], rows), "Memory") if rows else ""


def _short_name(line: Mapping[str, Any]) -> str:
    """Without what differs from side to side, such as the pages of a pool."""
    return str(line["name"]).partition(",")[0]


def _part(lines: Sequence[Mapping[str, Any]]) -> str:
    sizes = [line["bytes"] for line in lines if line.get("bytes") is not None]
    return ("~" if any(line.get("estimate") for line in lines) else "") + spell_bytes(sum(sizes)) if sizes else DASH


def build(results: Results) -> str:
    """What it took to build each program; empty where no side says."""
    rows = [
        [f"{side.label}, batch {side.batch}", str(program["program"]), spell(program.get("warm_up_s")), spell(program.get("capture_s")),
         spell_bytes(program["bytes"]) if program.get("bytes") is not None else DASH]
        for side in results.sides for program in side.get("build", [])
    ]  # fmt: skip
    return render(Table(["side", "program", "warm-up, s", "capture, s", "memory"], rows), "Programs built") if rows else ""


def host(results: Results) -> str:
    """Host time, gaps and graph nodes of a cycle, with the reason where one could not be measured; empty where no side says."""
    rows = []
    for side in results.sides:
        values = [side.number(key) for key in ("host_us", "gap_ms", "nodes")]
        if any(value is not None for value in values):
            reasons = side.get("not_measured", {})
            rows.append(
                [f"{side.label}, batch {side.batch}", *map(spell, values), "; ".join(f"{key}: {why}" for key, why in reasons.items())]
            )
    return render(Table(["side", "host, µs", "gaps, ms", "graph nodes", "not measured"], rows), "Host time of a cycle") if rows else ""


def plans(results: Results) -> str:
    """What ``graphspec plan`` predicts; empty without."""
    keys = ("floor_ms", "predicted_ms", "tokens_per_second", "plain_tokens_per_second", "ratio", "acceptance_length")
    rows = [
        [" ".join(str(line.record[key]) for key in ("variant", "model", "hardware") if line.get(key)) or "plan",
         str(line.record["batch"]), str(line.get("shape", DASH)), *(spell(line.get(key)) for key in keys),
         {True: "yes", False: "no"}.get(line.get("fits"), DASH)]
        for line in results.plans
    ]  # fmt: skip
    headings = [
        "what",
        "batch",
        "S, K, N",
        "floor, ms",
        "predicted, ms",
        "tokens/s",
        "plain tokens/s",
        "ratio",
        "acceptance length",
        "fits",
    ]
    return render(Table(headings, rows), "Planned shapes; predictions, not measurements") if rows else ""


def facts(results: Results) -> list[tuple[str, str]]:
    """What was measured, on what, when, by which revision: the line under the title."""
    found = results.provenances
    places = unique(side.hardware for side in results.sides) or unique(hardware(record) for record in found)
    dates = sorted(str(record["date"])[:10] for record in found if record.get("date"))
    when = " to ".join(unique([dates[0], dates[-1]])) if dates else "date unknown"
    revisions = unique(_short(record.get("revision")) for record in found)
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
            ("Revision", ", ".join(revisions) or "unknown"),
        )
        if text
    ]


def _short(revision: object) -> str:
    commit, _, dirty = str(revision or "").partition("-")
    return commit[:10] + (f" ({dirty})" if dirty else "")


def _work(side: Side) -> str:
    record = side.record
    if record.get("requests") is None:
        return ""
    temperature = record.get("temperature")
    sampling = "" if not isinstance(temperature, int | float) else ", greedy" if temperature == 0 else f", T={temperature:g}"
    lengths = [spell_count(side.number(key)) for key in ("input_tokens", "output_tokens")]
    return f"{plural(record['requests'], 'request')}, {lengths[0]} tokens in, {lengths[1]} out{sampling}"


def notices(results: Results) -> list[str]:
    """Sentences of caution that apply, as HTML."""
    cautions = []
    local = [side for side in results.sides if side.get("device")]
    if any(on_cpu(side) for side in local):
        which = "These figures come" if all(on_cpu(side) for side in local) else "Some of these figures come"
        cautions.append(f"<strong>CPU.</strong> {which} from a CPU: they say how the program behaves, not what a GPU will do.")
    synthetic = unique(side.label for side in results.sides if side.get("synthetic"))
    if synthetic:
        cautions.append(f"<strong>Synthetic.</strong> Acceptance was set, not earned, in: {escape(', '.join(synthetic))}.")
    lossy = unique(side.label for side in results.sides if side.get("lossy"))
    if lossy:
        cautions.append(f"<strong>Lossy.</strong> The accept rule may change what is generated in: {escape(', '.join(lossy))}.")
    unequal = unique(side.label for side in results.sides if side.equal is False)
    if unequal:
        text = "Output differs from plain decoding, so no speed is shown, in"
        cautions.append(f"<strong>Not equal.</strong> {text}: {escape(', '.join(unequal))}.")
    open_ = unique(side.label for side in results.sides if side.equal is None and not side.get("synthetic") and not side.get("lossy"))
    if open_:
        cautions.append(f"<strong>Not compared.</strong> Tokens could not be compared with plain decoding in: {escape(', '.join(open_))}.")
    waited: dict[str, float | None] = {f"{side.label}, batch {side.batch}": side.number("core_wait") for side in results.sides}
    if (busy := busy_caution(waited)) is not None:
        cautions.append(f"<strong>Busy machine.</strong> {escape(busy)}")
    if results.replaced:
        cautions.append(f"{plural(results.replaced, 'older measurement')} of the same sides left out.")
    return cautions


def provenances(results: Results) -> str:
    """Versions, hardware and configuration of every run, foldable."""
    parts = []
    for record in results.provenances:
        rows = [("date", record.get("date")), ("command", _command(record.get("command"))), ("revision", record.get("revision"))]
        rows += [("hardware", hardware(record)), ("processor", record.get("cpu"))]
        rows += [(name, record.get(name)) for name in VERSIONS]
        body = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows if value is not None)
        config = ""
        for name in ("config", "plan"):
            if record.get(name) is not None:
                text = json.dumps(_without_secrets(record[name]), indent=2)
                config += f"<details><summary>{name}</summary><pre>{escape(text)}</pre></details>"
        title = escape(" · ".join(unique([str(record.get("date") or "undated"), model(record), hardware(record)])))
        parts.append(
            f"<details{' open' if len(results.provenances) == 1 else ''}><summary>{title}</summary><dl>{body}</dl>{config}</details>"
        )
    return "".join(parts) or "<p>The files do not say.</p>"


def _command(command: object) -> str | None:
    if not isinstance(command, list):
        return None
    words = [str(word) for word in command]
    return " ".join(f"{word.partition('=')[0]}=…" if any(secret in word for secret in SECRETS) else word for word in words)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: "…" if key in SECRETS and inner is not None else _without_secrets(inner) for key, inner in value.items()}
    return [_without_secrets(inner) for inner in value] if isinstance(value, list) else value

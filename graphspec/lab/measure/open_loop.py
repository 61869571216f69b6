"""Open-loop workloads: requests arrive at their own times, whether or not earlier ones are answered. Imports no torch.

A closed loop sends the next request when the last one ends, so a slow engine gets fewer requests. In an open loop the load is given, and
latencies under it are measured: TTFT, ITL, and *goodput*, the share of requests within stated limits (DistServe, Zhong et al. 2024,
section 2).
"""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.table import Table

from ...config.command_options import CLOSED, MAX_PROMPT, WorkloadConfig
from ...config.paths import read_json, read_text
from ...errors import ConfigError
from ...facts.keys import is_number
from ...host import terminal
from .metrics import Round, Timeline, latency


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request of a trace file.

    Attributes:
        arrival: seconds after the first request of the file.
        prompt: its text; None: ``input_tokens`` random ids.
        output_tokens: most new tokens; None: ``workload.output_tokens``.
    """

    arrival: float
    prompt: str | None
    input_tokens: int
    output_tokens: int | None


def arrivals(workload: WorkloadConfig) -> list[float]:
    """Arrival times of requests in seconds from the beginning of a round, ascending; the same in every round and on every side.

    ``poisson``: gaps are exponential with mean ``1 / rate``. ``bursts``: groups of ``burst`` requests arrive together, with exponential
    gaps of mean ``burst / rate``. In both the first request arrives at 0.
    """
    assert workload.rate is not None
    drawn = random.Random(f"arrivals {workload.seed}")
    together = workload.burst if workload.arrivals == "bursts" else 1
    times: list[float] = []
    moment = 0.0
    while len(times) < workload.requests:
        times += [moment] * min(together, workload.requests - len(times))
        moment += drawn.expovariate(workload.rate / together)
    return times


def read_trace(workload: WorkloadConfig) -> list[TraceLine]:
    """The first ``workload.requests`` lines of ``workload.trace``, in order of arrival."""
    assert workload.trace is not None
    lines = read_text("workload.trace", workload.trace).split("\n")
    found = [_trace_line(f"{workload.trace}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError("workload.trace", "at least one request", f"none in {workload.trace}")
    found = sorted(found, key=lambda line: line.arrival)[: workload.requests]
    first = found[0].arrival
    return [TraceLine(line.arrival - first, line.prompt, line.input_tokens, line.output_tokens) for line in found]


def _trace_line(where: str, text: str) -> TraceLine:
    row = read_json(where, text)
    row = row if isinstance(row, dict) else {}
    arrival, prompt = row.get("arrival"), row.get("prompt")
    counts = [row.get("input_tokens"), row.get("output_tokens")]
    fits = is_number(arrival) and 0 <= arrival < float("inf")
    fits = fits and all(count is None or (type(count) is int and 0 < count <= MAX_PROMPT) for count in counts)
    if not (fits and (isinstance(prompt, str) if counts[0] is None else prompt is None)):
        expected = 'an object with "arrival" in seconds, either "prompt" or "input_tokens", and "output_tokens" where it has its own'
        raise ConfigError(where, expected, text[:60])
    return TraceLine(float(row["arrival"]), prompt, counts[0] or 0, counts[1])


def play(
    offsets: Sequence[float],
    submit: Callable[[int], None],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[float]:
    """Call ``submit(i)`` for each request when it is due; returns the times at which they were due.

    A request that is submitted late counts from the time it was due; otherwise a delayed caller would hide the time its requests waited.
    """
    began = clock()
    due = [began + offset for offset in offsets]
    for number, moment in enumerate(due):
        while (left := moment - clock()) > 0:
            sleep(left)
        submit(number)
    return due


def within_limits(timeline: Timeline, ttft_ms: float, itl_ms: float) -> bool:
    """Whether it was served, with its first token within ``ttft_ms`` and no gap between bursts longer than ``itl_ms``."""
    return timeline.served and 1e3 * timeline.ttft <= ttft_ms and 1e3 * max(timeline.itl, default=0.0) <= itl_ms


def gaps_while_prompts_arrive(timelines: Sequence[Timeline], long: Sequence[bool]) -> list[float]:
    """Gaps between bursts, in seconds, during which a long prompt of another request waited or was read."""
    spans = [(t.arrived, t.bursts[0][0], number) for number, t in enumerate(timelines) if long[number] and t.bursts]
    found: list[float] = []
    for number, timeline in enumerate(timelines):
        times = [moment for moment, _ in timeline.bursts]
        touched: set[int] = set()
        for begin, end, other in spans:
            if other != number:
                # Gap i lies between bursts i and i + 1.
                touched.update(range(max(0, bisect_right(times, begin) - 1), min(len(times) - 1, bisect_right(times, end))))
        gaps = [later - earlier for earlier, later in pairwise(times)]
        found += [gaps[place] for place in sorted(touched)]
    return found


def figures(rounds: Sequence[Round], workload: WorkloadConfig, long: Sequence[bool]) -> dict[str, Any]:
    """Latencies and goodput of a side under the load, for the key ``open_loop`` of a result record."""
    every = [timeline for one in rounds for timeline in one.timelines]
    spans = [max(t.arrived for t in one.timelines) - min(t.arrived for t in one.timelines) for one in rounds]
    offered = sum(len(one.timelines) - 1 for one in rounds) / sum(spans) if sum(spans) > 0 else None
    good = sum(within_limits(timeline, workload.ttft_limit_ms, workload.itl_limit_ms) for timeline in every)
    seconds = sum(one.seconds for one in rounds)
    return {
        "offered_per_second": offered,
        "goodput": {
            "share": good / len(every),
            "requests": len(every),
            "within": good,
            "per_second": good / seconds if seconds else None,
            "ttft_limit_ms": workload.ttft_limit_ms,
            "itl_limit_ms": workload.itl_limit_ms,
        },
        "gap_while_long_prompts_ms": latency([gap for one in rounds for gap in gaps_while_prompts_arrive(one.timelines, long)]),
        "long_prompts": sum(long),
    }


def describe(workload: WorkloadConfig) -> str:
    """``poisson, 4/s``: part of a case's name, which distinguishes the records of different loads."""
    if workload.arrivals == CLOSED:
        return CLOSED
    text = f"trace {workload.trace}" if workload.arrivals == "trace" else f"{workload.arrivals}, {workload.rate:g}/s"
    text += f" in groups of {workload.burst}" if workload.arrivals == "bursts" else ""
    return text + (f", 1 in {workload.long_every} prompts of {workload.long_input_tokens} tokens" if workload.long_every else "")


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """All sides in one table; latencies and goodput over the requests of all rounds."""
    cells, caption = [], ""
    for row in rows:
        if row["equal"] is False:
            cells.append((row["side"], *[""] * 7, "NO"))
            continue
        served, gap = row["open_loop"]["goodput"], row["open_loop"]["gap_while_long_prompts_ms"]
        times = [f"{row[key][part]:.1f}" if row[key] else "" for key in ("ttft_ms", "itl_ms") for part in ("p50", "p99")]
        cells.append((
            row["side"], f"{served['within']} of {served['requests']}", *times, f"{gap['p99']:.1f}" if gap else "",
            f"{row['acceptance_length']:.2f}" if row["acceptance_length"] else "", "yes" if row["equal"] else "-",
        ))  # fmt: skip
        limits = f"within {served['ttft_limit_ms']:g} ms to the first token and {served['itl_limit_ms']:g} ms between tokens"
        gaps = "gap: between tokens while a long prompt of another request waits or is read"
        caption = f"times in ms, p50 or as said; goodput: requests {limits}; {gaps}"
    headings = ("side", "goodput", "TTFT", "p99", "ITL", "p99", "gap p99", "length", "equal")
    return terminal.table(title, headings, cells, ("side", "equal"), caption=caption)

"""Spans of a run as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open. Pure functions over recorded launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...graphs.programs import describe
from .recorder import Launch

PROCESS = 1
TRACKS = {"host": 1, "device": 2, "stages": 3}


def chrome_trace(launches: Sequence[Launch], title: str) -> list[dict[str, Any]]:
    """Events of one run: what the host did (launch, read, the scheduler between them), programs, and the stages inside them.

    On a CPU programs run in the host's thread and are drawn when they ran. On a GPU a program is drawn from its launch to the end of the
    wait for it, and its stages, timed by events in the graph, one after the other from there.

    Args:
        launches: in order, of a :class:`graphspec.lab.measure.recorder.Recorder` that waits.
    """
    names: list[dict[str, Any]] = [_name("process_name", 0, title)]
    names += [_name("thread_name", track, name) for name, track in TRACKS.items()]
    if not launches:
        return names
    zero = launches[0].began
    spans: list[dict[str, Any]] = []

    def span(track: str, name: str, start: float, end: float, **details: Any) -> None:
        spans.append({
            "ph": "X", "pid": PROCESS, "tid": TRACKS[track], "name": name, "cat": track, "ts": 1e6 * (start - zero),
            "dur": max(0.0, 1e6 * (end - start)), "args": details,
        })  # fmt: skip

    cycles, reached = 0, zero
    for one in launches:
        what = describe(one.key)
        cycles += one.is_cycle
        name = f"cycle {cycles}" if one.is_cycle else "prefill"
        if one.began > reached:
            span("host", "schedule", reached, one.began)
        span("host", "launch", one.began, one.launched, program=what)
        if one.read:
            span("host", "read", one.read_began, one.read, program=what)
        reached = max(one.launched, one.read)
        if one.busy:
            span("device", name, one.program_began, one.program_began + one.busy, program=what)
        moment = one.program_began
        for stage, milliseconds in one.stages:
            span("stages", stage, moment, moment + milliseconds / 1e3, cycle=cycles)
            moment += milliseconds / 1e3
    return [*names, *sorted(spans, key=lambda event: (event["ts"], -event["dur"]))]


def _name(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": PROCESS, "tid": track, "name": kind, "args": {"name": name}}

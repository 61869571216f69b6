"""Times an engine's launches: a launcher that wraps the cycle, and programs that time their stages. The only work added to what is timed is
reading the clock (CPU) and recording events (CUDA). :func:`chrome_trace` draws recorded launches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch

from ...engine.launcher import Forwarding
from ...graphs.capture import Capturer, ProgramCapturer
from ...graphs.cycle import Cycle, RingEntry
from ...graphs.programs import Key, Program, describe
from ...graphs.stages.mailbox import Message
from ...shapes import GraphKey


@dataclass(slots=True)
class Launch:
    """One launch of a program; moments in seconds of :func:`time.perf_counter`.

    Attributes:
        ready: when the device was done, where that was waited for or the device is this CPU.
        busy: seconds between ``began`` and ``ready`` in which the program ran or was waited for.
        stages: milliseconds of each stage, if they were timed.
    """

    key: Key
    began: float
    launched: float
    ready: float
    busy: float
    read_began: float = 0.0
    read: float = 0.0
    stages: list[tuple[str, float]] = field(default_factory=list)
    program_began: float = 0.0

    @property
    def is_cycle(self) -> bool:
        return isinstance(self.key, GraphKey)


class TimingEvent(Protocol):
    """The methods of a CUDA event that are used."""

    def record(self) -> None: ...

    def elapsed_time(self, end: Any) -> float: ...


class StageTimer(Protocol):
    """Runs the stages of a program and records the time of each."""

    def __call__(self) -> None: ...

    def milliseconds(self) -> list[float]: ...


class SteppedProgram:
    """A program run stage by stage and timed between them; for the CPU, where a call returns when its work is done."""

    def __init__(self, program: Program) -> None:
        self._steps, self._times = program.steps, [0.0] * (len(program.steps) + 1)

    def __call__(self) -> None:
        self._times[0] = time.perf_counter()
        for number, step in enumerate(self._steps, 1):
            step()
            self._times[number] = time.perf_counter()

    def milliseconds(self) -> list[float]:
        return [1e3 * (later - moment) for moment, later in pairwise(self._times)]


class MarkedProgram:
    """A program with an event between every two stages; for CUDA, where a call returns before its work is done.

    When captured, one replay gives the time of every stage: the events are external, so the graph has them as nodes that record at each
    replay (``cudaEventRecordExternal``). The cost of the events, a few microseconds each, is in the stages' times and not in the cycle's.

    Args:
        make_event: makes a timing event that may be recorded in a capture.
        capturer: captures the stages, which also runs them, see :func:`inert`. None: they are launched directly.
    """

    def __init__(self, program: Program, make_event: Callable[[], TimingEvent], capturer: ProgramCapturer | None) -> None:
        self._steps, self._events = program.steps, [make_event() for _ in range(len(program.steps) + 1)]
        self._run: Callable[[], None] = self._marked if capturer is None else capturer.capture(self._marked)

    def _marked(self) -> None:
        self._events[0].record()
        for step, event in zip(self._steps, self._events[1:], strict=True):
            step()
            event.record()

    def __call__(self) -> None:
        self._run()

    def milliseconds(self) -> list[float]:
        """Times of the last call, which must have ended on the device."""
        return [event.elapsed_time(later) for event, later in pairwise(self._events)]


def external_event() -> TimingEvent:
    """A CUDA event that a captured graph records at each replay."""
    return torch.cuda.Event(enable_timing=True, external=True)


@contextmanager
def inert(cycle: Cycle) -> Iterator[None]:
    """A context in which programs may run without effect: the message is empty, and all state is restored at the end."""
    with torch.no_grad(), Forwarding(cycle).rewinding(Message(lanes=()), "mail", "state", "ring") as rewind:
        rewind()
        yield


def stage_timer(cycle: Cycle, key: Key) -> StageTimer:
    """A timer of the stages of the program of ``key``; compiled stages are compiled here, each by itself."""
    program = cycle.programs[key]
    with inert(cycle):
        # The first call compiles a stage, and must not be inside a launch.
        for step in program.steps:
            step()
        if cycle.plan.device == "cpu":
            return SteppedProgram(program)
        return MarkedProgram(program, external_event, Capturer(cycle.arena) if cycle.plan.runtime.captured else None)


class Recorder(Forwarding):
    """A launcher that forwards every call and records its time.

    Args:
        wait: wait for the device after every launch, so that the rest of a cycle's time is the host's. Has no effect on a CPU.
        timers: stage timers that run in place of the programs of these keys.
    """

    def __init__(self, cycle: Cycle, *, wait: bool = False, timers: dict[Key, StageTimer] | None = None) -> None:
        super().__init__(cycle)
        self.timers = timers or {}
        self._on_cpu = cycle.plan.device == "cpu"
        self._wait = wait and not self._on_cpu
        self._program = (0.0, 0.0)
        self._unread: dict[int, Launch] = {}
        self.launches: list[Launch] = []

    def launch(self, key: Key, message: Message) -> int:
        began = time.perf_counter()
        with self._watched(key):
            ticket = super().launch(key, message)
        launched = ready = time.perf_counter()
        start, busy = self._program
        if self._wait:
            torch.cuda.synchronize(self.cycle.arena.device)
            ready = time.perf_counter()
            start, busy = launched, ready - launched
        one = Launch(key, began, launched, ready, busy, program_began=start)
        timer = self.timers.get(key)
        if timer is not None:
            names = [stage.name for stage in self.cycle.programs[key].stages]
            one.stages = list(zip(names, timer.milliseconds(), strict=True))
        self._unread[ticket] = one
        self.launches.append(one)
        return ticket

    def read(self, ticket: int) -> RingEntry:
        one = self._unread.pop(ticket)
        one.read_began = time.perf_counter()
        entry = super().read(ticket)
        one.read = time.perf_counter()
        return entry

    @contextmanager
    def _watched(self, key: Key) -> Iterator[None]:
        """Time the program for one launch, with its stage timer if there is one."""
        program = self.cycle.programs.get(key)
        timer = self.timers.get(key)
        if program is None or not (self._on_cpu or timer is not None):
            yield
            return
        direct, replay = program.direct, program.replay
        run: Callable[[], None] = timer if timer is not None else replay if replay is not None else direct

        def clocked() -> None:
            began = time.perf_counter()
            run()
            self._program = (began, time.perf_counter() - began)

        if replay is not None:
            program.replay = clocked
        else:
            program.direct = clocked
        try:
            yield
        finally:
            program.direct, program.replay = direct, replay

    def most_common(self) -> Key | None:
        """The key with the most cycles."""
        keys = [one.key for one in self.launches if one.is_cycle]
        return max(dict.fromkeys(keys), key=keys.count, default=None)

    def cycle_times(self, key: Key | None) -> list[tuple[float, float]]:
        """``(seconds of a cycle, seconds of it outside the program)`` for every cycle of ``key`` whose predecessor was a cycle too.

        A cycle lasts from the moment when the result before it was read to the moment when its own was. A cycle after a prompt is not
        counted.
        """
        found = []
        for before, one in pairwise(self.launches):
            if one.key == key and before.is_cycle and before.read and one.read:
                whole = one.read - before.read
                found.append((whole, whole - one.busy))
        return found

    def stage_milliseconds(self, key: Key) -> list[tuple[str, list[float]]]:
        """Each stage of ``key`` with its milliseconds, in order."""
        rows: Sequence[list[tuple[str, float]]] = [one.stages for one in self.launches if one.key == key and one.stages]
        if not rows:
            return []
        return [(name, [row[place][1] for row in rows]) for place, (name, _) in enumerate(rows[0])]


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

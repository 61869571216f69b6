"""Times inside a cycle: the whole, the host's part, each stage with its floor; on CUDA also graph nodes and the gaps between them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...api.llm import LLM
from ...errors import ResourceError
from ...graphs.cycle import Cycle
from ...graphs.programs import Key
from ...graphs.stages.mailbox import Message
from ...models.stack import uses_packed_weights
from ...shapes import GraphKey
from ..floor import FloorModel, Hardware
from .machine import copy_bandwidth
from .metrics import quantiles
from .recorder import Recorder, StageTimer, stage_timer
from .results import percent_of_floor

ON_CPU = "needs a GPU: a CPU has no graph nodes"
NOT_CAPTURED = "the cycle is not captured, so there is no graph"
BEATEN = "cycles are faster than the floor: what they read was nearer than the memory that the bandwidth was measured in"
NO_CYCLES = "no two cycles ran one after the other"
PROFILED_REPLAYS = 5

Run = Callable[[Recorder], Any]
"""Runs the workload with a recorder as launcher."""


def profile_cycles(
    llm: LLM, run: Run, context: int, token_map: str | None, *, stages: bool, bandwidth: float | None = None
) -> dict[str, Any]:
    """Times inside the cycles of a workload, under the keys of a result record.

    Args:
        context: committed tokens of a row for the floor: the mean over the workload.
        stages: time stages too, for which compiled ones are compiled one by one.
        bandwidth: bytes per second of this GPU, measured in the same run; None: measure it. A CPU is always measured, by what these
            cycles touch.
    """
    plan, cycle = llm.plan, llm.cycle
    free = Recorder(cycle)
    run(free)
    key = free.most_common()
    not_measured: dict[str, str] = {}
    model = FloorModel.of(
        plan.target, plan.draft, plan.weight_dtype, plan.variant, token_map, packed=uses_packed_weights(plan), kv_dtype=plan.kv_dtype
    )
    if bandwidth is None or plan.device == "cpu":
        touched = model.working_set(key.shape, key.bucket, context) if isinstance(key, GraphKey) else None
        bandwidth = copy_bandwidth(plan.device, seconds=0.2, working_set=touched)
    found: dict[str, Any] = {"cycle_ms": None, "host_us": None, "gap_ms": None, "nodes": None, "stages": [], "bandwidth": bandwidth}
    times = free.cycle_times(key)
    if key is None or not times:
        return found | {"not_measured": dict.fromkeys(("cycle_ms", "host_us", "stages", "nodes", "gap_ms"), NO_CYCLES)}
    assert isinstance(key, GraphKey)
    found["cycle_ms"] = quantiles([1e3 * whole for whole, _ in times])
    costs, hardware = model.stages(key.shape, key.bucket, context), Hardware(bandwidth)
    floors = {cost.name: (cost.bytes, cost.floor_ms(hardware)) for cost in costs}
    found["floor_ms"] = sum(milliseconds for _, milliseconds in floors.values())
    found["percent_of_floor"] = percent_of_floor(found["floor_ms"], found["cycle_ms"]["median"])
    if found["percent_of_floor"] is None:
        not_measured["percent_of_floor"] = BEATEN
    timers: dict[Key, StageTimer] = {key: stage_timer(cycle, key)} if stages else {}
    if stages:
        timed = Recorder(cycle, wait=True, timers=timers)
        run(timed)
        found["stages"] = [_stage_row(name, statistics.median(values), floors.get(name)) for name, values in timed.stage_milliseconds(key)]
    else:
        not_measured["stages"] = "profile.stages=false"
    if plan.device == "cpu":
        found["host_us"] = 1e6 * statistics.median(outside for _, outside in times)
        not_measured |= dict.fromkeys(("nodes", "gap_ms"), ON_CPU)
    else:
        waiting = Recorder(cycle, wait=True)
        run(waiting)
        found["host_us"] = 1e6 * statistics.median([outside for _, outside in waiting.cycle_times(key)] or [0.0])
        if plan.runtime.captured:
            probe = Probe(cycle, key)
            run(probe)
            found |= {name: probe.found.get(name) for name in ("nodes", "gap_ms")}
            not_measured |= dict.fromkeys(("nodes", "gap_ms"), probe.missing) if probe.missing else {}
        else:
            not_measured |= dict.fromkeys(("nodes", "gap_ms"), NOT_CAPTURED)
    return found | {"not_measured": not_measured}


def _stage_row(name: str, milliseconds: float, floor: tuple[float, float] | None) -> dict[str, Any]:
    size, minimum = floor if floor is not None else (None, None)
    share = percent_of_floor(minimum, milliseconds) if minimum is not None else None
    return {"name": name, "ms": milliseconds, "bytes": size, "floor_ms": minimum, "percent_of_floor": share}


class Probe(Recorder):
    """A recorder that profiles one program once, in the middle of a run, with torch's profiler.

    Every profiled replay starts from the state of the launch at hand, which is restored afterwards.
    """

    def __init__(self, cycle: Cycle, key: Key, after: int = 3) -> None:
        super().__init__(cycle)
        self._key, self._left = key, after
        self.found: dict[str, Any] = {}
        self.missing = ""
        """Why there are no figures; empty: there are."""

    def launch(self, key: Key, message: Message) -> int:
        if key == self._key and not (self.found or self.missing):
            self._left -= 1
            if self._left < 0:
                self._look(message)
        return super().launch(key, message)

    def _look(self, message: Message) -> None:
        self.cycle.ready(self._key, message)
        try:
            with self.rewinding(message, "mail", "state", "ring") as rewind:
                self.found = kernel_timeline(self.cycle.programs[self._key], rewind)
        except ResourceError as error:
            self.missing = str(error)


def kernel_timeline(program: Callable[[], None], rewind: Callable[[], None], replays: int = PROFILED_REPLAYS) -> dict[str, Any]:
    """The kernels of one call of ``program``, from torch's profiler; see :func:`summarise_kernels`."""
    from torch.profiler import ProfilerActivity, profile

    calls = []
    with torch.no_grad():
        for number in range(replays + 1):
            rewind()
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                program()
                torch.cuda.synchronize()
            # The profiler's first session is a warm-up.
            if number:
                events = [e for e in profiler.events() or [] if e.device_type.name == "CUDA"]
                calls.append([(float(e.time_range.start), float(e.time_range.end), e.name) for e in events])
    if not all(calls):
        raise ResourceError("profiler", "the kernels of every replay", f"none in {calls.count([])} of {replays}")
    return summarise_kernels(calls)


def summarise_kernels(calls: Sequence[Sequence[tuple[float, float, str]]]) -> dict[str, Any]:
    """Figures of several calls of one program.

    Args:
        calls: for each call, ``(start, end, name)`` of every kernel, in microseconds.

    Returns:
        ``nodes`` of one call; medians of ``busy_ms``, the sum of their times, ``span_ms`` from the first start to the last end, and
        ``gap_ms``, in which nothing ran; the 25 longest ``kernels`` of the last call.
    """
    busy, span, gap = [], [], []
    for call in calls:
        ordered = sorted(call)
        reached, idle = ordered[0][0], 0.0
        for start, end, _ in ordered:
            idle += max(0.0, start - reached)
            reached = max(reached, end)
        busy.append(sum(end - start for start, end, _ in ordered) / 1e3)
        span.append((reached - ordered[0][0]) / 1e3)
        gap.append(idle / 1e3)
    by_name: dict[str, list[float]] = {}
    for start, end, name in calls[-1]:
        by_name.setdefault(name[:90], []).append(end - start)
    heaviest = sorted(((sum(times), len(times), name) for name, times in by_name.items()), reverse=True)[:25]
    return {
        "nodes": len(calls[-1]),
        "busy_ms": statistics.median(busy),
        "span_ms": statistics.median(span),
        "gap_ms": statistics.median(gap),
        "kernels": [{"name": name, "calls": count, "microseconds": round(total, 2)} for total, count, name in heaviest],
    }

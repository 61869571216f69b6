"""Estimated time of a fused cycle on a GPU beyond its bytes: launches, and exposed round trips to memory.

The model of a launch's time adds

* the gap between the end of the kernel before it and its own first instruction;
* every round trip to memory or to the second-level cache that must end before the next one can start (*exposed*), once for every wave of
  programs;
* its bytes, streamed as fast as its programs can request them: by Little's law at most ``bytes in flight / round trip``, wave after wave;
  or its operations, where they take longer;
* the bytes that one program moves alone, over the link of one multiprocessor: merges by the last program to arrive.

:class:`Latencies` has the constants of the GPU and their sources; what a launch does stands next to its kernel
(:mod:`graphspec.kernels.fused.work`). This is an estimate, for comparing two forms of a kernel and for seeing where the time goes; nothing
in it was measured here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ...kernels.fused import work
from ...kernels.fused.hopper import MULTIPROCESSORS, resident
from ...kernels.fused.work import Situation, Work
from ..floor import Hardware
from .launches import INDUCTOR, LIBRARY, Step

if TYPE_CHECKING:
    from ...shapes import CycleShape

DEVICES = ("h100", "h200")
"""Names of hardware for which the constants and the committed table of registers hold."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Constants of a Hopper GPU.

    Attributes:
        gap: seconds between dependent kernels of a graph. Spector et al., "Look Ma, No Bubbles!" (Hazy Research, 2025): 1.3 us a kernel on
            an H100 with CUDA graphs.
        programmatic_gap: the same with programmatic dependent launch, where only the wait for the last stores of the kernel before remains.
            Assumed.
        memory: seconds of a round trip to memory on a busy device. Assumed: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU
            Architecture" (arXiv 2402.13499) chase pointers on an idle one in about half of that.
        cache: seconds of a round trip to the second-level cache, or of an atomic operation there. Assumed likewise.
        link: bytes per second between one multiprocessor and that cache: 64 bytes a clock at 1.7 GHz. Assumed.
    """

    gap: float = 1.3e-6
    programmatic_gap: float = 0.5e-6
    memory: float = 0.7e-6
    cache: float = 0.3e-6
    link: float = 1.09e11


HOPPER = Latencies()


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of one launch, by cause."""

    step: Step
    work: Work
    gap: float
    exposed: float
    stream: float
    alone: float

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.gap + self.exposed + self.stream + self.alone


def work_of(step: Step, at: Situation) -> Work:
    """The work of a launch: of ours as the kernel declares it, of a product of the library by its weight."""
    if step.launch is not None:
        return work.work_of(step.launch, at)
    if step.product is None:
        return work.SMALL
    weight, rows = step.product
    flops = 2 * rows * weight.shape[-1] * weight.shape[-2]
    return Work(weight.nbytes, MULTIPROCESSORS, in_flight=64 * 1024, memory=1, cache=1, flops=flops)


@cache
def _table() -> dict[str, list[dict[str, int]]]:
    """Resources of the compiled kernels, by name: the entries of the committed table."""
    read = json.loads((files("graphspec") / "kernels" / "fused" / "sm_90.json").read_text(encoding="utf-8"))
    found: dict[str, list[dict[str, int]]] = {}
    for name, used in read["kernels"].items():
        found.setdefault(name.rpartition("/")[2].partition("#")[0], []).append(used)
    return found


def places(step: Step) -> int:
    """Programs of a launch that are resident at once, by the most registers and shared memory of the kernel's forms with as many warps."""
    warps = 4 if step.launch is None else step.launch.num_warps
    entries = [used for used in _table().get(step.kernel, []) if used["warps"] == warps]
    if not entries:
        return MULTIPROCESSORS
    maximum = {key: max(used[key] for used in entries) for key in ("registers", "shared")}
    return MULTIPROCESSORS * resident({**maximum, "warps": warps})


def estimate(step: Step, at: Situation, hardware: Hardware, device: Latencies = HOPPER) -> Estimate:
    """Seconds of one launch.

    Args:
        step: the launch.
        at: what its work depends on.
        hardware: its bandwidth.
        device: constants of the GPU.
    """
    found, room = work_of(step, at), places(step)
    # Inductor's kernels and the library's begin after the one before them has ended.
    early = at.programmatic and step.kernel not in (INDUCTOR, LIBRARY)
    waves = -(-found.programs // room)
    exposed = waves * (found.memory * device.memory + found.cache * device.cache)
    stream = _stream(found, room, hardware.bandwidth, device)
    if hardware.flops is not None:
        stream = max(stream, found.flops / hardware.flops)
    return Estimate(step, found, device.programmatic_gap if early else device.gap, exposed, stream, found.alone / device.link)


def _stream(work: Work, places: int, bandwidth: float, device: Latencies) -> float:
    """Seconds to stream the bytes: full waves, then the partial one, each at the rate that its bytes in flight allow."""
    each, left, seconds = work.bytes / work.programs, work.programs, 0.0
    full, left = divmod(left, places)
    for count, times in ((places, full), (left, 1)):
        if count and times:
            rate = min(bandwidth, count * work.in_flight / device.memory, count * device.link)
            seconds += times * count * each / rate
    return seconds


@dataclass(frozen=True, slots=True)
class Part:
    """Estimates of the launches of one kind.

    Attributes:
        name: of the stage, or of the kernel.
        launches: how many.
        memory, cache: exposed round trips of all.
        bytes: streamed.
        gap, exposed, stream, alone: seconds.
    """

    name: str
    launches: int
    memory: float
    cache: float
    bytes: float
    gap: float
    exposed: float
    stream: float
    alone: float

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.gap + self.exposed + self.stream + self.alone

    def record(self) -> dict[str, Any]:
        """For ``format=json``; times in milliseconds."""
        times = {f"{key}_ms": 1e3 * getattr(self, key) for key in ("gap", "exposed", "stream", "alone")}
        counts = {"launches": self.launches, "memory_round_trips": self.memory, "cache_round_trips": self.cache, "bytes": self.bytes}
        return {"name": self.name, **counts, **times, "ms": 1e3 * self.seconds}


def _part(name: str, found: Iterable[Estimate]) -> Part:
    some = list(found)
    work = [one.work for one in some]
    return Part(
        name,
        len(some),
        sum(one.memory for one in work),
        sum(one.cache for one in work),
        sum(one.bytes for one in work),
        sum(one.gap for one in some),
        sum(one.exposed for one in some),
        sum(one.stream for one in some),
        sum(one.alone for one in some),
    )


def gathered(name: str, parts: Iterable[Part]) -> Part:
    """The sum of several parts."""
    some = list(parts)
    return Part(name, *(sum(getattr(part, one.name) for part in some) for one in fields(Part)[1:]))


@dataclass(frozen=True, slots=True)
class CycleEstimate:
    """A cycle by this model.

    Attributes:
        shape, batch: of the cycle.
        floor_ms: by its bytes and operations.
        programmatic: kernels begin while the one before them drains.
        parts: by kernel, the most expensive first.
    """

    shape: CycleShape
    batch: int
    floor_ms: float
    programmatic: bool
    parts: list[Part]
    whole: Part

    def record(self) -> dict[str, Any]:
        """For ``format=json``."""
        head = {"shape": self.shape.numbers, "batch": self.batch, "programmatic_launch": self.programmatic, "floor_ms": self.floor_ms}
        return {**head, **self.whole.record(), "parts": [part.record() for part in self.parts]}


def estimate_cycle(
    steps: Iterable[Step], shape: CycleShape, batch: int, context: int, floor_ms: float, hardware: Hardware, *, programmatic: bool
) -> CycleEstimate:
    """The estimate of one cycle, from its launches (:func:`graphspec.lab.predict.launches.planned_steps`)."""
    at = Situation(context, programmatic, shape.is_chain)
    found = [estimate(step, at, hardware) for step in steps]
    return CycleEstimate(shape, batch, floor_ms, programmatic, by_kernel(found), _part("cycle", found))


def by_kernel(estimates: Iterable[Estimate]) -> list[Part]:
    """One part for each kernel, the most expensive first."""
    found: dict[str, list[Estimate]] = {}
    for one in estimates:
        found.setdefault(one.step.kernel, []).append(one)
    return sorted((_part(name, some) for name, some in found.items()), key=lambda part: -part.seconds)

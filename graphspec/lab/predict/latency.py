"""Estimated time of a fused cycle on a GPU beyond its bytes: launches, and exposed round trips to memory.

The model of a launch's time adds

* the gap between the end of the kernel before it and its own first instruction;
* every round trip to memory or to the second-level cache that must end before the next one can start (*exposed*), once for every wave of
  programs;
* its bytes, streamed as fast as its programs can request them: by Little's law at most ``bytes in flight / round trip``, wave after wave;
  or its operations, where they take longer;
* the bytes that one program moves alone, over the link of one multiprocessor: merges by the last program to arrive.

:class:`Latencies` has the constants and their sources, :data:`WORK` the work of each kernel; a kernel that is not in it counts as
:data:`SMALL`. This is an estimate, for comparing two forms of a kernel and for seeing where the time goes; nothing in it was measured here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ...kernels.fused.hopper import MULTIPROCESSORS, resident
from ..floor import Hardware, distinct_experts
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
class Work:
    """Work of one launch.

    Attributes:
        bytes: streamed from memory by all programs together.
        programs: that share them.
        in_flight: bytes that a program has requested at a time.
        memory, cache: exposed round trips, those that fill the stream's pipeline included.
        alone: bytes that one program moves over the link of its multiprocessor.
        flops: operations of all programs.
    """

    bytes: float = 0.0
    programs: int = 1
    in_flight: float = 16 * 1024
    memory: float = 0
    cache: float = 0
    alone: float = 0.0
    flops: float = 0.0


SMALL = Work(cache=3)
"""A kernel of one or a few programs over small buffers: it loads its arguments, loads what they point to, and stores."""
_FIELDS = ("weight", "scales", "super_scales", "zeros", "minimums", "super_minimums", "group_of")
"""Arguments of a product that are its weight."""
_ARRIVAL = 3
"""Round trips of a merge: the stores drain, the counter is incremented, the parts of the other programs are loaded."""


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


@dataclass(frozen=True, slots=True)
class Situation:
    """Properties of the engine that the work of a launch depends on.

    Attributes:
        context: committed tokens of each row.
        programmatic: kernels of ours begin while the one before them drains.
    """

    context: int
    programmatic: bool = False


def _linear(step: Step, at: Situation) -> Work:
    values = step.values
    weight = values["weight"]
    channels, item = values["inputs"], values["x"].element_size()
    held = sum(values[name].nbytes for name in _FIELDS if values[name] is not None)
    cut = values["SPLITS"] > 1
    rows = values["rows"]
    halves = 2 if values["GATED"] else 1
    # Codes may have less than a byte.
    tile = (values["TILE_O"] * halves * weight[0].nbytes / channels + values["TILE_M"] * item) * values["TILE_K"]
    part = values["SPLITS"] * values["TILE_O"] * halves * min(rows, values["TILE_M"]) * 4 if cut else 0
    logits = 4 * rows * weight.shape[0] if values["out"].element_size() == 4 and item < 4 else 0
    # The inputs of the norm's factors arrive together with the first weights, which are on their way to the cache while the kernel before
    # still runs.
    ahead = at.programmatic and values["PREFETCH"] > 0
    return Work(
        bytes=held + logits,
        programs=step.programs,
        in_flight=(step.stages - 1) * tile,
        memory=0 if ahead else 1,
        cache=(_ARRIVAL if cut else 1) + ahead,
        alone=part,
        flops=2 * rows * weight.shape[0] * channels,
    )


def _dequantise(step: Step, at: Situation) -> Work:
    values = step.values
    size = sum(values[name].nbytes for name in (*_FIELDS, "out") if values[name] is not None)
    return Work(bytes=size, programs=step.programs, in_flight=values["weight"].nbytes / step.programs, memory=1, cache=1)


def _tree_attention(step: Step, at: Situation) -> Work:
    values = step.values
    block, run = values["BLOCK"], values["RUN"]
    tokens = values["all_rows"] // values["REPEAT"]
    slots = min(at.context + tokens, values["length"])
    blocks, most = -(-slots // block), values["UNITS_PER_PROGRAM"] * values["programs"]
    unit = 1 if blocks <= most else run if -(-blocks // run) <= most else values["STRETCH"]
    units = -(-blocks // unit)
    lanes = values["table"].shape[0]
    arriving = min(units, values["programs"])
    rows = min(values["ROWS"], values["part_rows"])
    # A block of keys and values is in flight; its page ids were loaded while the block before was computed.
    in_turn = -(-units // values["programs"]) * min(unit, blocks)
    # The arrival, a claim, and the partials, this many per load.
    merge = _ARRIVAL + -(-units // values["MERGE_UNROLL"]) if units > 1 else 0
    row = 2 * values["DIM"] * values["keys"].element_size()
    return Work(
        bytes=lanes * values["GROUPS"] * slots * row,
        programs=lanes * values["GROUPS"] * arriving,
        in_flight=block * row,
        memory=in_turn,
        cache=1 + merge,
        alone=rows * units * (values["DIM"] + 2) * 4 / min(arriving, max(values["helpers"], 1)) if units > 1 else 0,
        flops=4 * lanes * values["all_rows"] * values["GROUPS"] * slots * values["DIM"],
    )


def _latent_attention(step: Step, at: Situation) -> Work:
    values = step.values
    lanes, block = values["table"].shape[0], values["BLOCK_N"]
    slots = at.context + values["tokens"]
    blocks = -(-slots // (block * values["splits"]))
    row = (values["width"] + values["rope"]) * values["pool"].element_size()
    return Work(
        bytes=lanes * slots * row, programs=step.programs, in_flight=(step.stages - 1) * block * row,
        memory=1 + blocks / max(step.stages - 1, 1), cache=2,
    )  # fmt: skip


def _merge(step: Step, at: Situation) -> Work:
    values = step.values
    return Work(cache=1 + -(-values["splits"] // values["MERGE"]), alone=values["splits"] * values["width"] * 4)


def _vocabulary(step: Step, at: Situation) -> Work:
    logits = step.values["logits"]
    return Work(bytes=logits.numel() * logits.element_size(), programs=step.programs, memory=1, cache=1 + _ARRIVAL)


def _searched(step: Step, at: Situation) -> Work:
    """The last program of a row reads a list once for every 11 bits, and once more for the probability mass within top-k."""
    found = _vocabulary(step, at)
    passes = 4 if step.kernel == "kth_largest" else 3
    return Work(found.bytes, found.programs, found.in_flight, found.memory, found.cache + 2 * passes)


def _experts(step: Step, at: Situation) -> Work:
    values = step.values
    weight = values["weights"]
    count, topk = weight.shape[0], values["topk"]
    hit = distinct_experts(count, topk, values["count_all"] / topk)
    # Gate and up are two tiles.
    tile = values["ROWS"] * values["STEP"] * weight.element_size() * (2 if values.get("GATED") else 1)
    return Work(
        bytes=weight.numel() * weight.element_size() * hit / count,
        programs=step.programs,
        in_flight=max(step.stages - 1, 1) * tile,
        memory=1,
        cache=2,
        flops=2 * values["count_all"] * weight[0].numel(),
    )


def _states(step: Step, at: Situation) -> Work:
    """States of recurrent layers: read once from memory, for one layer by verification; the commit writes them too, for all layers.

    A program that holds its tile processes tokens one by one, in the commit after looking each up on the path; others read the state part
    by part.
    """
    values = step.values
    commits, matrix = "length" in values, values["matrix"]
    if commits:
        layers, turns = matrix.shape[1], 2 * values["steps"]
    else:
        layers, turns = 1, values["KEY_PAD"] // values["PART"] if "PART" in values else values["nodes"]
    return Work(
        bytes=4 * values["lane_row"].shape[0] * layers * matrix[0, 0].numel() * (2 if commits else 1),
        programs=step.programs,
        in_flight=4 * values.get("PART", values["KEY_PAD"]) * values["COLUMNS"],
        memory=1,
        cache=1 + turns,
    )


def _library(step: Step, at: Situation) -> Work:
    weight = step.values["weight"]
    matrix = weight.shape[-1] * weight.shape[-2]
    size, flops = weight.numel() * weight.element_size(), 2 * step.values["rows"] * matrix
    return Work(size, MULTIPROCESSORS, in_flight=64 * 1024, memory=1, cache=1, flops=flops)


WORK: Mapping[str, Callable[[Step, Situation], Work]] = {
    "linear": _linear,
    "dequantise": _dequantise,
    "tree_attention": _tree_attention,
    "latent_attention": _latent_attention,
    "merge": _merge,
    "sample_tokens": _vocabulary,
    "draft_topk": _vocabulary,
    "peaks": _vocabulary,
    "histogram": _vocabulary,
    "kth_largest": _searched,
    "least": _searched,
    "gate_up": _experts,
    "down": _experts,
    "walk_nodes": _states,
    "block_nodes": _states,
    "commit_states": _states,
    LIBRARY: _library,
}


def work_of(step: Step, at: Situation) -> Work:
    """The work of a launch."""
    describe = WORK.get(step.kernel)
    return SMALL if describe is None else describe(step, at)


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
    entries = [used for used in _table().get(step.kernel, []) if used["warps"] == step.warps]
    if not entries:
        return MULTIPROCESSORS
    most = {key: max(used[key] for used in entries) for key in ("registers", "shared")}
    return MULTIPROCESSORS * resident({**most, "warps": step.warps})


def estimate(step: Step, at: Situation, hardware: Hardware, device: Latencies = HOPPER) -> Estimate:
    """Seconds of one launch.

    Args:
        step: the launch.
        at: what its work depends on.
        hardware: its bandwidth.
        device: constants of the GPU.
    """
    work, room = work_of(step, at), places(step)
    # Inductor's kernels and the library's begin after the one before them has ended.
    early = at.programmatic and step.kernel not in (INDUCTOR, LIBRARY)
    waves = -(-work.programs // room)
    exposed = waves * (work.memory * device.memory + work.cache * device.cache)
    stream = _stream(work, room, hardware.bandwidth, device)
    if hardware.flops is not None:
        stream = max(stream, work.flops / hardware.flops)
    return Estimate(step, work, device.programmatic_gap if early else device.gap, exposed, stream, work.alone / device.link)


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

    def total(pick: Callable[[Estimate], float]) -> float:
        return sum(map(pick, some))

    return Part(
        name, len(some), total(lambda e: e.work.memory), total(lambda e: e.work.cache), total(lambda e: e.work.bytes),
        total(lambda e: e.gap), total(lambda e: e.exposed), total(lambda e: e.stream), total(lambda e: e.alone),
    )  # fmt: skip


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
    at = Situation(context, programmatic)
    found = [estimate(step, at, hardware) for step in steps]
    return CycleEstimate(shape, batch, floor_ms, programmatic, by_kernel(found), _part("cycle", found))


def by_kernel(estimates: Iterable[Estimate]) -> list[Part]:
    """One part for each kernel, the most expensive first."""
    found: dict[str, list[Estimate]] = {}
    for one in estimates:
        found.setdefault(one.step.kernel, []).append(one)
    return sorted((_part(name, some) for name, some in found.items()), key=lambda part: -part.seconds)

"""The cycle: ordered stages become programs, programs are launched, results come back through the ring."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np
import torch

from ..errors import CaptureError, ResourceError
from ..kernels.huge_pages import use_huge_pages
from ..kernels.registry import KernelSet
from ..plan.buffers import RING_FIELDS, Arena, Views
from ..plan.plan import Plan
from ..shapes import GREEDY, GraphKey, SamplingClass
from .capture import Capturer, CaptureRecord, ProgramCapturer, capturing, check_unmoved, no_synchronisation, ran_out_of_memory, signature
from .compilations import Compilations
from .host_step import LaunchPreparation
from .memory import MemoryPlan
from .programs import Key, PrefillKey, Program, SharedRegions, describe, prefill_keys, program_stages, tokens_of
from .stages.logprobs import PROMPT_RING, RING, ring_buffers
from .stages.mailbox import MailLayout, Message, MessageBuffer, SharedPages
from .stages.stage import DraftModel, Stage, TargetModel, check_dataflow

Progress = Callable[[str, int, int, str], None]
logger = logging.getLogger(__name__)
TIMED_RUNS = 5
"""Runs of a program; its time is their median."""


@dataclass(frozen=True, slots=True)
class RingEntry:
    """The result of one launch, per lane of its message: new tokens and :class:`graphspec.plan.buffers.Status`.

    ``logprobs`` holds, for each new token, its own log-probability and those of the most likely tokens by id. ``prompt_logprobs`` holds the
    same for a scored prompt: for each token of the chunk, those of the token after it.
    """

    tokens: list[list[int]]
    status: list[int]
    logprobs: list[list[tuple[float, dict[int, float]]]] | None = None
    prompt_logprobs: Sequence[tuple[float, dict[int, float]]] = ()


@dataclass(frozen=True, slots=True)
class RingCopy:
    """One slot of one ring buffer: the device tensor, its copy on the host, and the host copy as a numpy array."""

    source: torch.Tensor
    tensor: torch.Tensor
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]


class Cycle:
    """All programs of an engine over one arena, and the two operations of the host: launch and read.

    Args:
        plan: every static number.
        target: the target network.
        draft: the draft network, None when the variant has none.
        kernels: one implementation per op.
        memory: the memory plan, for the message when memory runs out.
        capturer: makes the capturer of an arena; default: CUDA graphs if the plan is captured, else none.
        tuner: called with every program, uncompiled, before the first of them is compiled.
        loop_threads: of compiled loops on a CPU. None: as many as torch has.
    """

    def __init__(
        self,
        plan: Plan,
        target: TargetModel,
        draft: DraftModel | None,
        kernels: KernelSet,
        *,
        memory: MemoryPlan | None = None,
        capturer: Callable[[Arena], ProgramCapturer] | None = None,
        tuner: Callable[[Callable[[], None]], None] | None = None,
        loop_threads: int | None = None,
    ) -> None:
        self.plan, self.target, self.draft, self.kernels, self.memory = plan, target, draft, kernels, memory
        self.layout = MailLayout.of(plan)
        self.arena = Arena(plan, self.layout.size)
        for slot in self.arena.slots:
            if slot.kind == "kv":
                use_huge_pages(self.arena[slot.name])
        self.programs: dict[Key, Program] = {}
        self._regions: dict[Key, SharedRegions] = {}
        """By program without its sampling class."""
        self.dropped: set[Key] = set()
        """Programs left out because memory ran out; smaller buckets serve their lanes, smaller chunks their tokens."""
        make = capturer or (Capturer if plan.runtime.captured else None)
        self._capturer = make(self.arena) if make is not None else None
        self.compilations = Compilations()
        """This cycle's programs; constant after :meth:`prepare`."""
        self._records: dict[Key, CaptureRecord] = {}
        self._tuner, self._loop_threads = tuner, loop_threads
        self._wait_for_kernels: Callable[[], object] | None = None
        """Until the kernels of what was compiled are compiled too; None: nothing compiles them ahead."""
        step = kernels.host_step()
        self.preparation = LaunchPreparation(plan, step) if step is not None else None
        """The host step before each launch; None: the kernels need none."""
        pinned = plan.device == "cuda"
        # A message may still be on its way to the device while the next one is written, hence one buffer per ring slot.
        self._mail = [MessageBuffer(self.layout, pinned=pinned) for _ in range(plan.ring_depth)]
        front = self.arena["mail"][: self.layout.joins]
        self._send_front = [partial(front.copy_, buffer.words[: self.layout.joins], non_blocking=True) for buffer in self._mail]
        """Per ring slot: copies what a cycle reads of its message."""
        self._ring_copies: list[dict[str, RingCopy]] = [{} for _ in range(plan.ring_depth)]
        self._sent: list[tuple[int, int, int]] = [(0, -1, 0)] * plan.ring_depth
        """Per ring slot: lanes, alternatives and scored prompt tokens of the launch that fills it."""
        self._events: list[torch.cuda.Event | None] = [torch.cuda.Event() if pinned else None for _ in range(plan.ring_depth)]
        self._in_flight: deque[int] = deque()
        self._launched = 0
        self._whole = True
        """False during a launch or read, and after one that was interrupted."""

    def stages(self, key: Key) -> list[Stage]:
        """New stages of the program of ``key``, checked for dataflow."""
        stages = program_stages(self.plan, self.kernels, self.target, self.draft, key)
        check_dataflow(stages, (s.name for s in self.arena.slots if s.kind in ("mail", "state", "kv")))
        if self.preparation is not None:
            self.preparation.bind(key, stages)
        return stages

    def views(self, key: Key) -> Views:
        return self.arena.views(key.lanes) if isinstance(key, PrefillKey) else self.arena.views(key.bucket, key.shape)

    def buckets(self, sampling: SamplingClass) -> tuple[int, ...]:
        """Buckets whose cycles exist or can be built: the plan's, except those left out because memory ran out."""
        without = {key.bucket for key in self.dropped if isinstance(key, GraphKey) and key.sampling == sampling.of_cycles}
        return tuple(bucket for bucket in self.plan.buckets if bucket not in without)

    def prefills(self, sampling: SamplingClass) -> tuple[PrefillKey, ...]:
        """Prefill programs that exist or can be built."""
        return tuple(key for key in prefill_keys(self.plan, sampling) if key not in self.dropped)

    def capture_report(self) -> list[CaptureRecord]:
        """What it took to build each program, in the order they were built."""
        return list(self._records.values())

    def prepare(self, keys: Iterable[Key], progress: Progress | None = None) -> None:
        """Build the programs that do not exist yet. Nothing may be in flight.

        First each program runs once, which compiles and tunes it, then each is captured, both times the largest first. If programs are
        not captured, prefill is not compiled either: a prompt passes through it once, so compiling every chunk size would cost more than
        it saves. A cycle or chunk for which memory runs out is left out, with a warning, and smaller ones serve its lanes or tokens.

        Raises:
            CaptureError: a buffer moved since it was captured, or a program does what a graph can't hold.
            ResourceError: launches are unread, or memory ran out for the smallest cycle or the smallest prefill chunk.
        """
        if self._capturer:
            self.arena.check_addresses()
        missing = [key for key in keys if not self.prepared(key) and key not in self.dropped]
        if not missing:
            return
        if self._in_flight:
            raise ResourceError("cycle", "no cycle in flight while programs are built", f"{len(self._in_flight)} in flight")
        missing.sort(key=lambda key: tokens_of(key, self.plan.window_capacity), reverse=True)
        for key in missing:
            self.arena.allocate(key.sampling)
        self._open_ring()
        state = self.arena.snapshot(("mail", "state", "ring"))
        before = len(self.dropped)
        try:
            with torch.no_grad():
                self.arena["mail"].copy_(self._mail[0].write(Message(lanes=())))
                for key in missing if self._tuner is not None else ():
                    self._tune(key)
                ahead = self.kernels.compiling_ahead if self.plan.compiles else None
                with nullcontext() if ahead is None else ahead(self.plan.target.sharding.size) as self._wait_for_kernels:
                    built = self._each("compile" if self.plan.compiles else "build", missing, self._build, progress)
                if self._capturer is not None:
                    built = self._each("capture", built, self._capture, progress)
        finally:
            # Building runs programs, and a failed build must not leave the ring ahead of the host.
            self.arena.restore(state)
        for key in built:
            logger.info("built: %s", self._records[key].sentence)
        if len(self.dropped) > before:
            self._warn([key for key in missing if key in self.dropped], built)

    def _warn(self, dropped: list[Key], built: list[Key]) -> None:
        """Say what memory ran out for, and what is done instead."""
        instead, keys = [], []
        if any(isinstance(key, GraphKey) for key in dropped):
            rows = max((key.bucket for key in built if isinstance(key, GraphKey) and key.bucket in self.buckets(key.sampling)), default=0)
            instead.append(f"at most {rows} rows share a launch, the others wait their turn")
            keys.append("the bucket out of runtime.buckets")
        if any(isinstance(key, PrefillKey) for key in dropped):
            tokens = max((key.chunk for key in built if isinstance(key, PrefillKey)), default=0)
            instead.append(f"a launch reads at most {tokens} tokens of a prompt")
            keys.append("the chunk out of runtime.prefill_chunks")
        logger.warning(
            "memory ran out: no program for %s; %s (lower runtime.num_pages, or leave %s)%s",
            "; ".join(map(describe, dropped)), ", and ".join(instead), " and ".join(keys), f": {self.memory.text()}" if self.memory else "",
        )  # fmt: skip

    def prepared(self, key: Key) -> bool:
        """The program can be launched. One whose capture was interrupted can't."""
        program = self.programs.get(key)
        return program is not None and (self._capturer is None or program.replay is not None)

    def _each(self, phase: str, keys: list[Key], do: Callable[[Key], None], progress: Progress | None) -> list[Key]:
        """``do`` for every key; returns those for which memory sufficed."""
        done: list[Key] = []
        for number, key in enumerate(keys):
            if progress:
                progress(phase, number, len(keys), describe(key))
            try:
                do(key)
            except Exception as error:
                if not ran_out_of_memory(error):
                    raise
                if not self._dispensable(key, keys[number + 1 :]):
                    hint = self.memory.text() if self.memory else ""
                    raise ResourceError("memory", f"room for the program of a {describe(key)}", "none left on the device", hint) from error
                self.programs.pop(key, None)
                self._records.pop(key, None)
                self.dropped.add(key)
            else:
                done.append(key)
        if progress:
            progress(phase, len(keys), len(keys), "")
        return done

    def _dispensable(self, key: Key, coming: list[Key]) -> bool:
        """A smaller cycle, or a smaller chunk, of the same class exists or is about to be built."""
        others = (*coming, *(other for other in self.programs if other != key))
        if isinstance(key, PrefillKey):
            return any(
                isinstance(other, PrefillKey) and other.sampling == key.sampling and (other.lanes, other.chunk) < (key.lanes, key.chunk)
                for other in others
            )
        return any(isinstance(other, GraphKey) and other.sampling == key.sampling and other.bucket < key.bucket for other in others)

    def _tune(self, key: Key) -> None:
        assert self._tuner is not None
        stages, views = self.stages(key), self.views(key)

        def run() -> None:
            for stage in stages:
                stage(views)

        with nullcontext() if self.kernels.scope is None else self.kernels.scope():
            self._tuner(run)

    def _build(self, key: Key) -> None:
        started = time.perf_counter()
        prefills = isinstance(key, PrefillKey)
        compiled = self.plan.compiles and not (prefills and self._capturer is None)
        threads, counted = self._loop_threads, self.compilations
        stages, views, scope = self.stages(key), self.views(key), self.kernels.scope
        # Replayed programs don't notice in how many parts they were compiled.
        regions = self._regions.setdefault(replace(key, sampling=GREEDY), {}) if self._capturer is not None else None
        program = Program(
            stages, views, compiled=compiled, threads=threads, prefills=prefills, compilations=counted, scope=scope, regions=regions
        )
        program.compile()
        if self._wait_for_kernels is not None:
            self._wait_for_kernels()
        program.direct()
        self._wait()
        self.programs[key] = program
        self._records[key] = CaptureRecord(describe(key), time.perf_counter() - started)

    def _capture(self, key: Key) -> None:
        assert self._capturer is not None
        started, program = time.perf_counter(), self.programs[key]
        with capturing(describe(key)):
            grown = program.capture(self._capturer)
        program.buffers = signature(program.views)
        self._wait()
        seconds = time.perf_counter() - started
        self._records[key] = replace(self._records[key], capture_seconds=seconds, pool_bytes=grown)

    def time_depths(self, buckets: Iterable[int], sampling: SamplingClass, runs: int = TIMED_RUNS) -> dict[int, dict[int, float]]:
        """What the prepared cycles of each depth cost: bucket to depth to seconds, the median of some runs. Only between runs.

        Programs are static, so an empty message costs what a full one does, but for attention over long prefixes. Depths take turns, so
        that a clock that changes meanwhile changes all of them. State stays as it is.

        Raises:
            ResourceError: launches are unread, or a cycle was not prepared.
        """
        if self._in_flight:
            raise ResourceError("cycle", "no cycle in flight while programs are timed", f"{len(self._in_flight)} in flight")
        keys = [self.plan.key(bucket, sampling, depth) for bucket in buckets for depth in self.plan.depths_of(bucket)]
        missing = [describe(key) for key in keys if key not in self.programs]
        if missing:
            raise ResourceError("cycle", "programs prepared before they are timed", "; ".join(missing))
        if self.preparation is not None:
            for key in keys:
                self.preparation.prepare(key)
        state = self.arena.snapshot(("mail", "state", "ring"))
        found: dict[GraphKey, list[float]] = {key: [] for key in keys}
        try:
            with torch.no_grad():
                self.arena["mail"].copy_(self._mail[0].write(Message(lanes=())))
                # The first turn is not counted: what the last program left in the caches is another's.
                for turn in range(runs + 1):
                    for key in keys:
                        seconds = self._time(self.programs[key])
                        found[key] += [seconds] if turn else []
        finally:
            self.arena.restore(state)
        times: dict[int, dict[int, float]] = {}
        for key, each in found.items():
            times.setdefault(key.bucket, {})[key.shape.num_steps] = median(each)
        return times

    def _time(self, program: Program) -> float:
        if self.plan.device != "cuda":
            started = time.perf_counter()
            program()
            return time.perf_counter() - started
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        program()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def _wait(self) -> None:
        if self.plan.device == "cuda":
            torch.cuda.synchronize()

    def ready(self, key: Key, message: Message) -> None:
        """The host step before a program runs on ``message``. :meth:`launch` takes it by itself; taking it twice changes nothing."""
        if self.preparation is not None:
            self.preparation.send(key, message)

    def launch(self, key: Key, message: Message) -> int:
        """Send ``message``, run the program of ``key``; returns a ticket for :meth:`read`.

        A launch that raises may have run on the device, in part or as a whole. Nothing can be launched or read after it before
        :meth:`reset`.

        Raises:
            ResourceError: as many launches are unread as the ring can hold, the program was not prepared, :meth:`reset` is due, or the
                program needs a host step and the length of a row is not known yet.
            CaptureError: the launch compiled something; in debug mode also a buffer that is not what it was when the program was built.
        """
        if not self._whole:
            raise self._interrupted()
        if len(self._in_flight) >= self.plan.ring_depth - 1:
            raise ResourceError("ring", f"at most {self.plan.ring_depth - 1} unread launches", len(self._in_flight))
        program = self.programs.get(key)
        if program is None:
            raise ResourceError("cycle", "a program prepared before the run", key)
        ticket, compiled = self._launched, self.compilations.graphs
        slot = ticket % self.plan.ring_depth
        if self.plan.debug:
            self.arena.check_addresses()
            check_unmoved(program.views, program.buffers)
        if self.preparation is not None:
            self.preparation.launch(key, message, len(self._in_flight))
        # The device counts as soon as its program runs, whether or not this call returns.
        self._whole = False
        self._launched = ticket + 1
        self._in_flight.append(ticket)
        if self.plan.debug:
            with torch.no_grad(), nullcontext() if program.on_host else no_synchronisation(self.arena.device):
                self.arena.poison(("lane",))
                self._send(slot, program, key, message)
        else:
            with torch.no_grad():
                self._send(slot, program, key, message)
        if (late := self.compilations.graphs - compiled) != 0:
            raise CaptureError(describe(key), "no compilation after the warm-up", f"{late} graphs compiled")
        self._whole = True
        return ticket

    def _send(self, slot: int, program: Program, key: Key, message: Message) -> None:
        """One copy to the device, one program, one copy back."""
        words = self._mail[slot].write(message)
        for shared in message.shared:
            self.share(shared)
        if program.prefills:
            self.arena["mail"].copy_(words, non_blocking=True)
        else:
            self._send_front[slot]()
        for stage in program.on_host:
            stage.grammars = message.grammars
        program()
        sampling = key.sampling
        scored = len(message.chunks[0].tokens) if sampling.prompt_logprobs and message.chunks else 0
        self._sent[slot] = (len(message.lanes), sampling.logprobs, scored)
        event = self._events[slot]
        if event is not None:
            for name in ring_buffers(sampling):
                copy = self._ring_copies[slot][name]
                copy.tensor.copy_(copy.source, non_blocking=True)
            event.record()

    def share(self, shared: SharedPages) -> None:
        """Write pages that a row takes over into its table, and their tokens where rows keep theirs. Ordered like a launch."""
        slots: list[tuple[str, Sequence[int]]] = [("page_table_RP", shared.pages)]
        slots += [("history_RL", shared.tokens)] if self.plan.keeps_history else []
        for name, values in slots:
            row = self.arena[name][shared.row, : len(values)]
            row.copy_(torch.tensor(values, dtype=row.dtype, pin_memory=self.plan.device == "cuda"), non_blocking=True)

    def _open_ring(self) -> None:
        """Where the host reads the ring's buffers, for all there are by now: where they lie, or in pinned memory they are copied to."""
        for name in (slot.name for slot in self.arena.slots if slot.kind == "ring"):
            for index, copies in enumerate(self._ring_copies):
                if name not in copies:
                    source = self.arena[name][index]
                    on_host = source if self.plan.device == "cpu" else torch.zeros(source.shape, dtype=source.dtype, pin_memory=True)
                    copies[name] = RingCopy(source, on_host, on_host.numpy())

    def read(self, ticket: int) -> RingEntry:
        """Wait for a launch and return its ring entry; tickets are read in the order of launch.

        Raises:
            ResourceError: ``ticket`` is not the oldest unread one, or :meth:`reset` is due.
        """
        if not self._whole:
            raise self._interrupted()
        if not self._in_flight or self._in_flight[0] != ticket:
            raise ResourceError("ring", f"the oldest unread ticket {self._in_flight[0] if self._in_flight else None}", ticket)
        self._whole = False
        self._in_flight.popleft()
        slot = ticket % self.plan.ring_depth
        event = self._events[slot]
        if event is not None:
            event.synchronize()
        count, alternatives, scored = self._sent[slot]
        found = self._ring_copies[slot]
        lanes = found["ring_ZBJ"].array[:count].tolist()
        tokens = [lane[RING_FIELDS : RING_FIELDS + lane[0]] for lane in lanes]
        logprobs = self._read_logprobs(found, alternatives, tokens) if alternatives >= 0 else None
        if self.preparation is not None:
            self.preparation.received(tokens)
        self._whole = True
        return RingEntry(tokens, [lane[1] for lane in lanes], logprobs, self._read_prompt_logprobs(found, scored))

    @staticmethod
    def _interrupted() -> ResourceError:
        hint = "Cycle.reset forgets what is in flight"
        return ResourceError("ring", "launches and reads that ended", "one that was interrupted", hint)

    def reset(self) -> None:
        """Forget every unread launch, and make the device count launches as the host does, whatever ended when.

        The state of every row is undefined afterwards: a request goes on by a join and a prefill of the tokens known of it.
        """
        self._whole = False
        self._wait()
        self._in_flight.clear()
        if self.preparation is not None:
            self.preparation.reset()
        self.arena["cycle_1"].fill_(self._launched)
        for buffer in self._mail:
            buffer.forget()
        self._whole = True

    def clear_row(self, row: int, groups: AbstractSet[str]) -> None:
        """Give a row the neutral parameters in these groups of slots, for a request whose join has no room for them.

        Ordered like a launch: after the ones already made, before the next.

        Args:
            row: that no unread launch has as a lane.
            groups: fields of :class:`~graphspec.shapes.SamplingClass`; one whose slots are not allocated is neutral as it is.
        """
        with torch.no_grad():
            for slot in self.arena.slots:
                if slot.group in groups and slot.dims[0] == "R":
                    self.arena[slot.name][row].fill_(slot.fill)

    def write_row(self, row: int, values: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.integer]]]) -> None:
        """Write slots of a row that no message has room for. Ordered like a launch, as :meth:`clear_row` is.

        Args:
            row: that no unread launch has as a lane.
            values: by the name of a slot that is allocated, in the slot's shape for one row.
        """
        with torch.no_grad():
            for name, value in values.items():
                words = torch.from_numpy(value)
                # Pinned, the copy waits for no launch; torch keeps the memory until it has run.
                words = words.pin_memory() if self.plan.device == "cuda" else words
                self.arena[name][row].copy_(words, non_blocking=True)

    @staticmethod
    def _read_logprobs(found: Mapping[str, RingCopy], count: int, tokens: list[list[int]]) -> list[list[tuple[float, dict[int, float]]]]:
        chosen = found[RING[0]].array.tolist()
        if count == 0:
            return [[(chosen[lane][i], {}) for i in range(len(new))] for lane, new in enumerate(tokens)]
        values, names = (found[name].array[..., :count].tolist() for name in RING[1:])
        return [
            [(chosen[lane][i], dict(zip(names[lane][i], values[lane][i], strict=True))) for i in range(len(new))]
            for lane, new in enumerate(tokens)
        ]

    @staticmethod
    def _read_prompt_logprobs(found: Mapping[str, RingCopy], count: int) -> list[tuple[float, dict[int, float]]]:
        if count == 0:
            return []
        chosen, values, names = (found[name].array[:count].tolist() for name in PROMPT_RING)
        return [(one, dict(zip(ids, top, strict=True))) for one, top, ids in zip(chosen, values, names, strict=True)]

    @property
    def in_flight(self) -> int:
        """Launches whose result has not been read."""
        return len(self._in_flight)

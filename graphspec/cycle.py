"""The cycle: ordered stages become programs, programs are launched, results come back through the ring."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from .buffers import RING_FIELDS, Arena, Views
from .errors import ResourceError
from .graphs.accept import Accept
from .graphs.capture import Capturer
from .graphs.commit import Commit, CommitState
from .graphs.compile import compile_stages, graphs_compiled
from .graphs.counts import OutputCounts, PromptCounts
from .graphs.draft import DraftExtend, DraftSteps, StaticSteps
from .graphs.heads import HeadSteps
from .graphs.logprobs import RING, Logprobs
from .graphs.mailbox import Mailbox, MailLayout, Message
from .graphs.ngram import HostTree, NgramMatch
from .graphs.prefill import Prefill
from .graphs.stage import Build, DraftModel, Stage, TargetModel, check_dataflow
from .graphs.tree import ChainLayout, TreeBuild
from .graphs.verify import Verify
from .kernels.registry import KernelSet
from .plan import Plan
from .shapes import GraphKey, SamplingClass

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, order=True)
class PrefillKey:
    """A prefill program: chunk size, and what its request asks of the sampler."""

    chunk: int
    sampling: SamplingClass


Key = GraphKey | PrefillKey


@dataclass(frozen=True, slots=True)
class RingEntry:
    """What one launch told the host, per lane: new tokens and :class:`graphspec.buffers.Status`.

    With log-probabilities, also for each token its own and the most likely ones by token id.
    """

    tokens: list[list[int]]
    status: list[int]
    logprobs: list[list[tuple[float, dict[int, float]]]] | None = None


def draft_stages(build: Build) -> list[Stage]:
    """Stages 1 and 2, which fill the candidate pool: by network, by the row's history, or by the host."""
    plan, shape = build.plan, build.shape
    if shape.num_steps == 0:
        return []
    if plan.variant.drafter == "history":
        return [NgramMatch(build)]
    if plan.variant.drafter == "host":
        return [HostTree(build)]
    if plan.lookback:
        return [HeadSteps(build)]
    if shape.num_steps == 1:
        return [DraftExtend(build)]
    return [DraftExtend(build), StaticSteps(build) if plan.static_tree is not None else DraftSteps(build)]


def cycle_stages(build: Build) -> list[Stage]:
    """The stages of one speculative cycle in order; the structure follows from the shape alone."""
    shape = build.shape
    stages: list[Stage] = [Mailbox(build)]
    stages += draft_stages(build)
    stages.append(ChainLayout(build) if shape.is_chain else TreeBuild(build))
    stages += [Verify(build), Accept(build)]
    if not shape.is_chain:
        stages.append(CommitState(build))
    if build.sampling.logprobs >= 0:
        stages.append(Logprobs(build))
    stages.append(Commit(build))
    if build.sampling.penalties:
        stages.append(OutputCounts(build))
    return stages


def program_stages(plan: Plan, kernels: KernelSet, target: TargetModel, draft: DraftModel | None, key: Key) -> list[Stage]:
    """The stages of the program behind ``key``, in order. Builds no buffer and needs no device."""
    if isinstance(key, PrefillKey):
        build = Build(plan, kernels, target, draft, plan.shape, key.sampling)
        return [Mailbox(build), *([PromptCounts(build, key.chunk)] if key.sampling.penalties else []), Prefill(build, key.chunk)]
    return cycle_stages(Build(plan, kernels, target, draft, key.shape, key.sampling))


class Program:
    """One program: its stages on one bucket's views.

    A launch runs ``replay`` where the program was captured, else ``direct``: stage after stage, or all of them as one compiled region.
    ``steps`` run single stages, for those who want to look in between; compiled ones compile when they are first called.
    """

    def __init__(self, stages: list[Stage], views: Views, *, compiled: bool) -> None:
        self.stages = stages
        self.steps: list[Callable[[], None]] = [compile_stages([s], views) if compiled else partial(s, views) for s in stages]
        self.direct: Callable[[], None] = compile_stages(stages, views) if compiled else self._in_order
        self.replay: Callable[[], None] | None = None

    def _in_order(self) -> None:
        for step in self.steps:
            step()

    def __call__(self) -> None:
        (self.replay or self.direct)()


class Cycle:
    """All programs of an engine over one arena, and the two moves of the host: launch, read.

    Args:
        plan: every static number.
        target: the target network.
        draft: the draft network, None when the variant has none.
        kernels: one implementation per op.
    """

    def __init__(self, plan: Plan, target: TargetModel, draft: DraftModel | None, kernels: KernelSet) -> None:
        self.plan, self.target, self.draft, self.kernels = plan, target, draft, kernels
        self.layout = MailLayout.of(plan)
        self.arena = Arena(plan, self.layout.size)
        self.programs: dict[Key, Program] = {}
        self._capturer = Capturer(self.arena) if plan.captured else None
        pinned = plan.device == "cuda"
        # A message may still be on its way to the device while the next one is written, hence one buffer per ring slot.
        self._mail = [torch.zeros(self.layout.size, dtype=torch.int64, pin_memory=pinned) for _ in range(plan.ring_depth)]
        self._results: list[dict[str, torch.Tensor]] = [{} for _ in range(plan.ring_depth)]
        self._alternatives = [-1] * plan.ring_depth
        self._events: list[torch.cuda.Event | None] = [torch.cuda.Event() if pinned else None for _ in range(plan.ring_depth)]
        self._in_flight: deque[int] = deque()
        self._launched = 0

    def stages(self, key: Key) -> list[Stage]:
        """Fresh stages of the program behind ``key``, checked for dataflow."""
        stages = program_stages(self.plan, self.kernels, self.target, self.draft, key)
        check_dataflow(stages, (s.name for s in self.arena.slots if s.kind in ("mail", "state", "kv")))
        return stages

    def views(self, key: Key) -> Views:
        return self.arena.views(1 if isinstance(key, PrefillKey) else key.bucket)

    def prepare(self, keys: Iterable[Key], progress: Progress | None = None) -> None:
        """Build, compile and capture the programs that do not exist yet. Only between runs: nothing may be in flight.

        Prefill stays direct under every runtime: a prompt runs through it once, compiling each chunk size costs more than it saves.

        Raises:
            CaptureError: a buffer moved since it was captured.
            ResourceError: launches are unread.
        """
        if self._capturer:
            self.arena.check_addresses()
        missing = [key for key in keys if key not in self.programs]
        if not missing:
            return
        if self._in_flight:
            raise ResourceError("cycle", "no cycle in flight while programs are built", f"{len(self._in_flight)} in flight")
        for key in missing:
            self.arena.allocate(key.sampling)
        self._pin_results()
        state = self.arena.snapshot(("mail", "state", "ring"))
        phase = "compile" if self.plan.kernels == "compiled" else "build"
        try:
            with torch.no_grad():
                for done, key in enumerate(missing):
                    if progress:
                        progress(phase, done, len(missing))
                    self.layout.encode(Message(lanes=()), self._mail[0])
                    self.arena["mail"].copy_(self._mail[0])
                    self.programs[key] = self._build(key)
        finally:
            # Building runs programs, and a failed build must not leave the ring ahead of the host.
            self.arena.restore(state)
        if progress:
            progress(phase, len(missing), len(missing))

    def _build(self, key: Key) -> Program:
        direct = isinstance(key, PrefillKey)
        program = Program(self.stages(key), self.views(key), compiled=self.plan.kernels == "compiled" and not direct)
        program()
        if self._capturer and not direct:
            program.replay = self._capturer.capture(program.direct)
        return program

    def launch(self, key: Key, message: Message) -> int:
        """Send ``message``, run the program behind ``key``; returns a ticket for :meth:`read`.

        Raises:
            ResourceError: as many launches are unread as the ring can hold, or the program was not prepared.
        """
        if len(self._in_flight) >= self.plan.ring_depth - 1:
            raise ResourceError("ring", f"at most {self.plan.ring_depth - 1} unread launches", len(self._in_flight))
        if key not in self.programs:
            raise ResourceError("cycle", "a program prepared before the run", key)
        slot = self._launched % self.plan.ring_depth
        with torch.no_grad(), torch.compiler.set_stance(skip_guard_eval_unsafe=True):
            self.layout.encode(message, self._mail[slot])
            self.arena["mail"].copy_(self._mail[slot], non_blocking=True)
            self.programs[key]()
            self._alternatives[slot] = key.sampling.logprobs
            self._copy_out(slot)
        ticket = self._launched
        self._in_flight.append(ticket)
        self._launched += 1
        return ticket

    def _copy_out(self, slot: int) -> None:
        event = self._events[slot]
        if event is None:
            return
        for name in self._ring_names(slot):
            self._results[slot][name].copy_(self.arena[name][slot], non_blocking=True)
        event.record()

    def _ring_names(self, slot: int) -> tuple[str, ...]:
        """Ring slots that the launch behind ``slot`` filled."""
        alternatives = self._alternatives[slot]
        return ("ring_ZBJ", *(RING if alternatives > 0 else RING[:1] if alternatives == 0 else ()))

    def _pin_results(self) -> None:
        """Host memory for every ring slot there is by now, where results have to be copied to the host."""
        if self.plan.device != "cuda":
            return
        for name in (slot.name for slot in self.arena.slots if slot.kind == "ring"):
            for results in self._results:
                like = self.arena[name][0]
                results.setdefault(name, torch.zeros(like.shape, dtype=like.dtype, pin_memory=True))

    def read(self, ticket: int) -> RingEntry:
        """Wait for a launch and return its ring entry; tickets are read in the order of launch.

        Raises:
            ResourceError: ``ticket`` is not the oldest unread one.
        """
        if not self._in_flight or self._in_flight[0] != ticket:
            raise ResourceError("ring", f"the oldest unread ticket {self._in_flight[0] if self._in_flight else None}", ticket)
        self._in_flight.popleft()
        slot = ticket % self.plan.ring_depth
        event = self._events[slot]
        if event is not None:
            event.synchronize()
        found = {name: self.arena[name][slot] if event is None else self._results[slot][name] for name in self._ring_names(slot)}
        lanes = found["ring_ZBJ"].tolist()
        tokens = [lane[RING_FIELDS : RING_FIELDS + lane[0]] for lane in lanes]
        return RingEntry(tokens, [lane[1] for lane in lanes], self._read_logprobs(slot, found, tokens))

    def _read_logprobs(
        self, slot: int, found: Mapping[str, torch.Tensor], tokens: list[list[int]]
    ) -> list[list[tuple[float, dict[int, float]]]] | None:
        count = self._alternatives[slot]
        if count < 0:
            return None
        chosen = found[RING[0]].tolist()
        if count == 0:
            return [[(chosen[lane][i], {}) for i in range(len(new))] for lane, new in enumerate(tokens)]
        values, names = (found[name][..., :count].tolist() for name in RING[1:])
        return [
            [(chosen[lane][i], dict(zip(names[lane][i], values[lane][i], strict=True))) for i in range(len(new))]
            for lane, new in enumerate(tokens)
        ]

    @property
    def in_flight(self) -> int:
        """Launches whose result has not been read."""
        return len(self._in_flight)

    def compiled_graphs(self) -> int:
        """Graphs compiled in this process; does not change after :meth:`prepare`."""
        return graphs_compiled()

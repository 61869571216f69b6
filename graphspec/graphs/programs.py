"""Programs: which stages make one, in which order, and how it is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from ..config.catalog import load_object
from ..errors import ResourceError
from ..kernels.registry import KernelSet, Scope
from ..plan.buffers import Views
from ..plan.plan import Plan
from ..shapes import MAX_PADDING, GraphKey, SamplingClass
from .capture import ProgramCapturer, Signature, signature
from .compilations import Compilations
from .stages.acceptance_rules import Accept
from .stages.bans import RecentTokens
from .stages.catch_up import CatchUp
from .stages.commit import Commit, CommitRecurrent, CommitState
from .stages.counts import PromptCounts
from .stages.grammar import ForcedRuns, GrammarMasks, TreeToHost
from .stages.logprobs import Logprobs
from .stages.mailbox import Mailbox
from .stages.prefill import FirstToken, Prefill
from .stages.stage import Build, DraftModel, HostStage, Stage, TargetModel
from .stages.verify import ChainLayout, TreeBuild, Verify

if TYPE_CHECKING:
    from .compile import Region


@dataclass(frozen=True, slots=True, order=True)
class PrefillKey:
    """A prefill program: chunk size, what its requests ask of the sampler, and lanes."""

    chunk: int
    sampling: SamplingClass
    lanes: int = 1


Key = GraphKey | PrefillKey


def prefill_keys(plan: Plan, sampling: SamplingClass, tokens: int | None = None) -> tuple[PrefillKey, ...]:
    """Every prefill program of a class that prompts of at most ``tokens`` tokens may be read by; None: of any length.

    A prompt whose tokens are scored is read alone. The smallest chunk is always among them.
    """
    shapes = [shape for shape in plan.prefill_shapes if shape[0] == 1 or not sampling.prompt_logprobs]
    if tokens is not None:
        least = plan.prefill_chunks[0]
        shapes = [(lanes, chunk) for lanes, chunk in shapes if chunk == least or chunk - tokens < MAX_PADDING]
    return tuple(PrefillKey(chunk, sampling, lanes) for lanes, chunk in shapes)


def describe(key: Key) -> str:
    """A program in words: lanes and depth of a cycle, tokens of a prefill chunk, what its requests ask of the sampler."""
    if isinstance(key, PrefillKey):
        what = f"prefill of {key.chunk} tokens" + (f" in each of {key.lanes} lanes" if key.lanes > 1 else "")
    else:
        what = f"cycle of {key.bucket} lanes, depth {key.shape.num_steps}{', catching up' if key.catch_up else ''}"
    return f"{what}, {describe_class(key.sampling)}"


def describe_class(sampling: SamplingClass) -> str:
    """What requests ask of the sampler, in words."""
    parts = [name for name in sampling.__slots__ if getattr(sampling, name) is True]
    parts += [f"{sampling.logprobs} logprobs"] if sampling.logprobs >= 0 else []
    return "+".join(parts) or "greedy"


def tokens_of(key: Key, capacity: int = 1) -> int:
    """Tokens one launch reads at once: what programs are ordered by, since it says how much memory they need.

    Args:
        key: of the program.
        capacity: window entries that a drafter which catches up reads per lane.
    """
    if isinstance(key, PrefillKey):
        return key.lanes * key.chunk
    return key.bucket * (capacity if key.catch_up else key.shape.num_draft_tokens)


def cycle_stages(build: Build, *, catch_up: bool = False) -> list[Stage]:
    """The stages of one speculative cycle in order; the structure follows from the shape, and from whether the drafter catches up."""
    shape = build.shape
    stages: list[Stage] = [Mailbox(build)]
    if catch_up:
        stages.append(CatchUp(build))
    elif shape.num_steps:
        if build.sampling.grammar and build.plan.variant.drafter != "host":
            # The host begins: there is one segment up to the tree. Where it drafts, the run came with the message.
            stages.insert(0, ForcedRuns(build))
        stages += load_object(build.plan.variant.stages)(build)
    stages.append(ChainLayout(build) if shape.is_chain else TreeBuild(build))
    if build.sampling.grammar:
        tree = TreeToHost(build)
        stages += [tree, Verify(build), GrammarMasks(build, tree), Accept(build)]
    else:
        stages += [Verify(build), Accept(build)]
    if not shape.is_chain:
        stages.append(CommitState(build))
    if build.plan.target.recurrent is not None:
        stages.append(CommitRecurrent(build))
    if build.sampling.logprobs >= 0:
        stages.append(Logprobs(build))
    # A draft network that has not read the window will want to.
    stages.append(Commit(build, append=build.plan.catches_up and shape.num_steps == 0 and not catch_up))
    if build.sampling.bad_words:
        stages.append(RecentTokens(build))
    return stages


def program_stages(plan: Plan, kernels: KernelSet, target: TargetModel, draft: DraftModel | None, key: Key) -> list[Stage]:
    """The stages of the program of ``key``, in order. Builds no buffer and needs no device."""
    if isinstance(key, PrefillKey):
        build = Build(plan, kernels, target, draft, plan.shape, key.sampling)
        counts = [PromptCounts(build, key.lanes, key.chunk)] if key.sampling.penalties else []
        masks = [GrammarMasks(build, None)] if key.sampling.grammar else []
        size = key.lanes, key.chunk
        return [*masks, Mailbox(build, key.lanes), *counts, Prefill(build, *size), FirstToken(build, *size)]
    return cycle_stages(Build(plan, kernels, target, draft, key.shape, key.sampling), catch_up=key.catch_up)


SharedRegions = dict[tuple[str, tuple[str, ...], tuple[str, ...]], "Region"]
"""Compiled stages that every sampling class has alike, over the same views, by name, reads and writes."""


def compiled_parts(stages: Sequence[Stage]) -> list[list[Stage]]:
    """Stages that are compiled together: what classes have in common is a part by itself, see :attr:`Stage.shared`."""
    parts: list[list[Stage]] = []
    for shared, group in groupby(stages, lambda stage: stage.shared):
        together = list(group)
        parts += [[stage] for stage in together] if shared else [together]
    return parts


def _in_order(parts: Sequence[Callable[[], None]]) -> None:
    for part in parts:
        part()


def _in_order_with(threads: int, parts: Sequence[Callable[[], None]]) -> None:
    from ..kernels.native.call import torch_loops

    with torch_loops(threads):
        _in_order(parts)


def _within(scope: Scope, run: Callable[[], None]) -> None:
    with scope():
        run()


def _runs_on_host(stage: Stage) -> bool:
    return isinstance(stage, HostStage)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive stages of a program that are captured as one, or that all run on the host; and what of them is compiled."""

    run: Callable[[], None]
    on_host: bool
    regions: Sequence[Region] = ()

    def compile(self) -> None:
        """Compile what is not compiled yet, without running it."""
        for region in self.regions:
            region.compile()


class Program:
    """One program: its stages on one bucket's views.

    A launch calls ``replay`` if the program was captured, else ``direct``. ``direct`` runs the stages one after another, as one compiled
    region, or as one tape of native ops. ``steps`` holds a callable per stage, for tools that look at the slots in between; compiled
    steps compile when they are first called.

    If the kernels record, the first call of ``direct`` runs every stage eagerly and notes its native calls. From then on, stages that did
    nothing else are played back from a tape, and each run of other stages is compiled as a region. Until then ``steps`` is empty.

    Stages that run on the host cut the program into ``segments``, each of which is compiled, recorded and captured by itself. If kernels
    record, a tape and a region are segments too.

    Args:
        stages: in order.
        views: slots of the bucket.
        compiled: compile the stages, or record them.
        threads: of torch's loops on a CPU, compiled or not; None: as many as torch has.
        prefills: the program reads the prompts of a message too.
        compilations: counts the graphs compiled for it.
        scope: that of its kernels.
        regions: compiled for other sampling classes of the same size; what this program compiles is added. None: it shares nothing, and
            its stages are compiled as one.
    """

    def __init__(
        self,
        stages: list[Stage],
        views: Views,
        *,
        compiled: bool,
        threads: int | None = None,
        prefills: bool = False,
        compilations: Compilations | None = None,
        scope: Scope | None = None,
        regions: SharedRegions | None = None,
    ) -> None:
        self.stages, self.views, self.threads, self.prefills = stages, views, threads, prefills
        self._compilations, self._scope = compilations, scope
        self._regions = regions
        self.steps: list[Callable[[], None]] = []
        self.direct: Callable[[], None] = self._record
        self.on_host = [stage for stage in stages if isinstance(stage, HostStage)]
        self.segments: list[Segment] = []
        groups = [(host, list(group)) for host, group in groupby(stages, _runs_on_host)]
        if not compiled:
            self.steps = [self._scoped(partial(stage, views)) for stage in stages]
            run: Callable[..., None] = _in_order if threads is None else partial(_in_order_with, threads)
            self.direct = self._run_steps if threads is None else partial(run, self.steps)
            if self.on_host:
                parts = ((host, self._scoped(partial(run, [partial(stage, views) for stage in group]))) for host, group in groups)
                self._set_segments([Segment(part, host) for host, part in parts])
        elif not stages[0].kernels.records:
            self.steps = [self._segment([stage]).run for stage in stages]
            self._set_segments([self._segment(group) for _, group in groups])
        self.replay: Callable[[], None] | None = None
        self.buffers: Signature = signature(views)

    def _scoped(self, run: Callable[[], None]) -> Callable[[], None]:
        return run if self._scope is None else partial(_within, self._scope, run)

    def _run_steps(self) -> None:
        _in_order(self.steps)

    def compile(self) -> None:
        """Compile what ``direct`` runs, without running it. What is recorded is compiled by the first run."""
        with nullcontext() if self._scope is None else self._scope():
            for segment in self.segments:
                segment.compile()

    def _segment(self, stages: Sequence[Stage]) -> Segment:
        """These stages as one. What does not run on the host is compiled by :meth:`Segment.compile`, or by the first call."""
        if _runs_on_host(stages[0]):
            return Segment(partial(_in_order, [partial(stage, self.views) for stage in stages]), True)
        regions = [self._region(part) for part in (compiled_parts(stages) if self._regions is not None else [stages])]
        return Segment(self._scoped(regions[0] if len(regions) == 1 else partial(_in_order, regions)), False, regions)

    def _region(self, stages: Sequence[Stage]) -> Region:
        """One part, compiled before if another class has it."""
        from .compile import compile_stages

        def compiled() -> Region:
            return compile_stages(stages, self.views, self.threads, self._compilations)

        first = stages[0]
        # A call that the host prepares is bound to the buffers of its own program.
        if self._regions is None or not first.shared or first.prepared_calls:
            return compiled()
        place = (first.name, first.reads, first.writes)
        found = self._regions.get(place)
        if found is None or not found.compiled:
            found = self._regions[place] = compiled()
        return found

    def _set_segments(self, segments: list[Segment]) -> None:
        self.segments = segments
        runs = [segment.run for segment in segments]
        self.direct = runs[0] if len(runs) == 1 else partial(_in_order, runs)

    def _record(self) -> None:
        """Run all stages, and build ``direct`` and ``steps`` from the calls they made."""
        from ..kernels.native.call import Calls, Tape, record, torch_loops

        with nullcontext() if self.threads is None else torch_loops(self.threads):
            # Host stages run here, but are not recorded.
            found = [stage(self.views) if _runs_on_host(stage) else record(partial(stage, self.views)) for stage in self.stages]
        self.steps = []
        segments: list[Segment] = []
        for kind, group in groupby(zip(self.stages, found, strict=True), lambda pair: type(pair[1])):
            stages, calls = zip(*group, strict=True)
            if kind is Calls:
                self.steps += [Tape([each]) for each in calls]
                segments.append(Segment(Tape(calls), False))
                continue
            self.steps += [self._segment([stage]).run for stage in stages]
            segments.append(self._segment(stages))
            segments[-1].compile()
        self._set_segments(segments)

    def capture(self, capturer: ProgramCapturer) -> int | None:
        """Capture the program, segment by segment if stages run on the host; returns the bytes added to the graphs' pool, None: no pool."""
        if not self.on_host:
            self.replay = replay = capturer.capture(self.direct)
            return replay.pool_bytes
        replays = [None if segment.on_host else capturer.capture(segment.run) for segment in self.segments]
        runs = [segment.run if replay is None else replay for segment, replay in zip(self.segments, replays, strict=True)]
        self.replay = partial(_in_order, runs)
        grown = [replay.pool_bytes for replay in replays if replay is not None and replay.pool_bytes is not None]
        return sum(grown) if grown else None

    def __call__(self) -> None:
        if self.replay is not None:
            self.replay()
        else:
            self.direct()


@dataclass(frozen=True, slots=True)
class ClassPrograms:
    """The programs of one sampling class.

    Attributes:
        sampling: the class.
        buckets: ascending lane counts whose cycles exist; more rows take turns.
        first: each bucket's cycle of the plan's depth.
        cycles: cycles by bucket and depth.
        catch_ups: by bucket, the cycle in which the drafter catches up; empty if it never has to.
        prefills: prefill programs that exist.
    """

    sampling: SamplingClass
    buckets: tuple[int, ...]
    first: dict[int, GraphKey]
    cycles: dict[tuple[int, int], GraphKey]
    catch_ups: dict[int, GraphKey]
    prefills: tuple[PrefillKey, ...]

    @classmethod
    def of(
        cls, plan: Plan, sampling: SamplingClass, buckets: tuple[int, ...], prefills: tuple[PrefillKey, ...] | None = None
    ) -> ClassPrograms:
        """The plan's programs of this class for these buckets, with these prefill programs (default: all)."""
        return cls(
            sampling,
            buckets,
            {bucket: plan.key(bucket, sampling) for bucket in buckets},
            {(bucket, depth): plan.key(bucket, sampling, depth) for bucket in buckets for depth in plan.depths_of(bucket)},
            {bucket: plan.key(bucket, sampling, catch_up=True) for bucket in buckets if plan.catches_up},
            prefills if prefills is not None else prefill_keys(plan, sampling),
        )


class PreparedPrograms:
    """The programs of every class prepared so far."""

    def __init__(self) -> None:
        self._classes: dict[SamplingClass, ClassPrograms] = {}
        self._chosen: dict[tuple[SamplingClass, int], ClassPrograms] = {}

    def add(self, programs: ClassPrograms) -> None:
        """Add a class, or replace the programs of one that is here."""
        self._classes[programs.sampling] = programs
        self._chosen = {}

    def choose(self, need: SamplingClass, lanes: int) -> ClassPrograms:
        """The class to run for ``lanes`` rows that together ask for ``need``: of those with the largest bucket, the cheapest.

        Raises:
            ResourceError: no class covers ``need``.
        """
        found = self._chosen.get((need, lanes))
        if found is None:
            covering = [programs for programs in self._classes.values() if programs.sampling | need == programs.sampling]
            if not covering:
                raise ResourceError("sampling class", f"programs for {need}, prepared before the launch", list(self._classes))
            found = min(covering, key=lambda programs: (-min(programs.buckets[-1], lanes), class_cost(programs.sampling)))
            self._chosen[need, lanes] = found
        return found


def class_cost(sampling: SamplingClass) -> tuple[bool, int, int]:
    """Sort key of classes, cheapest first: those whose programs wait for the host come last, then by how much they compute."""
    return sampling.grammar, sum(getattr(sampling, name) is True for name in sampling.__slots__), sampling.logprobs

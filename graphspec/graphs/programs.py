"""Programs: which stages make one, in which order, and how it is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from ..buffers import Views
from ..catalog import load_object
from ..kernels.registry import KernelSet
from ..kernels.threads import torch_loops
from ..plan import Plan
from ..shapes import GraphKey, SamplingClass
from .capture import ProgramCapturer, Signature, signature
from .compilations import Compilations
from .stages.accept import Accept
from .stages.bans import RecentTokens
from .stages.catch_up import CatchUp
from .stages.commit import Commit, CommitRecurrent, CommitState
from .stages.counts import PromptCounts
from .stages.grammar import ForcedRuns, GrammarMasks, TreeToHost
from .stages.logprobs import Logprobs
from .stages.mailbox import Mailbox
from .stages.prefill import Prefill
from .stages.stage import Build, DraftModel, HostStage, Stage, TargetModel
from .stages.tree import ChainLayout, TreeBuild
from .stages.verify import Verify


@dataclass(frozen=True, slots=True, order=True)
class PrefillKey:
    """A prefill program: chunk size, what its requests ask of the sampler, and lanes."""

    chunk: int
    sampling: SamplingClass
    lanes: int = 1


Key = GraphKey | PrefillKey


def prefill_keys(plan: Plan, sampling: SamplingClass) -> tuple[PrefillKey, ...]:
    """Every prefill program of a class. A prompt whose tokens are scored is read alone."""
    shapes = (shape for shape in plan.prefill_shapes if shape[0] == 1 or not sampling.prompt_logprobs)
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
    asked = [name for name in sampling.__slots__ if getattr(sampling, name) is True]
    asked += [f"{sampling.logprobs} logprobs"] if sampling.logprobs >= 0 else []
    return "+".join(asked) or "greedy"


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
        return [*masks, Mailbox(build, key.lanes), *counts, Prefill(build, key.lanes, key.chunk)]
    return cycle_stages(Build(plan, kernels, target, draft, key.shape, key.sampling), catch_up=key.catch_up)


def _in_order(parts: Sequence[Callable[[], None]]) -> None:
    for part in parts:
        part()


def _in_order_with(parts: Sequence[Callable[[], None]], threads: int) -> None:
    with torch_loops(threads):
        _in_order(parts)


def _runs_on_host(stage: Stage) -> bool:
    return isinstance(stage, HostStage)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a program that is run, compiled and captured as one; or what the host does between two of them."""

    run: Callable[[], None]
    on_host: bool


class Program:
    """One program: its stages on one bucket's views.

    A launch runs ``replay`` where the program was captured, else ``direct``: stage after stage, or all of them as one compiled region, or
    as one tape of native ops. ``threads``: of torch's loops on a CPU, compiled or not; None: as many as torch has. ``compilations`` counts
    the graphs compiled for it. ``steps`` run single stages, for those who want to look in between; compiled ones compile when they are
    first called. A program that ``prefills`` reads the prompts of a message too.

    Where kernels record, the first call of ``direct`` runs the stages as they are and notes their calls. Stages that did nothing else are
    played back from then on; each run of others between them is compiled as a region. There are no ``steps`` before.

    Where stages run on the host, the program is cut there: what lies between two of them is compiled, recorded and captured by itself.
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
    ) -> None:
        self.stages, self.views = stages, views
        self._compilations = compilations
        self.prefills = prefills
        self.steps: list[Callable[[], None]]
        self.direct: Callable[[], None]
        self.threads = threads
        self.on_host = [stage for stage in stages if isinstance(stage, HostStage)]
        self._segments: list[Segment] = []
        if compiled and stages[0].kernels.records:
            self.steps, self.direct = [], self._record
        elif compiled:
            self.steps = [self._part([stage], isinstance(stage, HostStage)) for stage in stages]
            self._cut([Segment(self._part(list(group), host), host) for host, group in groupby(stages, _runs_on_host)])
        else:
            self.steps = [partial(s, views) for s in stages]
            self.direct = self._in_order if threads is None else partial(self._in_order_with, threads)
            if self.on_host:
                parts = groupby(zip(stages, self.steps, strict=True), lambda pair: _runs_on_host(pair[0]))
                self._cut([Segment(self._direct([step for _, step in group]), host) for host, group in parts])
        self.replay: Callable[[], None] | None = None
        self.buffers: Signature = signature(views)

    def _in_order(self) -> None:
        _in_order(self.steps)

    def _in_order_with(self, threads: int) -> None:
        with torch_loops(threads):
            self._in_order()

    def _direct(self, steps: Sequence[Callable[[], None]]) -> Callable[[], None]:
        if self.threads is None:
            return partial(_in_order, steps)
        return partial(_in_order_with, steps, self.threads)

    def _part(self, stages: Sequence[Stage], on_host: bool, *, now: bool = False) -> Callable[[], None]:
        """These stages, compiled unless they run on the host; ``now``, or when they are first called."""
        if on_host:
            return partial(_in_order, [partial(stage, self.views) for stage in stages])
        from .compile import compile_stages

        region = compile_stages(stages, self.views, self.threads, self._compilations)
        if now:
            region.compile()
        return region

    def _cut(self, segments: list[Segment]) -> None:
        self._segments = segments
        runs = [segment.run for segment in segments]
        self.direct = runs[0] if len(runs) == 1 else partial(_in_order, runs)

    def _record(self) -> None:
        """Run all stages, and make ``direct`` and ``steps`` from what they did."""
        from ..kernels.native.record import record
        from ..kernels.native.tape import Calls, Tape

        with nullcontext() if self.threads is None else torch_loops(self.threads):
            # What the host does of a launch without grammars is recorded by nobody.
            found = [stage(self.views) if _runs_on_host(stage) else record(partial(stage, self.views)) for stage in self.stages]
        self.steps = []
        segments: list[Segment] = []
        for kind, group in groupby(zip(self.stages, found, strict=True), lambda pair: type(pair[1])):
            stages, calls = zip(*group, strict=True)
            if kind is Calls:
                self.steps += [Tape([each]) for each in calls]
                segments.append(Segment(Tape(calls), False))
                continue
            host = _runs_on_host(stages[0])
            self.steps += [self._part([stage], host) for stage in stages]
            segments.append(Segment(self._part(stages, host, now=True), host))
        self._cut(segments)

    def capture(self, capturer: ProgramCapturer) -> int | None:
        """Capture it, segment by segment where the host has stages; returns the bytes that the graphs' pool has grown by, None: no pool."""
        if not self.on_host:
            replay = capturer.capture(self.direct)
            self.replay = replay
            return replay.pool_bytes
        replays = [None if segment.on_host else capturer.capture(segment.run) for segment in self._segments]
        runs = [segment.run if replay is None else replay for segment, replay in zip(self._segments, replays, strict=True)]
        self.replay = partial(_in_order, runs)
        grown = [replay.pool_bytes for replay in replays if replay is not None and replay.pool_bytes is not None]
        return sum(grown) if grown else None

    def __call__(self) -> None:
        if self.replay is not None:
            self.replay()
        else:
            self.direct()

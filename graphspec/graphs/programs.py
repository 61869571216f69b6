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
from .capture import Signature, signature
from .compilations import Compilations
from .stages.accept import Accept
from .stages.bans import RecentTokens
from .stages.catch_up import CatchUp
from .stages.commit import Commit, CommitRecurrent, CommitState
from .stages.counts import PromptCounts
from .stages.logprobs import Logprobs
from .stages.mailbox import Mailbox
from .stages.prefill import Prefill
from .stages.stage import Build, DraftModel, Stage, TargetModel
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
        stages += load_object(build.plan.variant.stages)(build)
    stages.append(ChainLayout(build) if shape.is_chain else TreeBuild(build))
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
        return [Mailbox(build, key.lanes), *counts, Prefill(build, key.lanes, key.chunk)]
    return cycle_stages(Build(plan, kernels, target, draft, key.shape, key.sampling), catch_up=key.catch_up)


def _in_order(parts: Sequence[Callable[[], None]]) -> None:
    for part in parts:
        part()


class Program:
    """One program: its stages on one bucket's views.

    A launch runs ``replay`` where the program was captured, else ``direct``: stage after stage, or all of them as one compiled region, or
    as one tape of native ops. ``threads``: of torch's loops on a CPU, compiled or not; None: as many as torch has. ``compilations`` counts
    the graphs compiled for it. ``steps`` run single stages, for those who want to look in between; compiled ones compile when they are
    first called. A program that ``prefills`` reads the prompts of a message too.

    Where kernels record, the first call of ``direct`` runs the stages as they are and notes their calls. Stages that did nothing else are
    played back from then on; each run of others between them is compiled as a region. There are no ``steps`` before.
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
        if compiled and stages[0].kernels.records:
            self.steps, self.direct = [], self._record
        elif compiled:
            from .compile import compile_stages

            self.steps = [compile_stages([s], views, threads, compilations) for s in stages]
            self.direct = compile_stages(stages, views, threads, compilations)
        else:
            self.steps = [partial(s, views) for s in stages]
            self.direct = self._in_order if threads is None else partial(self._in_order_with, threads)
        self.replay: Callable[[], None] | None = None
        self.buffers: Signature = signature(views)

    def _in_order(self) -> None:
        _in_order(self.steps)

    def _in_order_with(self, threads: int) -> None:
        with torch_loops(threads):
            self._in_order()

    def _record(self) -> None:
        """Run all stages, and make ``direct`` and ``steps`` from what they did."""
        from ..kernels.native.record import record
        from ..kernels.native.tape import Calls, Tape

        with nullcontext() if self.threads is None else torch_loops(self.threads):
            found = [record(partial(stage, self.views)) for stage in self.stages]
        self.steps = []
        parts: list[Callable[[], None]] = []
        for native, group in groupby(zip(self.stages, found, strict=True), lambda pair: isinstance(pair[1], Calls)):
            stages, calls = zip(*group, strict=True)
            if native:
                self.steps += [Tape([each]) for each in calls]
                parts.append(Tape(calls))
                continue
            from .compile import compile_stages

            self.steps += [compile_stages([stage], self.views, self.threads, self._compilations) for stage in stages]
            region = compile_stages(stages, self.views, self.threads, self._compilations)
            region.compile()
            parts.append(region)
        self.direct = parts[0] if len(parts) == 1 else partial(_in_order, parts)

    def __call__(self) -> None:
        if self.replay is not None:
            self.replay()
        else:
            self.direct()

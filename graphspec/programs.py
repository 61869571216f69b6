"""Programs: which stages make one, in which order, and how it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from .buffers import Views
from .graphs.accept import Accept
from .graphs.capture import Signature, signature
from .graphs.catch_up import CatchUp
from .graphs.commit import Commit, CommitState
from .graphs.compile import compile_stages
from .graphs.counts import PromptCounts
from .graphs.draft import DraftExtend, DraftSteps, StaticSteps
from .graphs.heads import HeadSteps
from .graphs.logprobs import Logprobs
from .graphs.mailbox import Mailbox
from .graphs.ngram import HostTree, NgramMatch
from .graphs.prefill import Prefill
from .graphs.stage import Build, DraftModel, Stage, TargetModel
from .graphs.tree import ChainLayout, TreeBuild
from .graphs.verify import Verify
from .kernels.registry import KernelSet
from .kernels.threads import torch_loops
from .plan import Plan
from .shapes import GraphKey, SamplingClass


@dataclass(frozen=True, slots=True, order=True)
class PrefillKey:
    """A prefill program: chunk size, and what its request asks of the sampler."""

    chunk: int
    sampling: SamplingClass


Key = GraphKey | PrefillKey


def describe(key: Key) -> str:
    """A program in words: lanes and depth of a cycle, tokens of a prefill chunk, what its requests ask of the sampler."""
    asked = [name for name in ("noise", "truncate", "penalties", "bias") if getattr(key.sampling, name)]
    asked += [f"{key.sampling.logprobs} logprobs"] if key.sampling.logprobs >= 0 else []
    if isinstance(key, PrefillKey):
        what = f"prefill of {key.chunk} tokens"
    else:
        what = f"cycle of {key.bucket} lanes, depth {key.shape.num_steps}{', catching up' if key.catch_up else ''}"
    return f"{what}, {'+'.join(asked) or 'greedy'}"


def tokens_of(key: Key, capacity: int = 1) -> int:
    """Tokens one launch reads at once: what programs are ordered by, since it says how much memory they need.

    Args:
        key: of the program.
        capacity: window entries that a drafter which catches up reads per lane.
    """
    if isinstance(key, PrefillKey):
        return key.chunk
    return key.bucket * (capacity if key.catch_up else key.shape.num_draft_tokens)


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


def cycle_stages(build: Build, *, catch_up: bool = False) -> list[Stage]:
    """The stages of one speculative cycle in order; the structure follows from the shape, and from whether the drafter catches up."""
    shape = build.shape
    stages: list[Stage] = [Mailbox(build)]
    stages += [CatchUp(build)] if catch_up else draft_stages(build)
    stages.append(ChainLayout(build) if shape.is_chain else TreeBuild(build))
    stages += [Verify(build), Accept(build)]
    if not shape.is_chain:
        stages.append(CommitState(build))
    if build.sampling.logprobs >= 0:
        stages.append(Logprobs(build))
    # A draft network that has not read the window will want to.
    stages.append(Commit(build, append=build.plan.catches_up and shape.num_steps == 0 and not catch_up))
    return stages


def program_stages(plan: Plan, kernels: KernelSet, target: TargetModel, draft: DraftModel | None, key: Key) -> list[Stage]:
    """The stages of the program behind ``key``, in order. Builds no buffer and needs no device."""
    if isinstance(key, PrefillKey):
        build = Build(plan, kernels, target, draft, plan.shape, key.sampling)
        return [Mailbox(build), *([PromptCounts(build, key.chunk)] if key.sampling.penalties else []), Prefill(build, key.chunk)]
    return cycle_stages(Build(plan, kernels, target, draft, key.shape, key.sampling), catch_up=key.catch_up)


class Program:
    """One program: its stages on one bucket's views.

    A launch runs ``replay`` where the program was captured, else ``direct``: stage after stage, or all of them as one compiled region.
    ``threads``: of torch's loops on a CPU, compiled or not; None: as many as torch has. ``steps`` run single stages, for those who want to
    look in between; compiled ones compile when they are first called. A program that ``prefills`` reads the chunk of a message too.
    """

    def __init__(self, stages: list[Stage], views: Views, *, compiled: bool, threads: int | None = None, prefills: bool = False) -> None:
        self.stages, self.views = stages, views
        self.prefills = prefills
        self.steps: list[Callable[[], None]] = [compile_stages([s], views, threads) if compiled else partial(s, views) for s in stages]
        in_order = self._in_order if threads is None else partial(self._in_order_with, threads)
        self.direct: Callable[[], None] = compile_stages(stages, views, threads) if compiled else in_order
        self.replay: Callable[[], None] | None = None
        self.buffers: Signature = signature(views)

    def _in_order(self) -> None:
        for step in self.steps:
            step()

    def _in_order_with(self, threads: int) -> None:
        with torch_loops(threads):
            self._in_order()

    def __call__(self) -> None:
        if self.replay is not None:
            self.replay()
        else:
            self.direct()

"""Programs: which stages make one, in which order, and how it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..buffers import Views
from ..catalog import load_object
from ..kernels.registry import KernelSet
from ..kernels.threads import torch_loops
from ..plan import Plan
from ..shapes import GraphKey, SamplingClass
from .capture import Signature, signature
from .stages.accept import Accept
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
    return stages


def program_stages(plan: Plan, kernels: KernelSet, target: TargetModel, draft: DraftModel | None, key: Key) -> list[Stage]:
    """The stages of the program of ``key``, in order. Builds no buffer and needs no device."""
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
        self.steps: list[Callable[[], None]]
        self.direct: Callable[[], None]
        if compiled:
            from .compile import compile_stages

            self.steps, self.direct = [compile_stages([s], views, threads) for s in stages], compile_stages(stages, views, threads)
        else:
            self.steps = [partial(s, views) for s in stages]
            self.direct = self._in_order if threads is None else partial(self._in_order_with, threads)
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

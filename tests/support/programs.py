"""Every program of a small engine on a GPU, over fake CUDA tensors: what Inductor and Triton make of it, without a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from torch._subclasses.fake_tensor import FakeTensorMode

from graphspec.graphs.programs import Key, PrefillKey, compiled_parts, prefill_keys, program_stages
from graphspec.graphs.stages.mailbox import MailLayout
from graphspec.graphs.stages.stage import HostStage
from graphspec.kernels import select_kernels
from graphspec.models.layers import use_kernels
from graphspec.plan.buffers import Arena
from graphspec.plan.plan import Plan
from graphspec.shapes import SamplingClass, sampling_class_of
from tests.support.codegen import Launches, compile_kernels, launches_of, pretended_gpu
from tests.support.shapes_8b import run_stages
from tests.support.tiny import move, structure_plan, tiny_networks

KINDS = ("cycle", "prefill")


def gpu_plan(structure: str) -> Plan:
    """The plan of a structure's engine on a GPU."""
    return structure_plan(structure, device="cuda", runtime="captured", mode="fused", buckets=[1, 2], max_rows=2)


def programs(classes: Iterable[str], structures: Iterable[str], kinds: Iterable[str] = KINDS) -> Iterator[tuple[str, str, str]]:
    """``(structure, class, kind)`` of every program of ``structures`` that ``classes`` have, as :func:`generate` takes them."""
    for structure in structures:
        for spelled in classes:
            yield from ((structure, spelled, kind) for kind in kinds if kind == "prefill" or spelled != "prompt_logprobs")


def class_of(plan: Plan, spelled: str) -> SamplingClass:
    """A class by name, as ``runtime.sampling_classes`` spells it."""
    found = sampling_class_of(spelled, plan.max_logprobs)
    assert found is not None, spelled
    return found


def generate(structure: str, spelled: str, kind: str, *, lanes: int = 2, compiled: bool = False) -> list[Launches]:
    """The code of one program, of each of its segments.

    Args:
        structure, spelled, kind: as of :func:`programs`.
        lanes: of a cycle, 1 or 2.
        compiled: its Triton kernels are compiled too.

    Raises:
        Exception: whatever stops one of the compilers.
    """
    plan = gpu_plan(structure)
    sampling = class_of(plan, spelled)
    prefill = [key for key in prefill_keys(plan, sampling) if key.chunk == plan.prefill_chunks[0]][-1]
    key: Key = prefill if kind == "prefill" else next(key for key in plan.graph_keys(sampling) if key.bucket == lanes)
    with pretended_gpu(), FakeTensorMode():
        kernels = select_kernels(plan.kernels, plan.attention, "cuda", linear=plan.linear)
        networks = tiny_networks(plan)
        use_kernels(kernels, networks.target, networks.draft)
        for network in (networks.target, networks.draft):
            if network is not None:
                move(network, "cuda")
        arena = Arena(plan, MailLayout.of(plan).size)
        arena.allocate(key.sampling)
        views = arena.views(key.lanes) if isinstance(key, PrefillKey) else arena.views(key.bucket, key.shape)
        every = program_stages(plan, kernels, networks.target, networks.draft, key)
        found = []
        for host, segment in groupby(every, lambda stage: isinstance(stage, HostStage)):
            # A host stage ends a segment, which is a program of its own.
            found += [] if host else [launches_of(*(run_stages(part, views) for part in compiled_parts(list(segment))))]
        for part in found if compiled else ():
            compile_kernels(part)
    return found

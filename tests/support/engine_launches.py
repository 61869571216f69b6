"""Every kernel that engines over the demo model launch, through Triton's front end, with the strides and numbers of the real calls.

The programs that an engine would capture run over fake CUDA tensors, and each operator's launcher is called with the operator's arguments.
``python -m tests.support.engine_launches [--all]``, in a process in which Triton does not interpret; prints JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode

from graphspec.config.catalog import load_object, resolve_variant
from graphspec.config.schema import AdaptiveConfig, Config, HardwareConfig, ModelConfig, RuntimeConfig, VariantConfig
from graphspec.drafters.heads.eagle3_facts import Eagle3Facts
from graphspec.facts import read_model_facts
from graphspec.facts.folders import model_folder
from graphspec.graphs.programs import Key, PrefillKey, describe, program_stages
from graphspec.graphs.stages.mailbox import MailLayout
from graphspec.kernels import select_kernels
from graphspec.kernels.fused.launch import Launch
from graphspec.models.decoder import Decoder
from graphspec.models.layers import use_kernels
from graphspec.plan.buffers import Arena
from graphspec.plan.plan import Plan, make_plan
from graphspec.shapes import GREEDY, SamplingClass
from tests.kernels.proof.aot import lowered, source_of
from tests.kernels.proof.races import merged
from tests.support.fake_cuda import load_cuda_guard
from tests.support.launches import operator_calls
from tests.support.tiny import NETWORKS, move, structure_plan

EVERYTHING = SamplingClass(noise=True, truncate=True, penalties=True, bias=True, logprobs=2)
ENGINES: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "eagle3, chain": {"name": "eagle3", "num_steps": 7, "topk": 1, "num_draft_tokens": 8},
    "eagle3, tree": {"name": "eagle3", "num_steps": 5, "topk": 4, "num_draft_tokens": 16},
    "eagle, tree": {"name": "eagle", "num_steps": 4, "topk": 4, "num_draft_tokens": 16},
    "mtp, chain": {"name": "mtp", "num_steps": 4, "topk": 1, "num_draft_tokens": 5},
    "standalone, tree": {"name": "standalone", "num_steps": 4, "topk": 4, "num_draft_tokens": 16},
    "ngram": {"name": "ngram", "num_steps": 6, "topk": 4, "num_draft_tokens": 12},
    "ngram_trie": {"name": "ngram_trie", "num_steps": 8, "topk": 8, "num_draft_tokens": 12},
}
"""Over the demo model, in the shapes of the README."""
TINY = ("latent-experts", "masks", "block")
"""Tiny models for what the demo model does not have: latent attention, experts, drafts in one pass."""
LAYERS = 3
"""Layers of the demo model's twelve: they differ only in their number, of which Triton makes 1 a constant."""


def demo_plan(keys: dict[str, Any], buckets: list[int]) -> Plan:
    """The plan of an engine for a GPU, with an adaptive depth, so that some cycles catch up."""
    entry, folder = resolve_variant(keys["name"]), model_folder("demo")
    target = read_model_facts(folder)
    draft = load_object(entry.facts)(folder.parent / entry.demo_draft, target) if entry.demo_draft is not None else None
    if isinstance(draft, Eagle3Facts):
        draft = replace(draft, tap_layers=(0, 1, 2))
    target = replace(target, num_layers=LAYERS, sliding_window=(None,) * LAYERS)
    config = Config(
        variant=VariantConfig(**keys),
        model=ModelConfig(max_context=1024),
        runtime=RuntimeConfig(name="captured", max_rows=buckets[-1], buckets=buckets),
        hardware=HardwareConfig(dtype="bfloat16"),
        adaptive=AdaptiveConfig(depths=[] if keys["name"] in ("none", "ngram_trie") else [0]),
    )
    return make_plan(config, target, draft, device="cuda")


def programs(plan: Plan) -> list[Key]:
    """Every cycle, greedy and with every option of the sampler; the smallest prefill, and the largest, which counts tokens."""
    cycles = [key for sampling in (GREEDY, EVERYTHING) for key in plan.graph_keys(sampling)]
    return [*cycles, PrefillKey(plan.prefill_chunks[0], GREEDY), PrefillKey(plan.prefill_chunks[-1], EVERYTHING)]


def launches(plan: Plan) -> Iterator[tuple[str, Launch]]:
    """Program and launch, for all of :func:`programs`."""
    with FakeTensorMode():
        kernels = select_kernels(plan.kernels, plan.attention, "cuda", linear=plan.linear, dtype=plan.dtype, numerics=plan.numerics)
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, plan.dtype))
        try:
            networks: list[Any] = [Decoder(plan.target, plan.tap_layers, plan.max_positions)]
            networks += [NETWORKS[type(plan.draft)](plan.draft, plan.max_positions)] if plan.draft is not None else [None]
        finally:
            torch.set_default_dtype(before)
        for network in networks:
            move(network, "cuda")
        use_kernels(kernels, *networks)
        for key in programs(plan):
            arena = Arena(plan, MailLayout.of(plan).size)
            arena.allocate(key.sampling)
            views = arena.views(key.lanes) if isinstance(key, PrefillKey) else arena.views(key.bucket, key.shape)
            stages = program_stages(plan, kernels, *networks, key)

            def run(stages: Any = stages, views: Any = views) -> None:
                for stage in stages:
                    stage(views)

            for call in operator_calls(run):
                for launch in call.launches:
                    yield describe(key), launch


def distinct(found: dict[str, tuple[str, Launch]], engine: str, plan: Plan) -> int:
    """Add the launches of an engine whose types and constants are not among those ``found``; returns how many launches it makes."""
    made = 0
    for program, launch in launches(plan):
        made += 1
        source = source_of(launch)
        # Divisibility changes no type, so the front end treats divisible numbers like others.
        kind = (launch.kernel.fn.__name__, source.signature, source.constants)
        found.setdefault(repr(kind), (f"{engine}, {program}: {launch.kernel.fn.__name__}", launch))
    return made


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true", help="every bucket, not the smallest alone")
    buckets = [1, 2, 4, 8] if parser.parse_args(argv).all else [1]
    load_cuda_guard()
    found: dict[str, tuple[str, Launch]] = {}
    made = sum(distinct(found, engine, demo_plan(keys, buckets)) for engine, keys in ENGINES.items())
    for structure in TINY:
        plan = structure_plan(structure, device="cuda", runtime="captured", mode="fused", max_rows=buckets[-1], buckets=buckets)
        made += distinct(found, structure, plan)
    refused: dict[str, str] = {}
    merging: dict[str, list[str]] = {}
    for where, launch in found.values():
        kernel = launch.kernel.fn.__name__
        try:
            # Functions that a kernel calls are part of it from the second stage on.
            if "acq_rel" in lowered(launch, last="make_ir") and not merging.get(kernel):
                merging[kernel] = merged(lowered(launch, last="ttir"))
        except triton.CompilationError as error:
            refused[where] = str(error).strip().splitlines()[-1]
    kernels = sorted({launch.kernel.fn.__name__ for _, launch in found.values()})
    print(json.dumps({"made": made, "distinct": len(found), "refused": refused, "kernels": kernels, "merging": merging}))


if __name__ == "__main__":
    main()

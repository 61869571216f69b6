"""A cycle in the shapes of Llama-3.1-8B with an EAGLE-3 head, over fake CUDA tensors: for what can be counted without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from graphspec.config.schema import Config, HardwareConfig, KernelsConfig, ModelConfig, RuntimeConfig, VariantConfig
from graphspec.drafters.dflash.facts import DFlashFacts
from graphspec.facts import DraftFacts, ModelFacts, RopeFacts
from graphspec.graphs.programs import PrefillKey, compiled_parts, program_stages
from graphspec.graphs.stages.mailbox import MailLayout
from graphspec.graphs.stages.stage import Stage
from graphspec.kernels import select_kernels
from graphspec.kernels.collectives import Comm
from graphspec.models.decoder import Decoder
from graphspec.models.layers import join_ranks, use_kernels
from graphspec.plan.buffers import Arena, Views
from graphspec.plan.plan import Plan, make_plan
from graphspec.shapes import GREEDY, CycleShape, SamplingClass
from tests.support.codegen import pretended_gpu
from tests.support.tiny import NETWORKS, draft_facts, model_facts, move


def llama_8b(num_layers: int, **changes: Any) -> ModelFacts:
    """Llama-3.1-8B without its RoPE scaling."""
    return replace(
        model_facts(num_layers), vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128,
        max_position_embeddings=4096, dtype="bfloat16", rope=RopeFacts(500000.0), **{"sliding_window": (None,) * num_layers, **changes},
    )  # fmt: skip


@dataclass
class FakeCycle:
    """The stages of one cycle, and the views they work on."""

    plan: Plan
    stages: list[Stage]
    views: Views
    prefill: Callable[[int], list[Stage]]
    """The stages of a chunk of so many tokens."""

    def program(self) -> Callable[[], None]:
        """All stages, as one launch runs them."""
        return run_stages(self.stages, self.views)

    def parts(self) -> list[Callable[[], None]]:
        """The stages that are compiled together."""
        return [run_stages(part, self.views) for part in compiled_parts(self.stages)]

    def stage(self, name: str) -> Callable[[], None]:
        """One stage."""
        chosen = next(stage for stage in self.stages if stage.name == name)
        return lambda: chosen(self.views)


def run_stages(stages: Sequence[Stage], views: Views) -> Callable[[], None]:
    """A function that runs ``stages`` in order."""

    def run() -> None:
        for stage in stages:
            stage(views)

    return run


@contextmanager
def fake_cycle(
    shape: CycleShape, num_layers: int, *, lanes: int = 1, mode: str = "fused", numerics: str = "fast", linear: str = "auto",
    sampling: SamplingClass = GREEDY, variant: str = "eagle3", ranks: int = 1, comm: Comm | None = None, **changes: Any,
) -> Iterator[FakeCycle]:  # fmt: skip
    """A context with a cycle on a fake GPU.

    Args:
        shape, num_layers, lanes, mode, numerics, linear, sampling: of the cycle and its target.
        variant: ``eagle3`` or ``dflash``.
        ranks: that hold the target together; the cycle is that of the first one.
        comm: their collectives.
        changes: fields of the target's facts.
    """
    target = llama_8b(num_layers, **changes)
    speculates = shape.num_steps > 0
    head: DraftFacts = replace(
        draft_facts(), decoder=llama_8b(1), draft_vocab_size=32000, target_hidden_size=4096, feature_size=3 * 4096,
        tap_layers=(0, num_layers // 2, num_layers - 1),
    )  # fmt: skip
    if variant == "dflash":
        head = DFlashFacts(
            path=head.path, decoder=llama_8b(5, qk_norm=True), draft_vocab_size=128256, target_hidden_size=4096, feature_size=2 * 4096,
            tap_layers=(1, num_layers - 1), mask_token_id=0, block_size=21, max_steps=20, from_anchor=False, causal=(True,) * 5,
        )  # fmt: skip
    keys = {"num_steps": shape.num_steps, "topk": shape.topk, "num_draft_tokens": shape.num_draft_tokens} if speculates else {}
    config = Config(
        variant=VariantConfig(name=variant if speculates else "none", **keys),
        model=ModelConfig(path="8b", max_context=2048),
        runtime=RuntimeConfig(name="captured", page_size=16, max_rows=lanes, buckets=[lanes], tensor_parallel=ranks),
        kernels=KernelsConfig(mode=mode, numerics=numerics, linear=linear),
        hardware=HardwareConfig(dtype="bfloat16"),
    )
    plan = make_plan(config, target.of_rank(0, ranks) if ranks > 1 else target, head if speculates else None, device="cuda")
    with pretended_gpu(), FakeTensorMode():
        kernels = select_kernels(plan.kernels, plan.attention, "cuda", linear=plan.linear, dtype=plan.dtype, numerics=plan.numerics)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            networks = [Decoder(plan.target, plan.tap_layers, plan.max_positions)]
            networks += [NETWORKS[type(head)](head, plan.max_positions)] if speculates else []
        finally:
            torch.set_default_dtype(before)
        use_kernels(kernels, *networks)
        for network in networks:
            move(network, "cuda")
            if comm is not None:
                join_ranks(network, comm)
        arena = Arena(plan, MailLayout.of(plan).size)
        arena.allocate(sampling)
        key = plan.graph_keys(sampling)[0]
        stages = program_stages(plan, kernels, networks[0], networks[1] if speculates else None, key)
        draft = networks[1] if speculates else None

        def prefill(chunk: int) -> list[Stage]:
            return program_stages(plan, kernels, networks[0], draft, PrefillKey(chunk, sampling, lanes))

        yield FakeCycle(plan, stages, arena.views(lanes), prefill)

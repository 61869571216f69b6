"""Scratch of fused kernels: the memory plan's line equals what the launchers allocate in the programs of an engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from graphspec.config.schema import Config, ModelConfig, RuntimeConfig, VariantConfig
from graphspec.drafters.heads.eagle3_network import Eagle3Draft
from graphspec.graphs import scratch
from graphspec.graphs.memory import plan_memory
from graphspec.graphs.programs import Key, PrefillKey, prefill_keys, program_stages
from graphspec.graphs.scratch import kernel_scratch, scratch_of
from graphspec.graphs.stages.mailbox import MailLayout
from graphspec.kernels import select_kernels
from graphspec.models.decoder import Decoder
from graphspec.models.layers import use_kernels
from graphspec.plan.buffers import Arena
from graphspec.plan.plan import Plan, make_plan
from graphspec.shapes import SamplingClass
from tests.support.codegen import pretended_gpu
from tests.support.fake_cuda import load_cuda_guard
from tests.support.shapes_8b import llama_8b
from tests.support.tiny import STRUCTURES, draft_facts, move, structure_plan, target_facts, tiny_networks

EVERY = SamplingClass(True, True, True, True, 2, True, True, True)


@pytest.fixture(scope="session", autouse=True)
def cuda_guard() -> None:
    load_cuda_guard()


@dataclass(frozen=True)
class Like:
    """A tensor without data and without a mode."""

    size_and_stride: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: torch.dtype


class Calls(TorchDispatchMode):
    """Notes every call of an operator of ours: its name and its arguments, one for each set of shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[str, Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "graphspec":
            noted = tree_map(lambda v: Like((tuple(v.shape), v.stride()), v.dtype) if isinstance(v, Tensor) else v, (args, kwargs or {}))
            self.found[f"{func}{noted}"] = func.overloadpacket.__name__, *noted
        return func(*args, **(kwargs or {}))


def calls_of(plan: Plan, networks: Any) -> Calls:
    """Every call that some program makes, to be built under fake tensors and counted outside."""
    arena = Arena(plan, MailLayout.of(plan).size)
    arena.allocate(EVERY)
    kernels = select_kernels("fused", "auto", "cuda", dtype=plan.dtype)
    for network in networks:
        move(network, "cuda")
    use_kernels(kernels, *networks)
    calls = Calls()
    keys: list[Key] = [*plan.graph_keys(EVERY), *prefill_keys(plan, EVERY)]
    for key in keys:
        views = arena.views(key.lanes) if isinstance(key, PrefillKey) else arena.views(key.bucket, key.shape)
        with torch.no_grad(), calls:
            for stage in program_stages(plan, kernels, *networks, key):
                stage(views)
    return calls


def bytes_of(calls: Calls) -> int:
    """Most scratch of any of these calls."""

    def meta(value: Any) -> Any:
        return torch.empty_strided(*value.size_and_stride, dtype=value.dtype, device="meta") if isinstance(value, Like) else value

    return max(
        scratch_of(OPDEFS[f"graphspec::{name}"]._init_fn, *tree_map(meta, args), **tree_map(meta, kwargs))
        for name, args, kwargs in calls.found.values()
        if name != "matmul"
    )


FEW = ("own-history",)


@pytest.mark.parametrize("structure", [s if s in FEW else pytest.param(s, marks=pytest.mark.full) for s in STRUCTURES])
def test_small_engines(structure: str) -> None:
    plan = structure_plan(structure, device="cuda", runtime="captured", mode="fused", buckets=[1, 2], max_rows=2)
    with FakeTensorMode():
        networks = tiny_networks(plan)
        calls = calls_of(plan, (networks.target, networks.draft))
    assert bytes_of(calls) == kernel_scratch(plan) > 0


@pytest.mark.parametrize("shape", [pytest.param((7, 1, 8), marks=pytest.mark.full), (5, 4, 32)])
def test_an_8b_model(shape: tuple[int, int, int]) -> None:
    head = replace(
        draft_facts(), decoder=llama_8b(1), draft_vocab_size=32000, target_hidden_size=4096, feature_size=3 * 4096, tap_layers=(0, 1, 2)
    )
    config = Config(
        variant=VariantConfig(name="eagle3", num_steps=shape[0], topk=shape[1], num_draft_tokens=shape[2]),
        model=ModelConfig(path="8b", max_context=2048),
        runtime=RuntimeConfig(name="captured", buckets=[1, 8], max_rows=8),
    )
    plan = make_plan(config, llama_8b(3), head, device="cuda")
    with pretended_gpu(), FakeTensorMode():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            networks = Decoder(plan.target, plan.tap_layers, plan.max_positions), Eagle3Draft(head, plan.max_positions)
        finally:
            torch.set_default_dtype(before)
        calls = calls_of(plan, networks)
    assert bytes_of(calls) == kernel_scratch(plan) > 2**20


@pytest.mark.parametrize("heads", [pytest.param(16, marks=pytest.mark.full), 128])
def test_latent_rows_and_experts(heads: int) -> None:
    """The structure of DeepSeek in its widths, with few layers."""
    small = target_facts("latent-experts")
    assert small.latent is not None and small.experts is not None
    target = replace(
        small,
        vocab_size=129280,
        hidden_size=2048,
        intermediate_size=10944,
        num_heads=heads,
        max_position_embeddings=4096,
        dtype="bfloat16",
        latent=replace(small.latent, rank=512, nope_dim=128, rope_dim=64, value_dim=128, query_rank=None if heads == 16 else 1536),
        experts=replace(small.experts, num_experts=64, topk=6, intermediate_size=1408, shared_size=2816),
    )
    config = Config(
        variant=VariantConfig(name="none"),
        model=ModelConfig(path="deepseek", max_context=4096),
        runtime=RuntimeConfig(name="captured", buckets=[1, 8], max_rows=8),
    )
    plan = make_plan(config, target, None, device="cuda")
    with pretended_gpu(), FakeTensorMode():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            network = Decoder(plan.target, plan.tap_layers, plan.max_positions)
        finally:
            torch.set_default_dtype(before)
        calls = calls_of(plan, (network, None))
    assert bytes_of(calls) == kernel_scratch(plan) > 2**20
    config = replace(config, hardware=replace(config.hardware, memory_gib=80))
    line = next(line for line in plan_memory(plan, config, (0, 0)).lines if line.name == "scratch of kernels")
    assert line.size == kernel_scratch(plan)


@pytest.mark.parametrize("chunk", [16, 2048])
def test_numbers_of_packed_weights_are_scratch_where_the_library_multiplies(chunk: int, tmp_path: Path) -> None:
    """The largest product of a layer with many rows is the fused gate and up projection."""
    config = Config(
        variant=VariantConfig(name="none"),
        model=ModelConfig(path="8b", max_context=2048),
        runtime=RuntimeConfig(name="captured", buckets=[1], max_rows=1, prefill_chunks=[chunk]),
    )
    plan = make_plan(config, llama_8b(3, path=tmp_path), None, device="cuda")
    plain = kernel_scratch(plan)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    gate_up = 2 * 14336 * 4096 * 2
    assert plain < gate_up and kernel_scratch(plan) == (gate_up if chunk == 2048 else plain)


def test_results_and_arguments_are_no_scratch() -> None:
    def launcher(x: Tensor) -> tuple[Tensor, Tensor]:
        part = x.new_empty(10, dtype=torch.float64)
        out = x.new_empty(3)
        x.view(-1).add_(1)
        return out, part[:2].to(torch.float32)

    assert scratch_of(launcher, torch.empty(4, device="meta")) == 80
    plan = structure_plan("tree", device="cpu", runtime="eager")
    assert kernel_scratch(plan) == 0, "references allocate what torch allocates"


def test_without_triton_a_warning_names_what_is_not_counted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(scratch, "find_spec", lambda name: None)
    assert kernel_scratch(structure_plan("tree", device="cuda", runtime="captured", mode="fused")) == 0
    assert "scratch of fused kernels is not in the memory plan" in caplog.text

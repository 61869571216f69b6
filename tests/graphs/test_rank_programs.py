"""Programs of the first of eight ranks on fake GPUs: nothing needs the host, and collectives are counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from graphspec.config.schema import Config, KernelsConfig, ModelConfig, RuntimeConfig, VariantConfig
from graphspec.facts import DraftFacts
from graphspec.facts.families import find_family
from graphspec.graphs.programs import Key, PrefillKey, program_stages
from graphspec.graphs.stages.mailbox import MailLayout
from graphspec.kernels import collectives, select_kernels
from graphspec.kernels.collectives import ONE_SHOT_BYTES, Comm, DeviceComm, OrderedComm
from graphspec.lab.predict.ranks import sums_of
from graphspec.models.layers import join_ranks, use_kernels
from graphspec.plan.buffers import Arena
from graphspec.plan.plan import Plan, make_plan
from graphspec.shapes import GREEDY, SAMPLED, SamplingClass
from tests.support.fake_cuda import NoHostTraffic, load_cuda_guard
from tests.support.tiny import draft_facts, hybrid_facts, latent_facts, mamba_facts, model_facts, move, tiny_networks

RANKS, LAYERS = 8, 3
SHAPES = {"none": (0, 1, 1), "chain": (4, 1, 5), "tree": (3, 3, 10)}
CLASSES = {
    "greedy": GREEDY,
    "noise": SAMPLED,
    "truncate": SamplingClass(noise=True, truncate=True),
    "penalties": SamplingClass(penalties=True),
    "allowed": SamplingClass(allowed=True),
    "logprobs": SamplingClass(logprobs=2),
}


@pytest.fixture(autouse=True)
def eight_ranks() -> Iterator[str]:
    load_cuda_guard()
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    dist.destroy_process_group()


class Collectives(NoHostTraffic):
    """Counts sums and gathers on the way, and the elements that a rank gives to each gather."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[str] = []
        self.gathered: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if (func.namespace == "_c10d_functional" and name != "wait_tensor") or name == "one_shot_sum":
            self.counted.append(name)
            if name == "all_gather_into_tensor":
                self.gathered.append(args[0].numel())
        return super().__torch_dispatch__(func, types, args, kwargs)


OLMO2 = find_family("Olmo2ForCausalLM")
assert OLMO2 is not None
TARGETS = {
    "heads": model_facts(LAYERS),
    "latent-experts": latent_facts(LAYERS),
    "delta": hybrid_facts(),
    "mamba": mamba_facts(),
    "norms-of-all-heads": replace(model_facts(LAYERS), family=OLMO2, qk_norm=True),
}
EXCHANGED = {
    "heads": (2 * LAYERS, 0),
    "latent-experts": (2 * LAYERS, 0),
    "delta": (2 * LAYERS, 0),
    "mamba": (LAYERS, 1),  # one net per layer; the one group of Mamba-2 is on four ranks
    "norms-of-all-heads": (3 * LAYERS, 0),
}
"""Sums of the layers of each target, and gathers."""
USUAL = ("heads", "latent-experts")


def rank_plan(shape: str, mode: str, kind: str = "heads", *, draft: DraftFacts | None = None, draft_parallel: str = "auto") -> Plan:
    steps, topk, nodes = SHAPES[shape]
    target = replace(TARGETS[kind], num_heads=8, intermediate_size=80)
    if target.experts is not None:
        target = replace(target, experts=replace(target.experts, intermediate_size=16, shared_size=16))
    if target.recurrent is not None:
        target = replace(target, recurrent=replace(target.recurrent, value_heads=8))
    speculates = steps > 0
    keys = {"num_steps": steps, "topk": topk, "num_draft_tokens": nodes} if speculates else {}
    config = Config(
        variant=VariantConfig(name="eagle3" if speculates else "none", **keys),
        model=ModelConfig(path="tiny", max_context=96),
        runtime=RuntimeConfig(name="captured", page_size=8, prefill_chunks=[8, 16], buckets=[1, 2], max_rows=2, tensor_parallel=RANKS,
                              draft_parallel=draft_parallel),
        kernels=KernelsConfig(mode=mode),
    )  # fmt: skip
    return make_plan(config, target.of_rank(0, RANKS), draft or (draft_facts() if speculates else None), device="cuda")


def programs(plan: Plan, mode: str, sampling: SamplingClass, comm: Comm, *, shares: bool = False) -> Iterator[tuple[Key, Collectives]]:
    """Every program of a class, run on fake tensors; ``shares``: the draft's embedding and head are the target's."""
    arena, networks = Arena(plan, MailLayout.of(plan).size), tiny_networks(plan)
    kernels = select_kernels(mode, "auto", "cuda")
    if shares:
        networks.draft.embed_tokens, networks.draft.lm_head = networks.target.embed_tokens, networks.target.lm_head
    use_kernels(kernels, networks.target, networks.draft)
    for network in (networks.target, networks.draft):
        if network is not None:
            move(network, "cuda")
            join_ranks(network, comm)
    arena.allocate(sampling)
    for key in (*plan.graph_keys(sampling), PrefillKey(16, sampling)):
        views = arena.views(key.lanes) if isinstance(key, PrefillKey) else arena.views(key.bucket, key.shape)
        stages = program_stages(plan, kernels, networks.target, networks.draft, key)
        with torch.no_grad(), Collectives() as seen:
            for stage in stages:
                stage(views)
        yield key, seen


@pytest.mark.parametrize("mode", ["reference", "fused"])
@pytest.mark.parametrize(("shape", "kind"), [(shape, kind) for kind in TARGETS for shape in (SHAPES if kind in USUAL else ("tree",))])
def test_a_cycle_exchanges_sums_of_its_layers_one_for_tokens_and_the_best(shape: str, kind: str, mode: str, eight_ranks: str) -> None:
    plan, (sums, gathers) = rank_plan(shape, mode, kind), EXCHANGED[kind]
    assert sums_of(plan.target, RANKS) == sums + gathers + 2
    with FakeTensorMode():
        symmetric = torch.empty(2**16, dtype=torch.uint8, device="cuda")
        for comm, kinds in (
            (OrderedComm(RANKS, eight_ranks), {"sum": "all_gather_into_tensor", "gather": "all_gather_into_tensor"}),
            (DeviceComm(RANKS, eight_ranks), {"sum": "all_reduce", "gather": "all_gather_into_tensor"}),
            (DeviceComm(RANKS, eight_ranks, ordered=True), {"sum": "all_gather_into_tensor", "gather": "all_gather_into_tensor"}),
            (DeviceComm(RANKS, eight_ranks, symmetric), {"sum": "one_shot_sum", "gather": "all_gather_into_tensor"}),
        ):
            for key, seen in programs(plan, mode, SAMPLED, comm):
                # The draft is every rank's own, so drafting adds none.
                expected = sorted([kinds["sum"]] * (1 + sums) + [kinds["gather"]] * (1 + gathers))
                assert sorted(seen.counted) == expected and seen.counted[-1] == kinds["gather"]
                # Of every position a key, a token, a sum and a flag.
                rows = 1 if isinstance(key, PrefillKey) else key.bucket * key.shape.num_draft_tokens
                assert seen.gathered[-1] == 4 * rows


@pytest.mark.parametrize("sampling", CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_what_a_draft_with_the_targets_head_exchanges_follows_from_the_class(shape: str, sampling: SamplingClass, eight_ranks: str) -> None:
    """Eight columns of 61 tokens are a rank's; a level takes a sum for its tokens and a gather of its best, or of its logits."""
    plan = rank_plan(shape, "reference", draft=replace(draft_facts(), draft_vocab_size=61))
    steps, topk, nodes = SHAPES[shape]
    by_parts = not sampling.changes_logits
    with FakeTensorMode():
        for key, seen in programs(plan, "reference", sampling, DeviceComm(RANKS, eight_ranks), shares=True):
            if isinstance(key, PrefillKey):
                # The draft reads its tokens too.
                assert seen.counted.count("all_reduce") == 2 + 2 * LAYERS
                assert seen.gathered == [4 if by_parts and sampling.logprobs < 0 else 8]
                continue
            assert seen.counted.count("all_reduce") == 1 + 2 * LAYERS + steps
            rows = [key.bucket, *[key.bucket * topk] * (steps - 1)]
            drafted = [count * (2 * topk + 2 if by_parts else 8) for count in rows]
            assert seen.gathered == [*drafted, key.bucket * nodes * (4 if by_parts and sampling.logprobs < 0 else 8)]


@pytest.mark.parametrize("mode", ["reference", "fused"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_spread_draft_adds_two_sums_per_layer_of_each_pass(shape: str, mode: str, eight_ranks: str) -> None:
    """One layer with its own embedding and head; a prompt chunk stops at its KV."""
    whole = draft_facts()
    draft = replace(whole, decoder=replace(whole.decoder, num_heads=8, intermediate_size=80))
    plan = rank_plan(shape, mode, draft=draft, draft_parallel="sharded")
    steps, topk, nodes = SHAPES[shape]
    with FakeTensorMode():
        for key, seen in programs(plan, mode, SAMPLED, DeviceComm(RANKS, eight_ranks)):
            target, prefills = 1 + 2 * LAYERS, isinstance(key, PrefillKey)
            assert seen.counted.count("all_reduce") == target + (1 if prefills else 3 * steps)
            if isinstance(key, PrefillKey):
                assert seen.gathered == [4]
                continue
            rows = [key.bucket, *[key.bucket * topk] * (steps - 1)]
            assert seen.gathered == [*(count * (2 * topk + 2) for count in rows), key.bucket * nodes * 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, ONE_SHOT_BYTES, ONE_SHOT_BYTES + 4, 5 * ONE_SHOT_BYTES // 2])
def test_an_ordered_sum_has_one_kernel_for_every_size(
    size: int, dtype: torch.dtype, eight_ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = []

    def one_shot(memory: Tensor, x: Tensor, group: str) -> Tensor:
        pieces.append(x.nbytes)
        return x * RANKS

    monkeypatch.setattr(collectives, "one_shot_sum", one_shot)
    x = torch.randn(2, 1 + size // 2 // dtype.itemsize, dtype=dtype).t()
    comm = DeviceComm(RANKS, eight_ranks, torch.empty(ONE_SHOT_BYTES, dtype=torch.uint8), ordered=True)
    assert torch.equal(comm.all_reduce(x), x * RANKS)
    assert max(pieces) <= ONE_SHOT_BYTES and len(pieces) == -(-x.nbytes // ONE_SHOT_BYTES)

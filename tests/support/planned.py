"""Planned calls over random pools, and their results by the reference ops: for the stand-ins on a CPU and for FlashInfer on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphspec.config.schema import Config, HardwareConfig, KernelsConfig, ModelConfig, RuntimeConfig, VariantConfig
from graphspec.drafters.standalone.facts import StandaloneFacts
from graphspec.drafters.standalone.network import StandaloneDraft
from graphspec.engine.request import Request, SamplingParams
from graphspec.engine.scheduler import Scheduler
from graphspec.facts import LatentFacts, ModelFacts
from graphspec.graphs.capture import ProgramCapturer
from graphspec.graphs.cycle import Cycle
from graphspec.kernels.attention.latent_chunk_attention import latent_chunk_attention
from graphspec.kernels.attention.tree_attention import chunk_attention
from graphspec.kernels.flashinfer.planner import Planner
from graphspec.kernels.host_step import HeadShape, PreparedCall, RowSpan
from graphspec.kernels.registry import KernelSet
from graphspec.models.layers import use_kernels
from graphspec.plan.buffers import Arena
from graphspec.plan.plan import Plan, make_plan
from graphspec.shapes import SAMPLED
from tests.kernels.cases.attention import random_latent_pool, random_pool
from tests.support.tiny import latent_facts, model_facts, move, tiny_networks

LATENT = HeadShape(4, 1, 12, 4, 0.3)
HEADS = HeadShape(6, 3, 16, 0, 0.2)


def cases(latent: HeadShape = LATENT, heads: HeadShape = HEADS) -> dict[str, tuple[PreparedCall, list[int], list[int]]]:
    """Calls as the stages make them, with the slot of each row's first query and the number of its valid queries."""
    return {
        "verify": (PreparedCall("target", "root", 4, 4, latent), [3, 9, 0], [4, 4, 4]),
        "extend": (PreparedCall("draft", "window", 4, 4, latent, 1), [3, 9, 1], [4, 1, 2]),
        "extend from slot 0": (PreparedCall("draft", "window", 4, 4, latent), [3, 9, 0], [4, 1, 2]),
        "step": (PreparedCall("draft", "root", 3, 1, latent, 1), [3, 9, 1], [1, 1, 1]),
        "plain": (PreparedCall("target", "root", 1, 1, latent), [3, 15, 0], [1, 1, 1]),
        "chunk of latent rows": (PreparedCall("target", "chunk", 6, 6, latent), [0, 6, 26], [6, 3, 5]),
        "chunk": (PreparedCall("target", "chunk", 6, 6, heads), [0, 6, 26], [6, 3, 5]),
        "chunk under a sliding window": (PreparedCall("target", "chunk", 6, 6, heads, 0, 5), [0, 6, 25], [6, 3, 5]),
    }


class Case:
    """A planned call for some rows, followed by a lane without a request.

    Args:
        call: that is planned.
        starts: slot of the first query of each row.
        counts: valid queries of each row.
        page_size: tokens of a page.
        columns: pages of a row.
        device: of queries and pool.
        dtype: of queries and pool.
    """

    def __init__(
        self, call: PreparedCall, starts: list[int], counts: list[int], *, page_size: int = 4, columns: int = 8, device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        self.call, self.page_size, self.columns, self.device = call, page_size, columns, device
        self.lanes, shape = len(starts) + 1, call.shape
        sizes = {"lanes": self.lanes, "columns": columns, "page_size": page_size, "layers": 2}
        if shape.latent:
            pool, self.table = random_latent_pool(generator, **sizes, dim=shape.dim + shape.rope_dim)
        else:
            pool, self.table = random_pool(generator, **sizes, heads=shape.groups, dim=shape.dim)
        query = torch.randn(self.lanes, call.tokens, shape.heads, shape.dim + shape.rope_dim, generator=generator)
        self.query, self.pool = query.to(device, dtype), pool.to(device, dtype)
        self.move(starts, counts)

    def move(self, starts: list[int], counts: list[int]) -> None:
        """Change the position of the rows."""
        call, idle = self.call, self.lanes - len(starts)
        entry = torch.arange(call.tokens)
        slot_BT = torch.tensor([*starts, *[0] * idle])[:, None] + entry
        valid_BT = entry < torch.tensor([*counts, *[0] * idle])[:, None]
        self.slot_BT, self.valid_BT = slot_BT.to(self.device), valid_BT.to(self.device)
        known = [start + count for start, count in zip(starts, counts, strict=True)]
        self.spans = [RowSpan(self.table[i].numpy(), start + call.tokens, known[i]) for i, start in enumerate(starts)]

    def poisoned(self) -> Tensor:
        """The pool with NaN in the dummy page, before the first visible slot, and in every page after the last used one."""
        pool = self.pool.clone()
        pool[:, :, 0] = torch.nan
        for lane, span in enumerate(self.spans):
            for slot in range(self.call.begin):
                pool[:, :, self.table[lane, slot // self.page_size], slot % self.page_size] = torch.nan
            pool[:, :, self.table[lane, -(-span.known // self.page_size) :].long()] = torch.nan
        return pool

    def reference(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The reference op, computed in ``dtype``."""
        shape, call = self.call.shape, self.call
        begin_BT = torch.full_like(self.slot_BT, call.begin)
        if call.window is not None:
            begin_BT = torch.maximum(begin_BT, self.slot_BT - call.window + 1)
        where = (1, self.table.to(self.device), begin_BT, self.slot_BT, self.valid_BT, shape.scale)
        pool, query = self.pool.to(dtype), self.query.to(dtype)
        if shape.latent:
            return latent_chunk_attention(query[..., : shape.dim], query[..., shape.dim :], pool, *where)
        return chunk_attention(query, pool, *where)

    def plan(self, planner: Planner) -> None:
        assert planner.bind(self.call) is not None
        name = str(self.query.dtype).removeprefix("torch.")
        planner.prepare({self.call: self.spans}, self.lanes, self.page_size, self.columns, name)

    def run(self, planner: Planner, pool: Tensor | None = None, scale: float | None = None) -> Tensor:
        """The call as a stage makes it, over ``pool``, default :meth:`poisoned`."""
        bound, shape = planner.bind(self.call), self.call.shape
        assert bound is not None
        last = (self.poisoned() if pool is None else pool, 1, self.valid_BT, shape.scale if scale is None else scale)
        if shape.latent:
            # Views of a batched product, as models pass them.
            query = self.query.transpose(1, 2).contiguous().transpose(1, 2)
            return bound.latent(query[..., : shape.dim], query[..., shape.dim :], *last)
        return bound.chunk(self.query, *last)


HEADS_OF_A_GPU = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
LATENT_OF_A_GPU = LatentFacts(query_rank=20, rank=512, nope_dim=8, rope_dim=64, value_dim=16, interleaved=True, scale=72**-0.5)


def facts_of(structure: str) -> ModelFacts:
    """Two layers that the real kernels serve: of heads, the second with a sliding window; or of latent rows."""
    if structure == "heads":
        return replace(model_facts(2), **HEADS_OF_A_GPU, sliding_window=(None, 40))
    return replace(latent_facts(2), num_heads=16, head_dim=64, latent=LATENT_OF_A_GPU, experts=None)


def self_drafting(
    structure: str, *, device: str, runtime: str, mode: str, dtype: str, kernels: Callable[[Plan], KernelSet],
    capturer: Callable[[Arena], ProgramCapturer] | None = None, **runtime_keys: Any,
) -> Cycle:  # fmt: skip
    """A random target that drafts chains for itself through FlashInfer: every draft is right, so a rejection is an error.

    ``kernels`` returns the implementations for a plan.
    """
    facts = facts_of(structure)
    config = Config(
        variant=VariantConfig(name="standalone", num_steps=3, topk=1, num_draft_tokens=4),
        model=ModelConfig(path="tiny", max_context=160),
        runtime=RuntimeConfig(**{"page_size": 16, "prefill_chunks": [8, 32], "max_rows": 3, **runtime_keys, "name": runtime}),
        kernels=KernelsConfig(mode=mode, attention="flashinfer"),
        hardware=HardwareConfig(dtype=dtype),
    )
    draft = StandaloneFacts(path=Path("tiny"), decoder=facts, draft_vocab_size=61, target_hidden_size=48)
    plan = make_plan(config, facts, draft, device=device)
    target = tiny_networks(replace(plan, draft=None)).target
    for parameter in target.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    move(target, device)
    chosen = kernels(plan)
    use_kernels(chosen, target)
    return Cycle(plan, target, StandaloneDraft(draft, plan.max_positions, target), chosen, capturer=capturer)


def generate(cycle: Cycle, lengths: Sequence[int], tokens: int = 24) -> list[Request]:
    """Run requests with prompts of these lengths, alternately greedy and sampled, to their end."""
    requests = []
    for index, length in enumerate(lengths):
        params = SamplingParams(max_tokens=tokens, temperature=0.7 * (index % 2), seed=index, ignore_eos=True)
        prompt = [(7 * index + 3 * i) % 61 for i in range(length)]
        requests.append(Request(index=index, prompt=prompt, params=params, stop_ids=(), budget=tokens))
    cycle.prepare([*cycle.plan.graph_keys(SAMPLED), *cycle.prefills(SAMPLED)])
    scheduler = Scheduler(cycle.plan, cycle, SAMPLED)
    for request in requests:
        scheduler.add(request)
    while scheduler.busy:
        scheduler.step()
    return requests

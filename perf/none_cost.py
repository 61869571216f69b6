"""Cost of `variant=none` relative to plain decode loops.

``python -m perf.none_cost`` decodes the demo model at batch 1 in three ways: by the engine with ``variant=none``; by the shortest loop over
the same network, kernels, KV pool and compiler, one compiled step (target forward, argmax, next position) per token; and by the loop one
writes without an engine, the same step over a dense static cache with PyTorch's attention and products. In both loops the host reads each
token to know when to stop. The sides take turns prompt by prompt; a figure is the median over rounds of the ratio within a round. Prompt
processing is not timed, and all sides must give the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from graphspec.api.llm import LLM
from graphspec.engine.request import SamplingParams
from graphspec.graphs.compile import Region
from graphspec.graphs.stages.stage import TargetModel
from graphspec.kernels.registry import KernelSet
from graphspec.lab.measure.provenance import ROOT, provenance, result_file, within_repository, write_jsonl
from graphspec.models.attention import TreeAttention
from graphspec.models.target import load_target
from graphspec.plan.buffers import DTYPES
from graphspec.shapes import GREEDY
from perf.gpu.static_decode import compiled_step
from perf.speed import held_out_prompts


class PlainLoop:
    """Greedy decoding with the engine's target, kernels and KV pool, row 0; the engine runs the prompt."""

    name = "loop"

    def __init__(self, llm: LLM) -> None:
        self.llm, self.cycle = llm, llm.cycle
        arena = self.cycle.arena
        target, kernels, pool, table = self.cycle.target, self.cycle.kernels, arena["target_kv"], arena["page_table_RP"]
        self.token_11, self.length_1 = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        step = plain_step(target, kernels, pool, table[:1], self.token_11, self.length_1)
        # Called as the engine calls its programs, without passing through Dynamo each time.
        self.step = Region(step) if llm.plan.kernels == "compiled" else step
        with torch.no_grad():
            self.step()

    def run(self, prompt: list[int], max_tokens: int, stop: int) -> tuple[list[int], float]:
        """New tokens, and the seconds from the first to the last of them."""
        first = prefill(self.llm, prompt)
        row_P = self.cycle.arena["page_table_RP"][0]
        taken = row_P[: self.llm.plan.pages_for(len(prompt))].tolist()
        others = [page for page in range(1, self.llm.plan.num_pages) if page not in taken]
        row_P.copy_(torch.tensor([*taken, *others][: len(row_P)], dtype=torch.int32))
        self.token_11.fill_(first)
        self.length_1.fill_(len(prompt))
        return decode(self.step, self.token_11, max_tokens, stop)


class DenseLoop:
    """Greedy decoding over a dense static cache (:mod:`perf.gpu.static_decode`) with a copy of the weights; the engine runs the prompt.

    Args:
        llm: the engine.
        length: tokens of the cache; every step attends to all of them.
    """

    name = "dense loop"

    def __init__(self, llm: LLM, length: int) -> None:
        plan, self.llm = llm.plan, llm
        model = load_target(plan.target, plan.tap_layers, plan.max_positions, DTYPES[plan.dtype], torch.device(plan.device))
        self.step, self.cache, self.token_11 = compiled_step(model, length)
        with torch.no_grad():
            self.step()

    def run(self, prompt: list[int], max_tokens: int, stop: int) -> tuple[list[int], float]:
        """New tokens, and the seconds from the first to the last of them."""
        first, arena = prefill(self.llm, prompt), self.llm.cycle.arena
        pages = arena["page_table_RP"][0, : self.llm.plan.pages_for(len(prompt))].long()
        slots = arena["target_kv"][:, :, pages].flatten(2, 3)[:, :, : len(prompt)]
        self.cache.cache[:, :, 0, :, : len(prompt)] = slots.transpose(2, 3)
        self.cache.position_BT.fill_(len(prompt))
        self.token_11.fill_(first)
        return decode(self.step, self.token_11, max_tokens, stop)


def plain_step(
    target: TargetModel, kernels: KernelSet, kv_pool: torch.Tensor, table_1P: torch.Tensor, token_11: torch.Tensor, length_1: torch.Tensor
) -> Callable[[], None]:
    """One step of the shortest loop that decodes over paged KV: each call replaces the token by the next greedy one.

    Args:
        target: the network.
        kernels: of the engine.
        kv_pool: ``[layers, 2, pages, page_size, G, D]``.
        table_1P: int32, pages of the one row.
        token_11: int64, the token to read next.
        length_1: int64, tokens before it; each call adds one.
    """
    device = token_11.device
    begin_11 = torch.zeros(1, 1, dtype=torch.int64, device=device)
    valid_11, self_111 = torch.ones(1, 1, dtype=torch.bool, device=device), torch.ones(1, 1, 1, dtype=torch.int64, device=device)

    def step() -> None:
        position_11 = length_1[:, None]
        attention = TreeAttention(
            kernels=kernels,
            kv_pool=kv_pool,
            table_BP=table_1P,
            position_BT=position_11,
            valid_BT=valid_11,
            slot_BT=position_11,
            begin_BT=begin_11,
            prefix_end_B=length_1,
            ancestors_BTX=self_111,
        )
        hidden_11H, _ = target(token_11, attention)
        token_11.copy_(target.logits(hidden_11H).argmax(-1))
        length_1.add_(1)

    return step


def prefill(llm: LLM, prompt: list[int]) -> int:
    """Generate one token, which leaves the prompt's KV in the pages of row 0; returns the token."""
    [first] = llm.generate(prompt, SamplingParams(max_tokens=1).resolve())[0].token_ids
    return first


def decode(step: Callable[[], None], token_11: torch.Tensor, max_tokens: int, stop: int) -> tuple[list[int], float]:
    """Call ``step``, which replaces ``token_11``, until there are enough tokens; returns these and the seconds."""
    out = [int(token_11)]
    started = time.perf_counter()
    with torch.no_grad():
        while len(out) < max_tokens and out[-1] != stop:
            step()
            out.append(int(token_11))
    return out, time.perf_counter() - started


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the ratio, write the records to ``perf/results``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", default="compiled", choices=("eager", "compiled"))
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "results", help="folder of the result file")
    args = parser.parse_args(argv)
    llm = LLM(variant="none", runtime=args.runtime, max_rows=1, buckets=[1], max_context=512, prefix_cache=False)
    prompts = held_out_prompts(llm.tokenizer.encode, args.prompts, args.prompt_tokens)
    params = SamplingParams(max_tokens=args.max_tokens).resolve()
    stop = llm.plan.target.eos_token_ids[0]
    loops: list[PlainLoop | DenseLoop] = [PlainLoop(llm)]
    if args.runtime == "compiled":
        loops.append(DenseLoop(llm, args.prompt_tokens + args.max_tokens))
    llm.warm_up()
    llm.cycle.prepare(llm.cycle.prefills(GREEDY))
    ratios: dict[str, list[float]] = {loop.name: [] for loop in loops}
    rates: dict[str, list[float]] = {"engine": [], **{loop.name: [] for loop in loops}}
    for round_number in range(args.rounds + 1):
        seconds, tokens = dict.fromkeys(rates, 0.0), 0
        for prompt in prompts:
            [output] = llm.generate(prompt, params)
            tokens += len(output.token_ids) - 1
            seconds["engine"] += output.metrics.decode_seconds
            for loop in loops:
                plain, taken = loop.run(prompt, args.max_tokens, stop)
                if plain != output.token_ids:
                    raise SystemExit(f"the tokens of the {loop.name} {plain[:8]}... are not the engine's {output.token_ids[:8]}...")
                seconds[loop.name] += taken
        if round_number:  # the first round compiles
            for side, taken in seconds.items():
                rates[side].append(tokens / taken)
            for name, each in ratios.items():
                each.append(seconds["engine"] / seconds[name])
    figures: dict[str, Any] = {"tokens_per_second": {side: statistics.median(each) for side, each in rates.items()}}
    for name, each in ratios.items():
        figures[f"engine_over_{name.replace(' ', '_')}"] = {"median": statistics.median(each), "ratios": each}
        spread = ", ".join(f"{ratio:.3f}" for ratio in each)
        print(f"time of variant=none over the {name}: {statistics.median(each):.3f}, median of {spread}")
    settings = {"kind": "settings", **vars(args), "out": within_repository(args.out)}
    write_jsonl(result_file(args.out, "none-cost"), [provenance(), settings, figures])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

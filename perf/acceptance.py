"""Acceptance of the demo head as the engine measures it, on prompts cut at random from the held-out modules.

``python -m perf.acceptance`` runs chain and tree in batches of eight and averages over all cycles of all prompts: cycles cut short by a
stop id or the budget are left out, and the prefill's token is not counted. ``--temperature 1 --draft-noise none`` against ``coupled`` shows
what ranking drafts by the sampler's own noise is worth; every prompt has a seed of its own.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphspec.config import DRAFT_NOISES
from graphspec.engine.llm import LLM
from graphspec.engine.request import SamplingParams
from perf.provenance import ROOT, provenance, result_file, within_repository, write_jsonl
from recipes.corpus import load_corpus

SHAPES = ((4, 1, 5), (5, 4, 16))


def random_prompts(llm: LLM, count: int, tokens: int, seed: int) -> list[list[int]]:
    """``count`` windows of ``tokens`` ids from the held-out modules, a longer module as likely as its length."""
    documents = [llm.tokenizer.encode(text) for _, text in sorted(load_corpus().held_out.items())]
    draw = random.Random(seed)
    long_enough = [ids for ids in documents if len(ids) > tokens]
    chosen = draw.choices(long_enough, weights=[len(ids) - tokens for ids in long_enough], k=count)
    starts = [draw.randrange(len(ids) - tokens) for ids in chosen]
    return [ids[start : start + tokens] for ids, start in zip(chosen, starts, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a Markdown table, write the records to ``perf/results``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", default="eager", choices=("eager", "compiled", "captured"))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--draft-noise", nargs="+", default=["coupled"], choices=DRAFT_NOISES)
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "results", help="folder of the result file")
    args = parser.parse_args(argv)
    records: list[dict[str, Any]] = []
    print("| S, K, N | T | draft noise | cycles | acceptance length | accepted at depth 1, 2, ... |\n|---|---:|---|---:|---:|---|")
    for (steps, topk, nodes), noise in itertools.product(SHAPES, args.draft_noise):
        llm = LLM(runtime=args.runtime, num_steps=steps, topk=topk, num_draft_tokens=nodes, max_context=512, draft_noise=noise)
        prompts = random_prompts(llm, args.prompts, args.prompt_tokens, args.seed)
        for temperature in args.temperature:
            records.append(measure(llm, prompts, args.max_tokens, temperature))
            m = records[-1]
            positions = " ".join(f"{share:.2f}" for share in m["accepted_per_position"])
            print(
                f"| {steps}, {topk}, {nodes} | {temperature} | {noise} | {m['cycles']} | {m['acceptance_length']:.2f} | {positions} |",
                flush=True,
            )
    settings = {"kind": "settings", **vars(args), "out": within_repository(args.out)}
    write_jsonl(result_file(args.out, "acceptance"), [provenance(), settings, *records])
    return 0


def measure(llm: LLM, prompts: list[list[int]], max_tokens: int, temperature: float) -> dict[str, Any]:
    """One record: acceptance over all of ``prompts``, each with its index as seed."""
    llm.generate(prompts, [SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=i) for i in range(len(prompts))])
    m, shape = llm.metrics, llm.plan.shape
    assert m is not None
    return {
        "shape": [shape.num_steps, shape.topk, shape.num_draft_tokens],
        "temperature": temperature,
        "draft_noise": llm.config.variant.draft_noise,
        "cycles": m.cycles,
        "acceptance_length": m.acceptance_length,
        "accepted_per_position": m.accepted_per_position,
    }


if __name__ == "__main__":
    raise SystemExit(main())

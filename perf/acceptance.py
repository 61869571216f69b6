"""Acceptance of the demo head as the engine measures it: greedy, on prompts cut at random from the held-out modules.

``python -m perf.acceptance`` runs chain and tree in batches of eight and averages over all cycles of all prompts: cycles cut short by a
stop id or the budget are left out, and the prefill's token is not counted.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "results", help="folder of the result file")
    args = parser.parse_args(argv)
    records: list[dict[str, Any]] = []
    print("| S, K, N | cycles | acceptance length | accepted at depth 1, 2, ... |\n|---|---:|---:|---|")
    for steps, topk, nodes in SHAPES:
        llm = LLM(runtime=args.runtime, num_steps=steps, topk=topk, num_draft_tokens=nodes, max_context=512)
        llm.generate(random_prompts(llm, args.prompts, args.prompt_tokens, args.seed), SamplingParams(max_tokens=args.max_tokens))
        assert llm.metrics is not None
        m = llm.metrics
        records.append({
            "shape": [steps, topk, nodes],
            "cycles": m.cycles,
            "acceptance_length": m.acceptance_length,
            "accepted_per_position": m.accepted_per_position,
        })  # fmt: skip
        positions = " ".join(f"{share:.2f}" for share in m.accepted_per_position)
        print(f"| {steps}, {topk}, {nodes} | {m.cycles} | {m.acceptance_length:.2f} | {positions} |")
    settings = {"kind": "settings", **vars(args), "out": within_repository(args.out)}
    write_jsonl(result_file(args.out, "acceptance"), [provenance(), settings, *records])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

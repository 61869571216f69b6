"""Acceptance of every demo draft as the engine measures it, on prompts cut at random from the held-out modules.

``python -m perf.acceptance`` (``make acceptance``) runs each draft as a chain and as trees, in batches of eight: greedy, at temperature 1
with drafts ranked by the sampler's noise (``draft_noise=coupled``), and at temperature 1 without. The figure is new tokens per cycle over
all cycles of all prompts, with the bonus token and without the prefill's token; cycles that a stop id or the budget cut short are left out.
Every prompt has a different seed. All runs of one temperature must give the tokens of plain decoding; one that does not has no figure.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphspec.api.llm import LLM
from graphspec.config.schema import RUNTIMES
from graphspec.engine.request import SamplingParams
from graphspec.lab.measure.provenance import ROOT, provenance, result_file, within_repository, write_jsonl
from recipes.corpus import load_corpus

PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- acceptance table: make acceptance -->", "<!-- end of acceptance table -->"

EAGLE_1 = [
    [0], [1], [2], [3], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [2, 1], [3, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0],
    [0, 1, 1], [0, 2, 0], [0, 2, 1], [1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1],
]  # fmt: skip
"""The default tree of EAGLE-1's published code: 25 nodes and the root."""

CHAIN, TREE, DEEP, WIDE = (4, 1, 5), (4, 4, 16), (5, 4, 16), (7, 4, 32)
DRAFTED = ("eagle", "eagle3", "mtp", "standalone", "p_eagle", "dflash")
CASES: tuple[tuple[str, str, dict[str, Any] | tuple[int, int, int]], ...] = (
    *((variant, shape, size) for variant in DRAFTED for shape, size in (("chain", CHAIN), ("tree", TREE))),
    ("eagle3", "tree", DEEP),
    ("dflash", "tree", WIDE),
    ("eagle", "EAGLE-1's static tree", {"tree_choices": EAGLE_1}),
    ("ngram", "paths", (6, 4, 12)),
    ("ngram_trie", "tree", (8, 8, 12)),
)
MODES = (("greedy", 0.0, "coupled"), ("T=1, coupled", 1.0, "coupled"), ("T=1, uncoupled", 1.0, "none"))


def random_prompts(llm: LLM, count: int, tokens: int, seed: int) -> list[list[int]]:
    """``count`` windows of ``tokens`` ids from the held-out modules, which are chosen in proportion to their lengths."""
    documents = [llm.tokenizer.encode(text) for _, text in sorted(load_corpus().held_out.items())]
    draw = random.Random(seed)
    long_enough = [ids for ids in documents if len(ids) > tokens]
    chosen = draw.choices(long_enough, weights=[len(ids) - tokens for ids in long_enough], k=count)
    starts = [draw.randrange(len(ids) - tokens) for ids in chosen]
    return [ids[start : start + tokens] for ids, start in zip(chosen, starts, strict=True)]


def measure(llm: LLM, prompts: list[list[int]], max_tokens: int, temperature: float) -> tuple[dict[str, Any], list[list[int]]]:
    """A record of the acceptance over all ``prompts``, each with its index as seed, and the tokens."""
    params = [SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=i).resolve() for i in range(len(prompts))]
    outputs = llm.generate(prompts, params)
    m, shape = llm.metrics, llm.plan.shape
    assert m is not None
    record = {
        "variant": llm.plan.variant.name,
        "shape": shape.numbers,
        "temperature": temperature,
        "draft_noise": llm.config.variant.draft_noise,
        "cycles": m.cycles,
        "acceptance_length": m.acceptance_length,
        "accepted_per_position": m.accepted_per_position,
    }
    return record, [output.token_ids for output in outputs]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the records to ``perf/results``; with ``--page`` also rewrite the table of docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", default="auto", choices=RUNTIMES)
    parser.add_argument("--variant", nargs="+", default=sorted({case[0] for case in CASES}), help="only these")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=112)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "results", help="folder of the result file")
    parser.add_argument("--page", action="store_true", help="rewrite the table in docs/benchmarks.md")
    args = parser.parse_args(argv)
    plain = LLM(variant="none", runtime=args.runtime, max_context=512)
    args.runtime = plain.plan.runtime.name
    prompts = random_prompts(plain, args.prompts, args.prompt_tokens, args.seed)
    expected = {t: measure(plain, prompts, args.max_tokens, t)[1] for t in sorted({mode[1] for mode in MODES})}
    records: list[dict[str, Any]] = []
    lines = ["| variant | S, K, N | " + " | ".join(mode[0] for mode in MODES) + " |", "|---|---|" + "---:|" * len(MODES)]
    print("\n".join(lines), flush=True)
    for variant, label, shape in CASES:
        if variant not in args.variant:
            continue
        keys = shape if isinstance(shape, dict) else dict(zip(("num_steps", "topk", "num_draft_tokens"), shape, strict=True))
        cells = []
        for _, temperature, noise in MODES:
            llm = LLM(variant=variant, runtime=args.runtime, max_context=512, draft_noise=noise, **keys)
            if noise == "none" and not llm.plan.variant.has_network:
                cells.append("")
                continue
            record, tokens = measure(llm, prompts, args.max_tokens, temperature)
            record |= {"label": label, "equal_to_plain": tokens == expected[temperature]}
            records.append(record)
            cells.append(f"{record['acceptance_length']:.2f}" if record["equal_to_plain"] else "wrong output")
        size = ", ".join(str(n) for n in records[-1]["shape"])
        lines.append(f"| `{variant}`, {label} | {size} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    caption = (
        f"New tokens per cycle on the demo model, {args.prompts} held-out prompts of {args.prompt_tokens} tokens, {args.max_tokens} new "
        "tokens each, float32; every run gave the tokens of plain decoding: `make acceptance`."
    )
    settings = {"kind": "settings", **vars(args), "out": within_repository(args.out)}
    write_jsonl(result_file(args.out, "acceptance"), [provenance(), settings, *records])
    if args.page:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        table = "\n".join([*lines, "", caption])
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 0 if all(record["equal_to_plain"] for record in records) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Speed of every way to decode, all sides in one run: HF ``generate``, HF assisted generation, plain decoding, chains and trees.

``make bench`` measures the demo model on prompts cut from modules it was not trained on. Sides take turns prompt by prompt, so that a slow
moment of the machine hits all of them; the figure of a side is the median over rounds of its tokens per second, the ratio the median of the
ratios within a round. A side whose tokens differ from HF's greedy output is reported as wrong and gets no figure.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from graphspec.buffers import DTYPES
from graphspec.core_wait import CoreWait, busy_caution
from graphspec.engine.llm import LLM, model_folder
from graphspec.engine.request import SamplingParams
from graphspec.lab.measure.provenance import provenance, result_file, within_repository, write_jsonl
from recipes.corpus import load_corpus

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- speed table: make bench -->", "<!-- end of speed table -->"


@dataclass(slots=True)
class Side:
    """One way to decode: ``run`` maps a prompt to its new tokens."""

    name: str
    run: Callable[[list[int]], list[int]]
    baseline: str = ""
    """The side its ratio is against."""
    rates: list[float] = field(default_factory=list)
    acceptance: Callable[[], float] | None = None
    lengths: list[float] = field(default_factory=list)
    wrong: int = 0


def held_out_prompts(encode: Callable[[str], list[int]], count: int, tokens: int) -> list[list[int]]:
    """``count`` prompts of ``tokens`` ids, each from the middle of another held-out module."""
    documents = sorted(load_corpus().held_out.items())
    prompts = []
    for _, text in documents:
        ids = encode(text)
        middle = len(ids) // 2
        if len(ids) >= middle + tokens:
            prompts.append(ids[middle : middle + tokens])
    return prompts[:count]


def graphspec_side(name: str, max_tokens: int, baseline: str, **overrides: Any) -> Side:
    """An engine with one row as a side."""
    llm = LLM(max_rows=1, buckets=[1], max_context=512, **overrides)
    params = SamplingParams(max_tokens=max_tokens)

    def run(prompt: list[int]) -> list[int]:
        return llm.generate(prompt, params)[0].token_ids

    def acceptance() -> float:
        return llm.metrics.acceptance_length if llm.metrics else 0.0

    return Side(name, run, baseline, acceptance=acceptance)


def hf_sides(path: str, max_tokens: int, device: str, dtype: torch.dtype) -> list[Side]:
    """HF transformers on the same weights: plain, and assisted by prompt lookup (it needs no second model)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder(path), dtype=dtype, trust_remote_code=False).to(device).eval()

    def generate(prompt: list[int], **how: Any) -> list[int]:
        ids = torch.tensor([prompt], device=device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, **how)
        return out[0, len(prompt) :].tolist()

    return [
        Side("HF generate", generate),
        Side("HF assisted (prompt lookup, 4)", lambda p: generate(p, prompt_lookup_num_tokens=4), "HF generate"),
    ]


def measure(sides: Sequence[Side], prompts: Sequence[list[int]], rounds: int) -> None:
    """Fill every side's rates; the first side's tokens are what the others must produce."""
    for side in sides:
        side.run(prompts[0])
    for _ in range(rounds):
        tokens, seconds = dict.fromkeys((s.name for s in sides), 0), dict.fromkeys((s.name for s in sides), 0.0)
        for prompt in prompts:
            expected: list[int] | None = None
            for side in sides:
                started = time.perf_counter()
                out = side.run(prompt)
                seconds[side.name] += time.perf_counter() - started
                tokens[side.name] += len(out)
                expected = out if expected is None else expected
                side.wrong += out != expected
                if side.acceptance is not None:
                    side.lengths.append(side.acceptance())
        for side in sides:
            side.rates.append(tokens[side.name] / seconds[side.name])


def rows(sides: Sequence[Side]) -> list[dict[str, Any]]:
    """One record per side, the medians in it."""
    by_name = {side.name: side for side in sides}
    out = []
    for side in sides:
        ratio = [r / b for r, b in zip(side.rates, by_name[side.baseline].rates, strict=True)] if side.baseline else []
        right = side.wrong == 0
        out.append(
            {
                "side": side.name,
                "equal_to_hf": right,
                "tokens_per_second": statistics.median(side.rates) if right else None,
                "ratio": statistics.median(ratio) if ratio and right else None,
                "baseline": side.baseline or None,
                "acceptance_length": statistics.mean(side.lengths) if side.lengths and right else None,
                "rounds": [round(rate, 2) for rate in side.rates],
            }
        )
    return out


def table(records: Sequence[dict[str, Any]], caption: str) -> str:
    """The records as a Markdown table."""
    lines = ["| side | tokens/s | ratio | acceptance length |", "|---|---:|---:|---:|"]
    for r in records:
        rate = f"{r['tokens_per_second']:.0f}" if r["tokens_per_second"] else "wrong output"
        ratio = f"{r['ratio']:.2f}x {r['baseline']}" if r["ratio"] else ""
        length = f"{r['acceptance_length']:.2f}" if r["acceptance_length"] and r["acceptance_length"] > 1 else ""
        lines.append(f"| {r['side']} | {rate} | {ratio} | {length} |")
    return "\n".join([*lines, "", caption])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, append the records to ``perf/results``; with ``--readme`` also rewrite README's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="folder of the target")
    parser.add_argument("--draft", default=None, help="folder of the EAGLE-3 head")
    parser.add_argument("--runtime", default="compiled", choices=("eager", "compiled", "captured"))
    parser.add_argument("--dtype", default="float32", help="lower precision may flip near-ties, and then a side counts as wrong")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--readme", action="store_true", help="rewrite the table in README.md")
    args = parser.parse_args(argv)

    torch.set_flush_denormal(True)
    plain = "graphspec none"
    engine = {"model": args.model, "runtime": args.runtime, "dtype": args.dtype}
    chain = {**engine, "draft": args.draft, "num_steps": 4, "topk": 1, "num_draft_tokens": 5}
    tree = {**engine, "draft": args.draft, "num_steps": 5, "topk": 4, "num_draft_tokens": 16}
    probe = LLM(args.model, "none", runtime="eager", dtype=args.dtype)
    device = probe.plan.device
    sides = [
        *hf_sides(args.model, args.max_tokens, device, DTYPES[probe.plan.dtype]),
        graphspec_side(plain, args.max_tokens, "HF generate", variant="none", **engine),
        graphspec_side("graphspec eagle3, chain (4, 1, 5)", args.max_tokens, plain, **chain),
        graphspec_side("graphspec eagle3, tree (5, 4, 16)", args.max_tokens, plain, **tree),
    ]
    encode = probe.tokenizer.encode
    prompts = held_out_prompts(encode, args.prompts, args.prompt_tokens)
    watch = CoreWait()
    measure(sides, prompts, args.rounds)
    busy = watch.share()
    records = rows(sides)
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    name = "Demo model" if args.model == "demo" else args.model
    caption = (
        f"{name}, batch 1, greedy, {probe.plan.dtype}, `runtime={args.runtime}`, {where}, {len(prompts)} held-out "
        f"prompts of {args.prompt_tokens} tokens, {args.max_tokens} new tokens, median of {args.rounds} rounds: `make bench`."
    )
    print(table(records, caption))
    if (told := busy_caution({"all sides": busy})) is not None:
        print(told)
    write_jsonl(
        result_file(args.out, f"speed-{args.runtime}"),
        [
            provenance(),
            {"kind": "settings", **vars(args), "out": within_repository(args.out), "device": device, "core_wait": busy},
            *records,
        ],
    )
    if args.readme:
        text = README.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        README.write_text(f"{before}{BEGIN}\n{table(records, caption)}\n{END}{after}", encoding="utf-8")
    return 0 if all(r["equal_to_hf"] for r in records) else 1


if __name__ == "__main__":
    raise SystemExit(main())

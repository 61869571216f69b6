"""Acceptance and speed of a head on chat prompts that no head was trained on: ``python -m perf.chat_acceptance --model smollm2``.

The prompts are those of ``perf/prompts/chat.jsonl``, five of each of eight kinds; in the last kind the answer repeats much of the prompt,
of which ``edits.jsonl`` has 40 more. They are answered one at a time, plainly and with drafts as a chain and as a tree, greedy and at
temperature 1. A row is new tokens per cycle, and new tokens per second of decoding, by kind. Every run must give the tokens of plain
decoding; one that does not has no figure.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphspec.api.llm import LLM
from graphspec.engine.request import SamplingParams
from graphspec.lab.measure.provenance import ROOT, provenance, result_file, write_jsonl

PROMPTS = ROOT / "perf" / "prompts" / "chat.jsonl"
SHAPES = ((4, 1, 5), (3, 1, 4), (4, 4, 8))
TEMPERATURES = (0.0, 1.0)


def answers(llm: LLM, prompts: Sequence[dict[str, str]], maximum: int, temperature: float) -> list[dict[str, Any]]:
    """One record for each prompt: its kind, tokens, cycles and seconds."""
    found = []
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=maximum, temperature=temperature, seed=number)
        [output] = llm.chat([{"role": "user", "content": prompt["prompt"]}], params)
        metrics = output.metrics
        # The first token is the prefill's.
        made = len(output.token_ids) - 1
        found.append(
            {"kind": prompt["kind"], "tokens": output.token_ids, "made": made, "cycles": metrics.cycles, "s": metrics.decode_seconds}
        )
    return found


def by_kind(records: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Tokens per cycle and per second of each kind, and of all of them."""
    found = {}
    for kind in [*dict.fromkeys(record["kind"] for record in records), "all"]:
        rows = [record for record in records if kind in (record["kind"], "all")]
        made = sum(row["made"] for row in rows)
        found[kind] = (made / max(1, sum(row["cycles"] for row in rows)), made / max(1e-9, sum(row["s"] for row in rows)))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the records to ``--out``; 1 if a run has other tokens than plain decoding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", help="folder of the head; without: the one that comes with the model")
    parser.add_argument("--variant", default="eagle3")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help='JSONL of {"kind": ..., "prompt": ...}')
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--every", type=int, default=1, help="only every so many prompts")
    parser.add_argument("--shape", nargs=3, type=int, action="append", metavar=("S", "K", "N"), help="depth, fan-out, nodes; several times")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "results", help="folder of the result file")
    args = parser.parse_args(argv)
    prompts = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()][:: args.every]
    keys: dict[str, Any] = {"max_rows": 1, "buckets": [1], "max_context": 1024, "threads": args.threads, "generation_config": "ignore"}
    shapes = [tuple(shape) for shape in args.shape] if args.shape else SHAPES
    expected: dict[float, list[list[int]]] = {}
    records, equal = [], True
    for shape in (None, *shapes):
        if shape is None:
            llm = LLM(args.model, variant="none", **keys)
        else:
            sizes = dict(zip(("num_steps", "topk", "num_draft_tokens"), shape, strict=True))
            llm = LLM(args.model, variant=args.variant, draft=args.draft, **keys, **sizes)
        for temperature in TEMPERATURES:
            found = answers(llm, prompts, args.max_tokens, temperature)
            tokens = [record["tokens"] for record in found]
            same = tokens == expected.setdefault(temperature, tokens)
            equal = equal and same
            cells = by_kind(found)
            records.append({"shape": shape, "temperature": temperature, "equal_to_plain": same, "kinds": cells})
            row = ", ".join(f"{kind} {length:.2f} ({rate:.0f}/s)" for kind, (length, rate) in cells.items())
            print(f"{shape or 'plain'} T={temperature:g}: {row if same else 'wrong output'}", flush=True)
        llm.close()
    settings = {"kind": "settings", "model": args.model, "variant": args.variant, "max_tokens": args.max_tokens, "prompts": len(prompts)}
    write_jsonl(result_file(args.out, "chat_acceptance"), [provenance(), settings, *records])
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())

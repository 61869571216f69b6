"""What each way to sample costs: milliseconds of a decoding cycle next to a greedy one, ``python -m perf.sampling_cost``.

One engine answers prompts of ``perf/prompts/chat.jsonl`` one at a time, each form in turn prompt by prompt. The time of an answer counts
from its first token to its last, so the prompt is left out, and is divided by the cycles in between. A form's figure is the median over
rounds, its ratio the median over rounds of the ratio to greedy.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphspec.api.llm import LLM
from graphspec.engine.request import SamplingParams, Structured
from graphspec.host.core_wait import CoreWait, busy_caution
from graphspec.lab.measure.provenance import ROOT, provenance, result_file, within_repository, write_jsonl

PROMPTS = ROOT / "perf" / "prompts" / "chat.jsonl"
GREEDY = "greedy"
SCHEMA = {
    "type": "object",
    "properties": {"topic": {"type": "string"}, "answer": {"type": "string"}, "sources": {"type": "array", "items": {"type": "string"}}},
    "required": ["topic", "answer", "sources"],
}
FORMS: dict[str, dict[str, Any]] = {
    GREEDY: {},
    "temperature 1": {"temperature": 1.0, "seed": 1},
    "temperature 1, top_p 0.9": {"temperature": 1.0, "top_p": 0.9, "seed": 1},
    "temperature 1, top_k 50": {"temperature": 1.0, "top_k": 50, "seed": 1},
    "temperature 1, min_p 0.05": {"temperature": 1.0, "min_p": 0.05, "seed": 1},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "a logit bias": {"logit_bias": {1: -100.0, 2: 5.0, 3: 0.5}},
    "bad words": {"bad_words": ["however", "In conclusion"]},
    "5 log-probabilities": {"logprobs": 5},
    "JSON by a schema": {"structured": Structured(json_schema=SCHEMA), "ignore_eos": False},
}


def cycle_time(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[float, int]:
    """Seconds from the first token of an answer to its last, and the cycles that made them."""
    [output] = llm.generate([prompt], params)
    return output.metrics.decode_seconds, output.metrics.cycles


def measure(llm: LLM, prompts: Sequence[list[int]], rounds: int, max_tokens: int) -> dict[str, list[float]]:
    """Milliseconds a cycle of every form, one figure per round."""
    params = {name: SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **form}) for name, form in FORMS.items()}
    for form in params.values():
        cycle_time(llm, prompts[0], form)
    found: dict[str, list[float]] = {name: [] for name in FORMS}
    for number in range(rounds):
        sums = {name: [0.0, 0] for name in FORMS}
        for prompt in prompts:
            # The second round goes backwards: no form always follows the same other one.
            for name in params if number % 2 == 0 else reversed(params):
                seconds, cycles = cycle_time(llm, prompt, params[name])
                sums[name][0] += 1e3 * seconds
                sums[name][1] += cycles
        for name, (milliseconds, cycles) in sums.items():
            found[name].append(milliseconds / cycles)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the records to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a name of conf/model, a GGUF file or a folder")
    parser.add_argument("--variant", default="ngram", help="the drafter (default: %(default)s)")
    parser.add_argument("--draft", help="folder of its network, if it has one; default: the one that comes with the model")
    parser.add_argument("--shape", type=int, nargs=3, default=(3, 1, 4), metavar=("S", "K", "N"), help="of the drafter (default: 3 1 4)")
    parser.add_argument("--raw", action="store_true", help="prompts as they are, without the chat template")
    parser.add_argument("--every", type=int, default=5, help="only every so many prompts (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's own choice")
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "results", help="folder of the result file")
    args = parser.parse_args(argv)
    for key in ("every", "rounds", "max_tokens"):
        if vars(args)[key] < 1:
            parser.error(f"--{key.replace('_', '-')}: expected at least 1, found {vars(args)[key]}")
    shape = {} if args.variant == "none" else dict(zip(("num_steps", "topk", "num_draft_tokens"), args.shape, strict=True))
    keys: dict[str, Any] = {"max_rows": 1, "buckets": [1], "max_context": 1024, "prefix_cache": False, "generation_config": "ignore"}
    if args.variant != "none":
        keys |= {"draft": args.draft, **shape}
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()][:: args.every]
    with LLM(args.model, variant=args.variant, threads=args.threads, **keys) as llm:
        chats = [[{"role": "user", "content": text}] for text in texts]
        asked = llm.generate(texts, {"max_tokens": 1}) if args.raw else llm.chat(chats, {"max_tokens": 1})
        for output in asked:
            if output.error is not None:
                raise SystemExit(output.error)
        watch = CoreWait()
        found = measure(llm, [output.prompt_token_ids for output in asked], args.rounds, args.max_tokens)
        busy = watch.share()
    records = []
    for name, rounds in found.items():
        ratio = statistics.median(own / greedy for own, greedy in zip(rounds, found[GREEDY], strict=True))
        records.append({"form": name, "milliseconds": statistics.median(rounds), "ratio": ratio, "rounds": [round(ms, 3) for ms in rounds]})
        print(f"{name}: {records[-1]['milliseconds']:.2f} ms a cycle, {ratio:.2f} times greedy")
    if (caution := busy_caution({"all forms": busy})) is not None:
        print(caution)
    settings = {key: value for key, value in vars(args).items() if key != "out"} | {"model": Path(args.model).name}
    file = result_file(args.out, "sampling-cost")
    write_jsonl(file, [provenance(), {"kind": "settings", **settings, "core_wait": busy}, *records])
    print(within_repository(file))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

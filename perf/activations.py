"""What rounded activations change about a model's output: ``python -m perf.activations``.

An engine with ``kernels.activations=full`` answers the prompts of ``perf/prompts/chat.jsonl`` greedily. It and one that rounds then read
the answers and paragraphs of the documentation. What is reported: nats per token of either text under both, and how many tokens of the
answers are also the most likely ones with rounded activations, each after the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphspec.api.llm import LLM
from graphspec.config.schema import ACTIVATIONS
from graphspec.engine.request import SamplingParams, TokenLogprob
from graphspec.lab.measure.provenance import ROOT, provenance, result_file, within_repository, write_jsonl
from perf.same_bits import texts

CHUNK = 256
"""Tokens of a piece of the documentation."""


def pieces(llm: LLM, count: int) -> list[list[int]]:
    """``count`` pieces of the documentation, :data:`CHUNK` tokens each."""
    prompts = sum(1 for _ in (ROOT / "perf" / "prompts" / "chat.jsonl").open(encoding="utf-8"))
    tokens = [token for text in texts()[prompts:] for token in llm.tokenizer.encode(text)]
    if len(tokens) < CHUNK * count:
        raise SystemExit(f"--pieces: at most {len(tokens) // CHUNK}, which is what the documentation has, found {count}")
    return [tokens[CHUNK * place : CHUNK * (place + 1)] for place in range(count)]


def read(llm: LLM, rows: Sequence[list[int]]) -> list[list[TokenLogprob | None]]:
    """What the engine thinks of every token of these texts."""
    outputs = llm.generate(list(rows), SamplingParams(max_tokens=0, prompt_logprobs=1))
    return [output.prompt_logprobs or [] for output in outputs]


def nats(found: Sequence[Sequence[TokenLogprob | None]]) -> float:
    """Mean negative log-probability of a token."""
    return -statistics.fmean(each.logprob for row in found for each in row if each is not None)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the figures, write them to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a name of conf/model, a GGUF file or a folder")
    parser.add_argument("--activations", default="int8", choices=ACTIVATIONS[1:], help="next to full ones (default: %(default)s)")
    parser.add_argument("--pieces", type=int, default=40, help=f"of the documentation, of {CHUNK} tokens each (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "results", help="folder of the result file")
    args = parser.parse_args(argv)
    keys: dict[str, Any] = {"variant": "none", "runtime": "compiled", "max_rows": 4, "max_context": 1024, "generation_config": "ignore"}
    engines = {name: LLM(args.model, activations=name, **keys) for name in ("full", args.activations)}
    full = engines["full"]
    asked = [[{"role": "user", "content": text}] for text in texts()[:40]]
    answers = full.chat(asked, SamplingParams(max_tokens=args.max_tokens, temperature=0.0))
    whole = [[*output.prompt_token_ids, *output.token_ids] for output in answers]
    told = pieces(full, args.pieces)
    records = []
    for name, llm in engines.items():
        own = [row[-len(output.token_ids) :] for row, output in zip(read(llm, whole), answers, strict=True)]
        tokens = [each for row in own for each in row if each is not None]
        record = {
            "activations": name,
            "answers": nats(own),
            "documentation": nats(read(llm, told)),
            "same": statistics.fmean(next(iter(each.top)) == each.token_id for each in tokens),
            "answer_tokens": len(tokens),
            "documentation_tokens": (CHUNK - 1) * len(told),
        }
        records.append({"kind": "activations", **record})
        print(
            f"{name}: {record['documentation']:.4f} nats per token of the documentation, {record['answers']:.4f} of the answers, of whose "
            f"{len(tokens)} tokens {100 * record['same']:.2f} % are the most likely ones"
        )
        llm.close()
    file = result_file(args.out, "activations")
    settings = {key: value for key, value in vars(args).items() if key != "out"} | {"model": Path(args.model).name}
    write_jsonl(file, [provenance(), {"kind": "settings", **settings}, *records])
    print(within_repository(file))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

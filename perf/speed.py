"""Speed of every way to decode, all sides in one run: HF ``generate``, HF assisted generation, plain decoding, chains and trees.

``make bench`` measures the demo model on prompts from modules that it was not trained on. Sides take turns batch by batch, so that a slow
phase of the machine affects all of them; the figure of a side is the median over rounds of its tokens per second, the ratio the median of
the ratios within a round. A side whose tokens differ from HF's greedy output is reported as wrong and has no figure. With one new token the
rate is that of the prompt.

``make race MODEL=demo`` adds other engines (:mod:`perf.peers`), each in its own process; one that can't take part is listed with its
reason.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graphspec.api.llm import LLM
from graphspec.config.schema import RUNTIMES
from graphspec.engine.request import SamplingParams
from graphspec.facts.folders import model_folder
from graphspec.host.core_wait import CoreWait, busy_caution
from graphspec.lab.measure.provenance import provenance, result_file, within_repository, write_jsonl
from graphspec.plan.buffers import DTYPES
from graphspec.plan.runtime import resolve_runtime
from perf.peers import PEERS, PeerError, PeerProcess, exporter_of
from recipes.corpus import load_corpus

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
PAUSE = 0.01
"""Seconds between two sides: threads of the previous one may still be spinning."""
SHAPE = ("num_steps", "topk", "num_draft_tokens")
BEGIN, END = "<!-- speed table: make bench -->", "<!-- end of speed table -->"


@dataclass(slots=True)
class Decoder:
    """One way to decode: ``run`` maps the prompts of a batch to their new tokens."""

    name: str
    run: Callable[[list[list[int]]], list[list[int]]]
    baseline: str = ""
    """The side that its ratio refers to."""
    rates: list[float] = field(default_factory=list)
    acceptance: Callable[[], float] | None = None
    lengths: list[float] = field(default_factory=list)
    wrong: int = 0
    version: str | None = None
    """Version of a package that is not in the provenance."""


def held_out_prompts(encode: Callable[[str], list[int]], count: int, tokens: int) -> list[list[int]]:
    """``count`` prompts of ``tokens`` ids, each from the middle of a different held-out module."""
    documents = sorted(load_corpus().held_out.items())
    prompts = []
    for _, text in documents:
        ids = encode(text)
        middle = len(ids) // 2
        if len(ids) >= middle + tokens:
            prompts.append(ids[middle : middle + tokens])
    return prompts[:count]


def graphspec_decoder(name: str, settings: argparse.Namespace, baseline: str, **overrides: Any) -> Decoder:
    """An engine with a row for each prompt of a batch as a side."""
    engine = {"model": settings.model, "runtime": settings.runtime, "dtype": settings.dtype, "prefix_cache": False}
    context = max(512, settings.prompt_tokens + settings.max_tokens + 64)
    llm = LLM(max_rows=settings.batch, buckets=[settings.batch], max_context=context, **engine, **overrides)
    params = SamplingParams(max_tokens=settings.max_tokens).resolve()

    def run(prompts: list[list[int]]) -> list[list[int]]:
        return [out.token_ids for out in llm.generate(prompts, params)]

    def acceptance() -> float:
        return llm.metrics.acceptance_length if llm.metrics else 0.0

    return Decoder(name, run, baseline, acceptance=acceptance)


def hf_decoders(settings: argparse.Namespace, device: str, dtype: torch.dtype) -> list[Decoder]:
    """HF transformers on the same weights: plain, and, one prompt at a time, assisted by prompt lookup, which needs no second model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder(settings.model), dtype=dtype, trust_remote_code=False).to(device).eval()
    how = {"max_new_tokens": settings.max_tokens, "do_sample": False, "pad_token_id": 0}

    def generate(prompts: list[list[int]], **more: Any) -> list[list[int]]:
        ids = torch.tensor(prompts, device=device)
        return model.generate(ids, attention_mask=torch.ones_like(ids), **how, **more)[:, ids.shape[1] :].tolist()

    sides = [Decoder("HF generate", generate)]
    if settings.batch == 1:
        sides.append(Decoder("HF assisted (prompt lookup, 4)", lambda p: generate(p, prompt_lookup_num_tokens=4), "HF generate"))
    return sides


def peer_decoders(settings: argparse.Namespace, threads: int) -> tuple[list[Decoder], dict[str, str]]:
    """Other engines, each in its own process, and for those that are missing the reason."""
    sides, missing = [], {}
    for peer in PEERS:
        if settings.batch > 1 and not peer.batches:
            missing[peer.side] = "takes one prompt at a time"
            continue
        try:
            process = PeerProcess(peer, settings.peers, exporter_of(settings.exporter), model_folder(settings.model), threads)
        except PeerError as reason:
            missing[peer.side] = str(reason)
            continue
        run = partial(process.generate, max_tokens=settings.max_tokens)
        sides.append(Decoder(peer.side, run, peer.baseline or "HF generate", version=process.version))
    return sides, missing


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """A context with ``count`` programs that each keep a core busy."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def measure(sides: Sequence[Decoder], batches: Sequence[list[list[int]]], rounds: int) -> None:
    """Measure every side's rates; all sides must give the tokens of the first."""
    for side in sides:
        side.run(batches[0])
    for _ in range(rounds):
        tokens, seconds = dict.fromkeys((s.name for s in sides), 0), dict.fromkeys((s.name for s in sides), 0.0)
        for batch in batches:
            expected: list[list[int]] | None = None
            for side in sides:
                time.sleep(PAUSE)
                started = time.perf_counter()
                out = side.run(batch)
                seconds[side.name] += time.perf_counter() - started
                new = max(map(len, out))
                tokens[side.name] += sum(map(len, out if new > 1 else batch))
                expected = out if expected is None else expected
                side.wrong += out != expected
                if side.acceptance is not None:
                    side.lengths.append(side.acceptance())
        for side in sides:
            side.rates.append(tokens[side.name] / seconds[side.name])


def rows(sides: Sequence[Decoder]) -> list[dict[str, Any]]:
    """One record per side, with medians."""
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
                **({"version": side.version} if side.version else {}),
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
    """Measure, print the table, append the records to ``perf/results``; with ``--page`` also rewrite the table of docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="folder of the target")
    parser.add_argument("--draft", default=None, help="folder of the EAGLE-3 head")
    parser.add_argument("--runtime", default="auto", choices=RUNTIMES)
    parser.add_argument("--dtype", default="float32", help="lower precision may flip near-ties, and then a side counts as wrong")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1, help="prompts at a time")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of each side; default: torch's own choice")
    parser.add_argument("--busy", type=int, default=0, help="other programs that keep a core busy each meanwhile")
    parser.add_argument("--race", action="store_true", help="with engines of others, as far as they are installed")
    parser.add_argument("--peers", default=sys.executable, help="interpreter of the environment that has them")
    parser.add_argument("--exporter", default=None, help="optimum-cli, which converts for OpenVINO; default: the one on the path")
    parser.add_argument("--shape", type=int, nargs=3, action="append", default=[], metavar=("S", "K", "N"), help="one more shape of eagle3")
    parser.add_argument("--page", action="store_true", help="rewrite the table in docs/benchmarks.md")
    args = parser.parse_args(argv)

    torch.set_flush_denormal(True)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    plain = "graphspec none"
    shapes = [(4, 1, 5), (5, 4, 16), *map(tuple, args.shape)]
    probe = LLM(args.model, "none", runtime="eager", dtype=args.dtype)
    device = probe.plan.device
    args.runtime = resolve_runtime(args.runtime, device).name
    sides = [
        *hf_decoders(args, device, DTYPES[probe.plan.dtype]),
        graphspec_decoder(plain, args, "HF generate", variant="none"),
        *(
            graphspec_decoder(
                f"graphspec eagle3, {'chain' if shape[1] == 1 else 'tree'} {shape}",
                args,
                plain,
                variant="eagle3",
                draft=args.draft,
                **dict(zip(SHAPE, shape, strict=True)),
            )
            for shape in shapes
        ),
    ]
    peers, missing = peer_decoders(args, torch.get_num_threads()) if args.race else ([], {})
    sides += peers
    prompts = held_out_prompts(probe.tokenizer.encode, args.prompts * args.batch, args.prompt_tokens)
    batches = [prompts[i : i + args.batch] for i in range(0, len(prompts) - args.batch + 1, args.batch)]
    watch = CoreWait()
    with busy_programs(args.busy):
        measure(sides, batches, args.rounds)
    busy = watch.share()
    records = rows(sides)
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    where += f" next to {args.busy} busy programs" if args.busy else ""
    name = "Demo model" if args.model == "demo" else args.model
    what = f"{args.max_tokens} new tokens" if args.max_tokens > 1 else "1 new token (the rate is the prompt's)"
    command = "race MODEL=demo" if args.race else "bench"
    caption = (
        f"{name}, batch {args.batch}, greedy, {probe.plan.dtype}, `runtime={args.runtime}`, {where}, {args.batch * len(batches)} held-out "
        f"prompts of {args.prompt_tokens} tokens, {what}, median of {args.rounds} rounds: `make {command}`."
    )
    caption = "\n".join([caption, *(f"Missing: {side}: {reason}." for side, reason in missing.items())])
    print(table(records, caption))
    if (caution := busy_caution({"all sides": busy})) is not None:
        print(caution)
    settings = {**vars(args), "out": within_repository(args.out), "device": device, "core_wait": busy}
    for other in ("peers", "exporter"):
        settings[other] = within_repository(settings[other]) if args.race and settings[other] else None
    write_jsonl(
        result_file(args.out, f"{'race' if args.race else 'speed'}-{args.runtime}"),
        [
            provenance(),
            {"kind": "settings", **settings, "threads": torch.get_num_threads()},
            *records,
            *({"side": side, "missing": reason} for side, reason in missing.items()),
        ],
    )
    if args.page:
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n{table(records, caption)}\n{END}{after}", encoding="utf-8")
    return 0 if all(r["equal_to_hf"] for r in records) else 1


if __name__ == "__main__":
    raise SystemExit(main())

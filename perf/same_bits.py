"""Whether drafts change a bit of a real model's logits on a CPU: ``make same-bits``.

The chat model runs as published (Q4_1), with full activations and with those of 8 bits, and as a bfloat16 copy of the same numbers with KV
in 16 bits, likewise with activations in float32 and in bfloat16. Every prompt is answered greedily and with a seed, plainly first, then
with every drafter as a chain and as a tree. What is compared is every token, and a hash of all logits of every committed position. Drafts
with networks have random weights: any drafter must be exact. ``itself`` drafts with the target, so that whole runs are accepted;
``trained`` is the head that comes with the package for the model, if there is one. The last case is a control: on torch's own ops, in
``fast`` numerics, the same comparison must find other bits.

Prompts are those of ``perf/prompts`` and of ``graphspec profile``, then paragraphs of the documentation.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from graphspec.api.llm import LLM
from graphspec.config.catalog import resolve_variant
from graphspec.engine.request import SamplingParams
from graphspec.facts.folders import model_folder, shipped_draft
from graphspec.lab.measure.provenance import ROOT, provenance, result_file, within_repository, write_jsonl
from graphspec.train.drafter import load_target, network_of
from graphspec.train.export import copy_tokenizer, export_draft
from perf.committed_logits import committed

SOURCES = (ROOT / "perf" / "prompts" / "chat.jsonl", ROOT / "graphspec" / "lab" / "measure" / "workloads" / "held_out.jsonl")
PROMPT_TOKENS = 32
"""Longest prompt; shorter ones keep their length."""
PARAGRAPH = 200
"""Fewest characters of a paragraph that is a prompt."""
TEMPERATURE = 0.8
NETWORKS: dict[str, dict[str, Any]] = {
    "eagle": {"intermediate_size": 256},
    "eagle3": {"draft_vocab_size": 4096, "tap_layers": [2, 15, 27]},
    "mtp": {},
    "p_eagle": {"num_hidden_layers": 2, "draft_vocab_size": 4096, "tap_layers": [2, 15, 27]},
    "dflash": {"num_hidden_layers": 2, "intermediate_size": 256, "tap_layers": [2, 15, 27], "block_size": 4},
    "standalone": {},
}
"""Settings of the networks with random weights (``train.network``)."""
CHAIN, TREE = {"num_steps": 2, "topk": 1, "num_draft_tokens": 3}, {"num_steps": 2, "topk": 2, "num_draft_tokens": 5}
ITSELF, TRAINED = "itself", "trained"
COPY = "bfloat16"
MODELS: dict[str, dict[str, Any]] = {
    "Q4_1": {},
    "Q4_1, int8": {"activations": "int8"},
    COPY: {"kv_dtype": "bfloat16"},
    f"{COPY}, rounded": {"kv_dtype": "bfloat16", "activations": "bfloat16"},
}
CONTROL = "control, fast"


@dataclass(frozen=True)
class Case:
    """One drafter in one shape.

    Attributes:
        draft: key of :data:`NETWORKS`, ``itself``, ``trained``, or None: it has no network.
    """

    name: str
    variant: str
    shape: dict[str, int]
    draft: str | None = None


DRAFTERS: tuple[tuple[str, str, str | None], ...] = (
    ("ngram", "ngram", None),
    ("ngram_trie", "ngram_trie", None),
    (f"standalone {ITSELF}", "standalone", ITSELF),
    (f"eagle3 {TRAINED}", "eagle3", TRAINED),
    *((name, name, name) for name in NETWORKS),
)
CASES = tuple(
    Case(f"{name}, {form}", variant, shape, draft)
    for name, variant, draft in DRAFTERS
    for form, shape in (("chain", CHAIN), ("tree", TREE))
)


def texts() -> list[str]:
    """All prompts that the repository has, those of users first."""
    asked = [json.loads(line)["prompt"] for file in SOURCES for line in file.read_text(encoding="utf-8").splitlines()]
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]
    told = [text for page in pages for text in page.split("\n\n") if len(text) >= PARAGRAPH and text[0].isalpha()]
    return list(dict.fromkeys([*asked, *told]))


def requests(llm: LLM, count: int, tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Every prompt twice, greedy and with a seed; no two requests have one seed."""
    chosen = [llm.tokenizer.encode(text)[:PROMPT_TOKENS] for text in texts()[:count]]
    if len(chosen) < count:
        raise SystemExit(f"--prompts: at most {len(chosen)}, which is what the repository has, found {count}")
    prompts = [prompt for prompt in chosen for _ in range(2)]
    heat = (0.0, TEMPERATURE)
    return prompts, [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i, temperature=heat[i % 2]) for i in range(2 * count)]


def write_bfloat16(source: Path, folder: Path) -> PreTrainedModel:
    """Write the numbers of a checkpoint in bfloat16, as a folder of its own; returns the model in float32."""
    model = load_target(source).to(torch.bfloat16)
    model.save_pretrained(folder)
    copy_tokenizer(source, folder)
    return load_target(folder)


@torch.no_grad()
def write_draft(name: str, target: PreTrainedModel, tokens: Sequence[int], folder: Path) -> Path:
    """A draft of random weights; ``tokens`` are those that a reduced vocabulary holds first."""
    kind = network_of(name)
    counts = torch.bincount(torch.tensor(tokens), minlength=target.config.vocab_size)
    torch.manual_seed(0)
    drafter = kind.build(target, kind.Settings(**NETWORKS[name]), counts)
    folder.mkdir(parents=True)
    export_draft(drafter, target, folder, tokenizer=Path(target.config.name_or_path))
    return folder


Logits = dict[tuple[int, int], bytes]


def difference(expected: tuple[list[list[int]], Logits], found: tuple[list[list[int]], Logits]) -> dict[str, int]:
    """How many tokens and logits of ``expected`` are not those of ``found``; a position that is missing differs."""
    pairs = zip(expected[0], found[0], strict=True)
    tokens = sum(a != b for one, other in pairs for a, b in zip(one, other, strict=True))
    return {"differing_tokens": tokens, "differing_logits": sum(found[1].get(place) != bits for place, bits in expected[1].items())}


def answered(folder: Path, keys: dict[str, Any], prompts: int, tokens: int) -> tuple[dict[str, Any], tuple[list[list[int]], Logits]]:
    """A record of one run, its tokens and its logits."""
    with LLM(folder, **keys) as llm:
        started = time.monotonic()
        outputs, logits = committed(llm, *requests(llm, prompts, tokens))
        assert llm.metrics is not None
        record = {
            "numerics": llm.metrics.numerics,
            "acceptance_length": llm.metrics.acceptance_length,
            "tokens": sum(len(output.token_ids) for output in outputs),
            "logits": len(logits),
            "seconds": round(time.monotonic() - started, 1),
        }
    return record, ([output.token_ids for output in outputs], logits)


def run(args: argparse.Namespace, work: Path, file: Path) -> bool:
    """All cases; every record is written as soon as it is known. True: none differs, and the control does."""
    source, right = model_folder(args.model), True
    trained = shipped_draft(args.model, source, resolve_variant("eagle3"))
    settings = {"kind": "settings", **{key: value for key, value in vars(args).items() if key != "out"}}
    records: list[dict[str, Any]] = [provenance(), settings]
    target = write_bfloat16(source, work / COPY)
    keys: dict[str, Any] = {"max_rows": args.rows, "buckets": [args.rows], "max_context": PROMPT_TOKENS + args.max_tokens}
    # Every prompt is there twice, so pages would be shared; drafters that can't share would read other chunks.
    keys |= {"prefix_cache": False, "generation_config": "ignore", "threads": args.threads, "sampling_classes": ["noise"]}

    def note(model: str, case: str, record: dict[str, Any]) -> None:
        records.append({"kind": "case", "model": model, "case": case, **record})
        write_jsonl(file, records)
        print(f"{model}, {case}: {record}", flush=True)

    for model, own in MODELS.items():
        folder = work / COPY if model.startswith(COPY) else source
        if args.models and model not in args.models:
            continue
        record, plain = answered(folder, {**keys, **own, "variant": "none"}, args.prompts, args.max_tokens)
        note(model, "plain", record)
        for case in CASES:
            if (args.case and case.name not in args.case) or (case.draft == TRAINED and trained is None):
                continue
            draft = {None: None, ITSELF: folder, TRAINED: trained}.get(case.draft, work / (case.draft or ""))
            if draft is not None and not draft.exists():
                write_draft(case.draft or "", target, [token for row in plain[0] for token in row], draft)
            record, found = answered(
                folder, {**keys, **own, **case.shape, "variant": case.variant, "draft": draft}, args.prompts, args.max_tokens
            )
            record |= difference(plain, found)
            right &= record["differing_tokens"] == record["differing_logits"] == 0 and record["numerics"] == "batch_invariant"
            note(model, case.name, record)
    if args.control:
        right &= control(source, keys, args.control, note)
    return right


def control(folder: Path, keys: dict[str, Any], prompts: int, note: Any) -> bool:
    """A tree against plain decoding on torch's own ops; True: bits differ, so the comparison can find such a difference."""
    keys = {**keys, "runtime": "eager", "numerics": "fast"}
    _, plain = answered(folder, {**keys, "variant": "none"}, prompts, 8)
    record, found = answered(folder, {**keys, "variant": "ngram", **TREE}, prompts, 8)
    record |= difference(plain, found)
    note("Q4_1", CONTROL, record)
    return bool(record["differing_logits"] > 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print a line for each case, write the records to ``--out``; 1 if a bit differs, or if the control finds none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--models", nargs="+", action="extend", choices=list(MODELS), help="only these forms of it")
    parser.add_argument("--case", nargs="+", action="extend", choices=[case.name for case in CASES], help="only these drafters")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--control", type=int, default=4, help="prompts of the control; 0: none")
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "results", help="folder of the result file")
    args = parser.parse_args(argv)
    for key in ("prompts", "max_tokens", "rows"):
        if vars(args)[key] < 1:
            parser.error(f"--{key.replace('_', '-')}: expected at least 1, found {vars(args)[key]}")
    file = result_file(args.out, "same-bits")
    with tempfile.TemporaryDirectory() as work:
        right = run(args, Path(work), file)
    print(within_repository(file))
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())

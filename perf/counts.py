"""Deterministic counts of the work of a cycle, stored in ``perf/guard.json`` and compared by ``tests/perf/test_guard.py``.

``python -m perf.counts`` counts and prints the differences from the file, ``--write`` (``make guard``) renews it. ``--callgrind`` and
``--perf-stat`` print the machine instructions of one host-path scenario per cycle instead, which are not stored: they depend on compiler,
interpreter and libraries. docs/testing.md explains each section.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from graphspec.errors import GraphspecError
from perf.host_path import SCENARIOS, bytecodes_per_cycle

GUARD = Path(__file__).parent / "guard.json"
RENEW = "python -m perf.counts --write"
MAY_FALL = 0.02
"""Share by which a count may be below that of the file before the file must be renewed."""
MAY_RISE = {"cycles": 0.02}
"""Share by which a count of a section may be above that of the file, default 0. Processors round differently, which flips near-ties."""
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

Counts = dict[str, float]

PROMPTS = (
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def fib(n):\n    if n < 2:\n        return n\n",
    "import os\nimport sys\n\ndef main():\n    for name in sorted(os.listdir('.')):\n",
    "    def __repr__(self):\n        return '%s(%r)' % (self.__class__.__name__,",
)
NEW_TOKENS = 28
CYCLE_CASES = (
    *((variant, shape) for variant in ("eagle", "eagle3", "mtp", "standalone", "dflash") for shape in ((4, 1, 5), (4, 4, 16))),
    ("ngram", (6, 4, 12)),
    ("ngram_trie", (8, 8, 12)),
)
GRAPH_CASES = (("none", None, (1, 2)), ("eagle3", (4, 1, 5), (1,)))


def bytecodes() -> Counts:
    """Python bytecodes of the package per cycle, for every scenario of :mod:`perf.host_path`."""
    return {scenario.name: bytecodes_per_cycle(scenario) for scenario in SCENARIOS}


def _demo_plan(variant: str, shape: tuple[int, int, int] | None, rows: int, **facts: Any) -> Any:
    """A plan over the demo's facts; with ``facts``, over a bfloat16 model of those sizes on a GPU, and an EAGLE-3 head for it."""
    from graphspec.config.catalog import load_object, resolve_variant
    from graphspec.config.schema import Config, ModelConfig, RuntimeConfig, VariantConfig
    from graphspec.facts import read_model_facts
    from graphspec.facts.folders import model_folder
    from graphspec.plan.plan import make_plan

    steps, topk, nodes = shape or (None, None, None)
    entry, folder = resolve_variant(variant), model_folder("demo")
    target = read_model_facts(folder)
    draft = load_object(entry.facts)(folder.parent / entry.demo_draft, target) if entry.demo_draft is not None else None
    if facts:
        layers = facts["num_layers"]
        target = replace(target, dtype="bfloat16", sliding_window=(None,) * layers, **facts)
        if draft is not None:
            decoder = replace(draft.decoder, dtype="bfloat16", sliding_window=(None,), **{**facts, "num_layers": 1})
            hidden = target.hidden_size
            taps = (2, layers // 2, layers - 3)
            sizes = {"target_hidden_size": hidden, "feature_size": 3 * hidden, "draft_vocab_size": 32000}
            draft = replace(draft, decoder=decoder, tap_layers=taps, **sizes)
    config = Config(
        variant=VariantConfig(name=variant, num_steps=steps, topk=topk, num_draft_tokens=nodes),
        model=ModelConfig(max_context=1024),
        runtime=RuntimeConfig(name="captured" if facts else "eager", max_rows=rows),
    )
    return make_plan(config, target, draft, device="cuda" if facts else "cpu")


LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8,
    "head_dim": 128, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip


def sizes() -> Counts:
    """Bytes of every group of slots, and of the transfers between host and device per launch, as the plans declare them."""
    from graphspec.graphs.stages.mailbox import MailLayout
    from graphspec.plan.buffers import declare_slots, plan_sizes

    plans = {
        "demo, eagle3 (4, 1, 5), 8 rows": _demo_plan("eagle3", (4, 1, 5), 8),
        "8B, eagle3 (5, 4, 16), 8 rows": _demo_plan("eagle3", (5, 4, 16), 8, **LLAMA_8B),
    }
    found: Counts = {}
    for name, plan in plans.items():
        mail_words, letters = MailLayout.of(plan).size, plan_sizes(plan)
        groups: dict[str, int] = defaultdict(int)
        for slot in declare_slots(plan, mail_words):
            count = math.prod(letters[d] if isinstance(d, str) else d for d in slot.dims) * slot.dtype.itemsize
            groups[f"{slot.kind} slots, {slot.group}" if slot.group else f"{slot.kind} slots"] += count
            if slot.name == "ring_ZBJ":
                groups["to the host per launch"] = count // plan.ring_depth
        groups["to the device per launch"] = 8 * MailLayout.of(plan).joins  # of a cycle; a prefill chunk takes all
        found |= {f"{name}: {group}": size for group, size in sorted(groups.items())}
    return found


def cycles() -> Counts:
    """Cycles of each demo drafter for the same tokens: fixed prompts, greedy, eager, float32."""
    from graphspec.api.llm import LLM
    from graphspec.engine.request import SamplingParams

    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True).resolve()
    found: Counts = {}
    for variant, shape in CYCLE_CASES:
        llm = _engine(LLM, variant, shape, runtime="eager", max_rows=len(PROMPTS), buckets=[len(PROMPTS)])
        llm.generate(list(PROMPTS), params)
        assert llm.metrics is not None
        found[f"{variant} {shape}"] = llm.metrics.cycles
    return found


def graphs() -> Counts:
    """Graphs that Dynamo hands to the compiler while an engine warms up: one for each bucket's cycle, none for prefill."""
    from graphspec.api.llm import LLM

    found: Counts = {}
    # Only calls of the compiler are counted; other tests show that it compiles.
    with mock.patch("graphspec.graphs.compile.lookup_backend", lambda name: lambda module, inputs: module):
        for variant, shape, buckets in GRAPH_CASES:
            llm = _engine(LLM, variant, shape, runtime="compiled", max_rows=buckets[-1], buckets=list(buckets))
            before = llm.cycle.compilations.graphs
            llm.warm_up(buckets[-1])
            name = f"{variant} {shape}" if shape else variant
            found[f"{name}, bucket {' and '.join(map(str, buckets))}"] = llm.cycle.compilations.graphs - before
    return found


def _engine(make: Callable[..., Any], variant: str, shape: tuple[int, int, int] | None, **keys: Any) -> Any:
    spelled = dict(zip(("num_steps", "topk", "num_draft_tokens"), shape, strict=True)) if shape else {}
    return make(variant=variant, max_context=256, dtype="float32", threads=1, prefill_chunks=[32], **spelled, **keys)


def launches() -> Counts:
    """GPU launches of fused cycles in the shapes of Llama-3.1-8B, from the code that Inductor writes; no GPU is needed."""
    from tests.graphs import test_node_budget as budget

    tree, plain, deeper = budget.count(budget.TREE, 3), budget.count(budget.PLAIN, 3), budget.count(budget.TREE, 5)
    return launch_figures(len(tree), len(plain), len(deeper))


def launch_figures(tree: int, plain: int, deeper: int) -> Counts:
    """The section ``launches`` from three counts.

    Args:
        tree: launches of the cycle (5, 4, 8) over three layers.
        plain: of plain decoding over three layers.
        deeper: like ``tree``, over five layers.
    """
    layer = (deeper - tree) / 2
    return {
        "a decoder layer": layer,
        "a cycle of eagle3 (5, 4, 8), 3 layers": tree,
        "a cycle of eagle3 (5, 4, 8), 32 layers": tree + 29 * layer,
        "a step of plain decoding, 3 layers": plain,
        "a step of plain decoding, 32 layers": plain + 29 * layer,
    }


SECTIONS: dict[str, Callable[[], Counts]] = {
    "bytecodes": bytecodes, "launches": launches, "bytes": sizes, "cycles": cycles, "graphs": graphs,
}  # fmt: skip


def recorded(section: str, guard: Mapping[str, Any]) -> Counts | None:
    """A section of the file's content; for ``bytecodes``, that of the running Python, None if there is none."""
    found = guard.get(section, {})
    return found.get(PYTHON) if section == "bytecodes" else found


def _spell(count: float) -> str:
    return f"{count:,.1f}".removesuffix(".0")


def differences(section: str, old: Mapping[str, float], new: Mapping[str, float]) -> list[str]:
    """One sentence for each count that rose, fell by more than :data:`MAY_FALL`, is new, or is gone."""
    found = []
    for name in sorted({*old, *new}):
        before, now = old.get(name), new.get(name)
        label = f"{section}: {name}"
        if before is None:
            found.append(f"{label}: not in {GUARD.name}, counted {_spell(now)}; record it with: {RENEW}")
        elif now is None:
            found.append(f"{label}: {_spell(before)} in {GUARD.name}, no longer counted; drop it with: {RENEW}")
        elif now > before * (1 + MAY_RISE.get(section, 0.0)):
            found.append(f"{label}: rose from {_spell(before)} to {_spell(now)}; find out why, or if it is meant, renew with: {RENEW}")
        elif now < before * (1 - MAY_FALL):
            found.append(f"{label}: fell from {_spell(before)} to {_spell(now)}, so that the file allows too much; renew with: {RENEW}")
    return found


def renewed(guard: Mapping[str, Any], found: Mapping[str, Counts]) -> dict[str, Any]:
    """The file's content with its sections replaced by those of ``found``.

    Bytecodes of other Python versions are kept if those of the running one are unchanged; otherwise they are out of date and removed.
    """
    new: dict[str, Any] = {**guard, **found}
    if "bytecodes" in found:
        old = guard.get("bytecodes", {})
        keep = old if old.get(PYTHON, found["bytecodes"]) == found["bytecodes"] else {}
        new["bytecodes"] = {**keep, PYTHON: found["bytecodes"]}
    return {"renew": RENEW, **{section: new[section] for section in SECTIONS if section in new}}


def main(argv: Sequence[str] | None = None) -> int:
    """Count; print differences from the file, or renew it. Exit code 1: something differs."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.counts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--section", nargs="+", choices=tuple(SECTIONS), default=list(SECTIONS), help="only these")
    parser.add_argument("--write", action="store_true", help=f"renew {GUARD.name}")
    parser.add_argument("--callgrind", action="store_true", help="machine instructions per cycle, by valgrind (minutes)")
    parser.add_argument("--perf-stat", action="store_true", help="the same by the processor's own counter")
    parser.add_argument("--scenario", default="chain, batch 1, 2 in flight", help="of --callgrind and --perf-stat")
    args = parser.parse_args(argv)
    try:
        if args.callgrind or args.perf_stat:
            return _instructions(args)
        guard = json.loads(GUARD.read_text(encoding="utf-8")) if GUARD.is_file() else {}
        found = {section: SECTIONS[section]() for section in args.section}
    except GraphspecError as error:
        raise SystemExit(str(error)) from error
    messages = [line for section in found for line in differences(section, recorded(section, guard) or {}, found[section])]
    print("\n".join(messages) or f"{sum(map(len, found.values()))} counts as recorded")
    if args.write:
        new = renewed(guard, found)
        gone = sorted(set(guard.get("bytecodes", {})) - set(new.get("bytecodes", {})))
        GUARD.write_text(json.dumps(new, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {GUARD.name}" + (f"; bytecodes of Python {', '.join(gone)} are out of date and left out" if gone else ""))
        return 0
    return 1 if messages else 0


def _instructions(args: argparse.Namespace) -> int:
    from perf.host_path import scenario_named
    from perf.instructions import by_callgrind, by_perf_stat

    name = scenario_named(args.scenario).name
    for enabled, what, count in ((args.callgrind, "callgrind", by_callgrind), (args.perf_stat, "perf stat", by_perf_stat)):
        if enabled:
            print(f"{name}: {count(name):,.0f} instructions per cycle ({what})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Latency on a GPU: ``python -m perf.gpu.latency``.

Measures copy bandwidth; cycle time of a Llama-3.1-8B-shaped target with an EAGLE-3-shaped head, plain and drafting, by bucket; stages,
graph nodes and gaps of one case; host time per cycle; and at batch 1 what HF transformers' compiled static cache and the shortest compiled
loop need for a token. All sides in one run, medians, against the bytes that have to move at the bandwidth just measured. One JSONL file
under ``perf/results``. Acceptance is synthetic in every drafting row, and the row says so.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from graphspec.lab.machine import copy_bandwidth, measure
from graphspec.lab.provenance import ROOT, provenance, result_file, write_jsonl
from graphspec.lab.stages import kernel_timeline
from graphspec.shapes import CycleShape
from perf.gpu.bench import Bench, Case, write_configs
from perf.gpu.static_decode import compiled_step

PLAIN, CHAIN, TREE, WIDE_TREE = CycleShape(0, 1, 1), CycleShape(7, 1, 8), CycleShape(5, 4, 8), CycleShape(5, 4, 32)
SHAPES = {"none": PLAIN, "chain (7,1,8)": CHAIN, "tree (5,4,8)": TREE, "tree (5,4,32)": WIDE_TREE}
BUCKETS = (1, 2, 4, 8, 16, 32)
VARIANTS_AT_ONE: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = (
    ("compiled", (("mode", "compiled"),)),
    ("batch_invariant", (("numerics", "batch_invariant"),)),
    ("programmatic_launch", (("programmatic_launch", True),)),
)
"""Other kernels at batch 1, beside the fused ones: keys of the kernels group."""


def cases(buckets: Sequence[int]) -> Iterator[Case]:
    """Batch 1 first, all shapes and kernels; then the buckets, largest last."""
    for name, shape in SHAPES.items():
        yield Case(name, shape)
    for label, keys in VARIANTS_AT_ONE:
        for name in ("none", "tree (5,4,8)"):
            yield Case(f"{name}, {label}", SHAPES[name], keys=keys)
    for lanes in buckets:
        if lanes > 1:
            for name in ("none", "chain (7,1,8)", "tree (5,4,8)"):
                yield Case(name, SHAPES[name], lanes)


def record(bench: Bench, bandwidth: float, seconds: float) -> dict[str, Any]:
    """The row of one case."""
    case = bench.case
    time_ms, floor_ms = bench.milliseconds(seconds), 1e3 * bench.floor_bytes() / bandwidth
    length = min(case.length, case.shape.num_steps + 1)
    return {
        "kind": "cycle",
        "case": case.name,
        "lanes": case.lanes,
        "context": case.context,
        "synthetic": case.shape.num_steps > 0,
        "acceptance_length": length,
        "milliseconds": time_ms["median"],
        "p10": time_ms["p10"],
        "p90": time_ms["p90"],
        "floor_milliseconds": floor_ms,
        "percent_of_floor": 100 * floor_ms / time_ms["median"],
        "tokens_per_second": 1e3 * case.lanes * length / time_ms["median"],
        "host_microseconds": bench.host_microseconds(),
        "programs": [
            {"name": r.name, "warm_up_s": r.warm_up_seconds, "capture_s": r.capture_seconds, "bytes": r.pool_bytes}
            for r in bench.cycle.capture_report()
        ],
        "kernels": dict(case.keys),
    }


def anatomy(bench: Bench) -> dict[str, Any]:
    """Nodes of one replayed cycle, the time they run, and the gaps between them, from the profiler."""
    found = kernel_timeline(bench.cycle.programs[bench.key], bench.rewind)
    return {
        "kind": "anatomy",
        "case": bench.case.name,
        "lanes": bench.case.lanes,
        "synthetic": bench.case.shape.num_steps > 0,
        "nodes": found["nodes"],
        "busy_milliseconds": found["busy_ms"],
        "span_milliseconds": found["span_ms"],
        "gap_milliseconds": found["gap_ms"],
        "kernels": found["kernels"],
    }


def draft_step(bench: Bench, shorter: Bench) -> dict[str, Any]:
    """What one more draft step costs: the difference of two cycles that differ in depth alone."""
    deep, shallow = bench.milliseconds(1.0), shorter.milliseconds(1.0)
    steps = bench.case.shape.num_steps - shorter.case.shape.num_steps
    return {"kind": "draft_step", "case": bench.case.name, "milliseconds": (deep["median"] - shallow["median"]) / steps, "synthetic": True}


def static_loop(bench: Bench, seconds: float) -> dict[str, Any]:
    """The shortest compiled loop over the target of ``bench``, at its context."""
    step, cache, _ = compiled_step(bench.networks[0], bench.case.context + 1024)

    def rewind() -> None:
        cache.position_BT.fill_(bench.case.context)

    found = measure(step, rewind, 200, bench.plan.device, seconds, 1.0)
    return {"kind": "baseline", "case": "compiled static cache (gpt-fast style)", "lanes": 1, "milliseconds": found["median"], **found}


def transformers_generate(folder: Path, context: int, device: str, tokens: int = 64) -> dict[str, Any]:
    """HF transformers with a static cache, compiled, on random weights of the same config: milliseconds per token, prefill taken off."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32).eval()
    ids = torch.randint(5, min(1000, config.vocab_size), (1, context), device=device)

    def run(new: int) -> float:
        began = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0,
            cache_implementation="static",
        )  # fmt: skip
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for _ in range(2):
        run(tokens)
    times = [1e3 * (run(2 * tokens) - run(tokens)) / tokens for _ in range(3)]
    return {
        "kind": "baseline",
        "case": "transformers generate, static cache, compiled",
        "lanes": 1,
        "milliseconds": statistics.median(times),
    }


def guarded(name: str, do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``do`` found, or why it could not: one case that fails must not cost the others their figures."""
    try:
        return do()
    except Exception as error:  # noqa: BLE001
        return {"kind": "failed", "case": name, "error": f"{type(error).__name__}: {error}"[:2000]}


def run(options: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> bool:
    """Measure everything; False if something failed."""
    target, draft = write_configs(Path(options.configs))
    bandwidth = copy_bandwidth(options.device, 2.0 if options.device == "cuda" else 0.05)
    write({"kind": "bandwidth", "bytes_per_second": bandwidth})
    began, networks, sound = time.perf_counter(), None, True

    def late() -> bool:
        return time.perf_counter() - began > options.seconds

    def put(row: dict[str, Any]) -> None:
        nonlocal sound
        sound &= row["kind"] != "failed"
        write(row)

    benches: dict[str, Bench] = {}
    for case in cases(options.buckets):
        if late():
            put({"kind": "failed", "case": case.name, "lanes": case.lanes, "error": f"not run: {options.seconds} seconds were over"})
            continue

        def one(case: Case = case) -> dict[str, Any]:
            nonlocal networks
            bench = Bench(case, target, draft, device=options.device, runtime=options.runtime, networks=networks)
            networks = bench.networks
            if case.lanes == 1 and not case.keys:
                benches[case.name] = bench
            return record(bench, bandwidth, options.each)

        put(guarded(case.name, one))
        if case.name in ("none", "tree (5,4,8)") and case.lanes == 1 and case.name in benches and options.device == "cuda":
            put(guarded(f"anatomy of {case.name}", lambda name=case.name: anatomy(benches[name])))
        gc.collect()
    if "tree (5,4,8)" in benches and not late():
        deep = benches["tree (5,4,8)"]
        put(guarded("stages", lambda: {"kind": "stages", "case": deep.case.name, "milliseconds": deep.stage_milliseconds()}))

        def step() -> dict[str, Any]:
            shorter = Bench(
                Case("tree (3,4,8)", CycleShape(3, 4, 8)), target, draft, device=options.device, runtime=options.runtime, networks=networks
            )
            return draft_step(deep, shorter)

        put(guarded("draft step", step))
    if "none" in benches and not late():
        put(guarded("compiled static cache", lambda: static_loop(benches["none"], options.each)))
    benches.clear()
    networks = None
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    if not late():
        put(guarded("transformers", lambda: transformers_generate(target, 2048, options.device)))
    return sound


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: every case gave a figure."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu.latency", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "results", help="folder of the result file (default: perf/results)")
    parser.add_argument("--buckets", type=int, nargs="*", default=list(BUCKETS), help="batch sizes")
    parser.add_argument("--seconds", type=float, default=330.0, help="begin no further case after this time (default: 330)")
    parser.add_argument("--each", type=float, default=1.5, help="seconds of measurement per case (default: 1.5)")
    parser.add_argument("--runtime", default="captured", help="preset of the runtime (default: captured)")
    parser.add_argument("--device", default="cuda", help="cuda; on cpu nothing here means anything")
    parser.add_argument("--unverified", action="store_true", help="the checks of this run were not all green: say so in the file")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was run, nothing is claimed")
        return 0
    rows: list[dict[str, Any]] = [{**provenance(), "verified": not options.unverified}]
    file = result_file(options.out, "gpu-latency")

    def write(row: dict[str, Any]) -> None:
        rows.append(row)
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items() if not isinstance(v, (list, dict))}
        print(shown, flush=True)
        # Written as it comes: a run that is cut short keeps what it has.
        write_jsonl(file, rows)

    with tempfile.TemporaryDirectory() as folder:
        options.configs = folder
        sound = run(options, write)
    print(f"written to {file}")
    return 0 if sound else 1


if __name__ == "__main__":
    raise SystemExit(main())

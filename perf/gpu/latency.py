"""Latency on a GPU: ``python -m perf.gpu.latency``.

Measures copy bandwidth; cycle time of a Llama-3.1-8B-shaped target with an EAGLE-3-shaped head, plain and drafting, by bucket, and of
JetSpec's block drafter over a Qwen3-8B-shaped one; stages, graph nodes and gaps of one case; host time per cycle; and at batch 1 the time
per token of HF transformers' compiled static cache and of the shortest compiled loop. Figures are medians, compared with the bytes that
must move at the bandwidth measured in the same run. Writes one JSONL file into the folder of ``--out``, row by row. Acceptance is synthetic
in every drafting row, and the row says so.

``--groups`` selects: ``rows`` are those of README; ``nodes`` comes last, because once the profiler has run, every launch costs a little
more. When CUDA becomes unusable in the process, it ends with a special exit code; another call with the same ``--file`` resumes after the
case that caused it. Whether the checks of this code were green is not considered here: README's section is written from both.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graphspec.lab.measure.machine import copy_bandwidth, measure
from graphspec.lab.measure.provenance import ROOT, provenance, result_file, write_jsonl
from graphspec.lab.measure.stages import kernel_timeline
from graphspec.shapes import CycleShape
from perf.gpu.bench import JETSPEC_8B, QWEN3_8B, Bench, Case, write_configs
from perf.gpu.results import read, tree_digest
from perf.gpu.static_decode import compiled_step, require_graph, skipped_graphs

PLAIN, CHAIN, TREE, WIDE_TREE = CycleShape(0, 1, 1), CycleShape(7, 1, 8), CycleShape(5, 4, 8), CycleShape(5, 4, 32)
SHAPES = {"none": PLAIN, "chain (7,1,8)": CHAIN, "tree (5,4,8)": TREE, "tree (5,4,32)": WIDE_TREE}
BUCKETS = (1, 2, 4, 8, 16, 32)
VARIANTS_AT_ONE: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = (
    ("compiled", (("mode", "compiled"),)),
    ("fast", (("numerics", "fast"),)),
    ("programmatic_launch", (("programmatic_launch", True),)),
)
"""Other kernels at batch 1, next to the fused ones: keys of the kernels group."""
PARALLEL = tuple(
    Case(f"jetspec ({depth},7,{nodes})", CycleShape(depth, 7, nodes, "marginals"), length=length, variant="dflash")
    for nodes in (64, 128)
    for depth, length in ((8, 4.88), (16, 9.56))
)
"""JetSpec's block drafter over Qwen3-8B, at the lengths it publishes (arXiv 2606.18394): MT-Bench 4.88, MATH-500 9.56."""
GROUPS = ("rows", "parallel", "baselines", "buckets", "nodes")
SHORTER = Case("tree (3,4,8)", CycleShape(3, 4, 8))
"""Compared with the tree of depth 5 for the cost of a draft step."""
NODES, NODES_SECONDS = "nodes of ", 25.0
"""Prefix of tasks that use the profiler, which come last, and the seconds that are reserved for them."""
AGAIN = 75
"""Exit code: CUDA is unusable in this process, and there is more to measure."""


def other_cases(buckets: Sequence[int]) -> Iterator[Case]:
    """Other kernels at batch 1, then the buckets, largest last."""
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
    length = bench.accepted_length()
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
        "numerics": bench.plan.numerics,
    }


def cycle_nodes(bench: Bench) -> dict[str, Any]:
    """Nodes of one replayed cycle, the time they run, and the gaps between them, from the profiler."""
    found = kernel_timeline(bench.cycle.programs[bench.key], bench.rewind)
    return {
        "kind": "nodes",
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
    """Cost of one more draft step: the difference of two cycles that differ only in depth."""
    deep, shallow = bench.milliseconds(1.0), shorter.milliseconds(1.0)
    steps = bench.case.shape.num_steps - shorter.case.shape.num_steps
    return {"kind": "draft_step", "case": bench.case.name, "milliseconds": (deep["median"] - shallow["median"]) / steps, "synthetic": True}


def static_loop(bench: Bench, seconds: float) -> dict[str, Any]:
    """The shortest compiled loop over the target of ``bench``, at its context."""
    skipped = skipped_graphs()
    step, cache, _ = compiled_step(bench.networks[0], bench.case.context + 1024)

    def rewind() -> None:
        cache.position_BT.fill_(bench.case.context)

    found = measure(step, rewind, 200, bench.plan.device, seconds, 1.0)
    if bench.plan.device == "cuda":
        require_graph(skipped)
    return {"kind": "baseline", "case": "compiled static cache (gpt-fast style)", "lanes": 1, "milliseconds": found["median"], **found}


def transformers_generate(folder: Path, context: int, device: str, tokens: int = 64) -> dict[str, Any]:
    """HF transformers with a compiled static cache, on random weights of the same config: milliseconds per token, without prefill."""
    from transformers import AutoConfig, AutoModelForCausalLM

    skipped = skipped_graphs()
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
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

    # The longer one first: its cache then serves both, and nothing is compiled while it is measured.
    for new in (2 * tokens, tokens, 2 * tokens):
        run(new)
    times = [1e3 * (run(2 * tokens) - run(tokens)) / tokens for _ in range(3)]
    return {
        "kind": "baseline",
        "case": "transformers generate, static cache, compiled",
        "lanes": 1,
        "milliseconds": statistics.median(times),
        # transformers chooses how it decodes; if it used no graphs, the row says so.
        "skipped_graphs": skipped_graphs() - skipped,
    }


def unusable() -> bool:
    """Whether CUDA is unusable in this process."""
    try:
        torch.cuda.synchronize()
        torch.ones(1, device="cuda").item()
    except Exception:  # noqa: BLE001 - of any kind
        return True
    return False


@dataclass
class Session:
    """State that the tasks of a run share.

    Attributes:
        options: of the command line.
        configs: folders of target and draft, by variant.
        bandwidth: bytes per second, measured in this run.
        put: called with each row.
        networks: made once, used by every case of one variant.
        variant: of ``networks``.
        benches: engines that several tasks use: batch 1, default kernels.
    """

    options: argparse.Namespace
    configs: Mapping[str, tuple[Path, Path]]
    bandwidth: float
    put: Callable[[dict[str, Any]], None]
    networks: Any = None
    variant: str = ""
    benches: dict[str, Bench] = field(default_factory=dict)

    def bench(self, case: Case) -> Bench:
        """An engine for ``case``; one that other tasks use is kept."""
        if case.name in self.benches and case == self.benches[case.name].case:
            return self.benches[case.name]
        if case.variant != self.variant:
            self.forget()
            self.variant = case.variant
        bench = Bench(case, *self.configs[case.variant], device=self.options.device, runtime=self.options.runtime, networks=self.networks)
        self.networks = bench.networks
        if case.lanes == 1 and not case.keys:
            self.benches[case.name] = bench
        return bench

    def cycle(self, case: Case) -> dict[str, Any]:
        return record(self.bench(case), self.bandwidth, self.options.each)

    def nodes(self, case: Case) -> dict[str, Any]:
        return cycle_nodes(self.bench(case))

    def draft_step(self) -> dict[str, Any]:
        return draft_step(self.bench(Case("tree (5,4,8)", TREE)), self.bench(SHORTER))

    def stages(self) -> dict[str, Any]:
        bench = self.bench(Case("tree (5,4,8)", TREE))
        return {"kind": "stages", "case": bench.case.name, "milliseconds": bench.stage_milliseconds()}

    def static_loop(self) -> dict[str, Any]:
        return static_loop(self.bench(Case("none", PLAIN)), self.options.each)

    def forget(self) -> None:
        """Release the engines and networks, to make room for another model."""
        self.benches.clear()
        self.networks = None
        gc.collect()
        if self.options.device == "cuda":
            torch.cuda.empty_cache()

    def transformers(self) -> dict[str, Any]:
        self.forget()
        return transformers_generate(self.configs["eagle3"][0], 2048, self.options.device)


def tasks(session: Session) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The tasks by name, in order."""
    groups = session.options.groups
    plain = [Case(name, shape) for name, shape in SHAPES.items()]
    if "rows" in groups:
        for case in plain:
            yield f"{case.name} x1", partial(session.cycle, case)
        yield "draft step", session.draft_step
    if "parallel" in groups:
        for case in PARALLEL:
            yield f"{case.name} x1", partial(session.cycle, case)
    if "baselines" in groups:
        # The first sets other kernels in the networks, the second releases them for a model of its own; later engines restore both.
        yield "compiled static cache", session.static_loop
        yield "transformers", session.transformers
    if "buckets" in groups:
        for case in other_cases(session.options.buckets):
            yield f"{case.name} x{case.lanes}", partial(session.cycle, case)
    if "nodes" in groups:
        yield "stages", session.stages
        for case in plain if session.options.device == "cuda" else ():
            if case.shape in (PLAIN, TREE):
                yield f"{NODES}{case.name}", partial(session.nodes, case)


def run(session: Session, done: Mapping[str, str]) -> bool:
    """Measure everything; False if something failed.

    Args:
        session: of the run.
        done: tasks of an earlier attempt and their outcomes; they are not run again.

    Raises:
        SystemExit: CUDA is unusable in this process, and there is more to measure (code :data:`AGAIN`).
    """
    began, sound, options = time.perf_counter(), not {"failed", "not_run"} & set(done.values()), session.options
    for name, do in tasks(session):
        if name in done or not any(part in name for part in options.match or [""]):
            continue
        kept = 0.0 if name.startswith(NODES) or "nodes" not in options.groups else NODES_SECONDS
        if time.perf_counter() - began > options.seconds - kept:
            session.put({"kind": "not_run", "task": name, "error": f"{options.seconds:.0f} seconds were over"})
            sound = False
            continue
        session.put({"kind": "begun", "task": name})
        started = time.perf_counter()
        try:
            row = do()
        except Exception as error:  # noqa: BLE001 - one case that fails must not cost the others their figures
            row = {"kind": "failed", "case": name, "error": f"{type(error).__name__}: {error}"[:2000]}
            sound = False
        session.put({**row, "task": name, "seconds": round(time.perf_counter() - started, 1)})
        gc.collect()
        if row["kind"] == "failed" and options.device == "cuda" and unusable():
            raise SystemExit(AGAIN)
    return sound


def line(row: Mapping[str, Any]) -> str:
    """A row for people."""
    kind, took = row["kind"], f"{row.get('seconds', 0):5.0f} s"
    if kind == "cycle":
        figures = f"{row['milliseconds']:.3f} ms, {row['percent_of_floor']:.0f} % of the floor, host {row['host_microseconds']:.0f} us"
        return f"{took}  {row['task']:36} {figures}"
    if kind == "bandwidth":
        return f"bandwidth {row['bytes_per_second'] / 1e12:.2f} TB/s"
    if kind == "not_run":
        return f"         {row['task']:36} not run: {row['error']}"
    if kind == "failed":
        return f"{took}  {row['task']:36} failed: {str(row['error']).splitlines()[0][:160]}"
    if kind == "nodes":
        figures = f"{row['nodes']} nodes, busy {row['busy_milliseconds']:.3f} ms, gaps {row['gap_milliseconds']:.3f} ms"
        return f"{took}  {row['task']:36} {figures}"
    if kind == "stages":
        return f"{took}  {row['task']:36} " + ", ".join(f"{name} {ms:.3f}" for name, ms in row["milliseconds"].items())
    return f"{took}  {row['task']:36} {row['milliseconds']:.3f} ms"


def interrupted_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of an attempt that ended early; the task that was started and has no row ended it, and counts as failed."""
    if not file.is_file():
        return []
    rows = read(file)
    over = {row["task"] for row in rows if row["kind"] != "begun" and "task" in row}
    lost = [row["task"] for row in rows if row["kind"] == "begun" and row["task"] not in over]
    kept = [row for row in rows if row["kind"] != "begun"]
    return kept + [{"kind": "failed", "task": name, "case": name, "error": "the process ended in it"} for name in lost]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit code 0: every case gave a figure; :data:`AGAIN`: call again with the same ``--file``."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu.latency", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "results", help="folder of the result file (default: perf/results)")
    parser.add_argument("--file", type=Path, help="the result file; one that is there is gone on with")
    parser.add_argument("--without", nargs="+", metavar="TASK", default=[], help="tasks that are not measured, by their whole names")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="what to measure (default: everything)")
    parser.add_argument("--buckets", type=int, nargs="*", default=list(BUCKETS), help="batch sizes")
    parser.add_argument("--seconds", type=float, default=500.0, help="begin no further case after this time (default: 500)")
    parser.add_argument("--match", nargs="+", metavar="TEXT", help="only tasks with one of these in their names")
    parser.add_argument("--each", type=float, default=1.0, help="seconds of measurement per case (default: 1.0)")
    parser.add_argument("--runtime", default="captured", help="preset of the runtime (default: captured)")
    parser.add_argument("--device", default="cuda", help="cuda; on cpu nothing here means anything")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was run, nothing is claimed")
        return 0
    file = options.file or result_file(options.out, "gpu-latency")
    rows = interrupted_rows(file) or [{**provenance(), "tree": tree_digest()}]
    done = {row["task"]: row["kind"] for row in rows if "task" in row} | dict.fromkeys(options.without, "cycle")

    def put(row: dict[str, Any]) -> None:
        # Written at once, so that an interrupted run keeps its rows. That a task was started matters only until its row is written.
        rows[:] = [one for one in rows if one["kind"] != "begun"] + [row]
        write_jsonl(file, rows)
        if row["kind"] != "begun":
            print(line(row), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        bandwidth = next((row["bytes_per_second"] for row in rows if row["kind"] == "bandwidth"), None)
        if bandwidth is None:
            bandwidth = copy_bandwidth(options.device, 2.0 if options.device == "cuda" else 0.05)
            put({"kind": "bandwidth", "bytes_per_second": bandwidth})
        models = {"eagle3": write_configs(Path(folder)), "dflash": write_configs(Path(folder) / "jetspec", QWEN3_8B, JETSPEC_8B)}
        sound = run(Session(options, models, bandwidth, put), done)
    print(f"written to {file}")
    return 0 if sound else 1


if __name__ == "__main__":
    raise SystemExit(main())

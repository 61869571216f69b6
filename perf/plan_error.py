"""Error of ``graphspec plan plan.measure=true`` on this CPU: ``python -m perf.plan_error``.

Engines of the demo model are built for the few shapes whose whole cycles a calibration times, and for others. In every round the passes are
timed and each engine serves the same requests, so that a slow phase of the machine affects all of them; of every figure the smallest of all
rounds is used. Every cycle that the calibration did not time is then predicted and compared.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from graphspec.api.llm import LLM
from graphspec.config.catalog import resolve_variant
from graphspec.config.compose import load_config
from graphspec.lab.floor import FloorModel, Hardware
from graphspec.lab.measure.machine import copy_bandwidth
from graphspec.lab.measure.provenance import ROOT, provenance, result_file, within_repository, write_jsonl
from graphspec.lab.predict.advice import Outlook
from graphspec.lab.predict.calibration import engine_of, time_cycle, time_passes, timed_shapes
from graphspec.lab.predict.command import spell
from graphspec.lab.predict.model_pair import read_model_pair
from graphspec.lab.predict.passes import Curve, PassTimes, TimedCycle
from graphspec.lab.predict.plan import device_and_dtype
from graphspec.shapes import PLAIN, CycleShape

SHAPES = (
    "0,1,1", "1,1,2", "2,1,3", "3,1,4", "4,1,5", "6,1,7", "2,4,8", "3,2,6", "3,4,12", "4,2,8", "4,4,16", "5,4,16", "5,4,32",
)  # fmt: skip


def minimum(curves: Sequence[Curve]) -> Curve:
    """The same points, each with its smallest time over some measurements: disturbances only make a measurement longer."""
    points = zip(*(curve.times for curve in curves), strict=True)
    return replace(curves[0], times=tuple(tuple(min(times) for times in zip(*rows, strict=True)) for rows in points))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print predicted next to measured, write the records to ``perf/results``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="eagle3")
    parser.add_argument("--shapes", nargs="*", default=SHAPES, help="num_steps,topk,num_draft_tokens")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "results", help="folder of the result file")
    args = parser.parse_args(argv)
    config, variant = load_config("hardware=cpu", f"variant={args.variant}"), resolve_variant(args.variant)
    pair = read_model_pair(config.model.path, config.variant, variant, None)
    _, dtype = device_and_dtype(config, pair)
    model = FloorModel.of(pair.target, pair.draft, dtype, variant, None, pair.from_config)
    timed = {(shape, batch) for shape, batches in timed_shapes(variant, model) for batch in batches}
    shapes = [tuple(map(int, shape.split(","))) for shape in args.shapes]
    checked = [(CycleShape(*shape, variant.auto_shape.pool) if shape[0] else PLAIN, batch) for shape in shapes for batch in args.batches]
    cases = [*timed, *(case for case in checked if case not in timed)]
    engines: dict[tuple[CycleShape, int], LLM] = {}
    for shape, batch in cases:
        engines[shape, batch] = LLM.from_config(engine_of(config, shape, [batch]))
        time_cycle(engines[shape, batch], shape, batch, runs=1)  # compiles
        print(f"built {len(engines)} of {len(cases)}: {spell(shape)}, batch {batch}", flush=True)
    passes = max(timed, key=lambda case: (case[1], case[0].num_steps, case[0].topk))
    curves: list[dict[str, Curve]] = []
    cycles: dict[tuple[CycleShape, int], list[TimedCycle]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        curves.append(time_passes(engines[passes]))
        for (shape, batch), llm in engines.items():
            cycles[shape, batch].append(time_cycle(llm, shape, batch, runs=1))
    found = {case: min(some, key=lambda cycle: cycle.ms) for case, some in cycles.items()}
    middle = {name: minimum([some[name] for some in curves]) for name in curves[0]}
    times = PassTimes.fit(
        model, middle, [found[case] for case in timed], copy_bandwidth("cpu", working_set=model.working_set(PLAIN, 1, 64)), "measured now"
    )
    records = []
    for case in cases:
        cycle = found[case]
        ms = Outlook(model, cycle.context, Hardware(times.bandwidth), times).predict(cycle.shape, cycle.batch).cycle_ms
        records.append({
            "kind": "prediction", "stage": None, "case": "calibration" if case in timed else "check", "shape": cycle.shape.numbers,
            "batch": cycle.batch, "context": cycle.context, "predicted_ms": ms, "measured_ms": cycle.ms, "error": ms / cycle.ms - 1,
        })  # fmt: skip
        name = f"{records[-1]['case']:12}{spell(cycle.shape):>12}, batch {cycle.batch}"
        print(f"{name}: {ms:.3f} ms predicted, {cycle.ms:.3f} measured, {ms / cycle.ms - 1:+.1%}")
    errors = [abs(float(record["error"])) for record in records if record["case"] == "check"]
    summary = {
        "kind": "plan_error",
        "median": statistics.median(errors),
        "largest": max(errors),
        "cycles": len(errors),
        "passes": times.record(),
    }
    print(f"median error {summary['median']:.1%}, largest {summary['largest']:.1%}, over {len(errors)} cycles that were not timed before")
    settings = {"kind": "settings", **vars(args), "out": within_repository(args.out)}
    write_jsonl(result_file(args.out, "plan-error"), [provenance(config), settings, summary, *records])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

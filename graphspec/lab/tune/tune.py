"""``graphspec tune``: runs a short list of shapes on the real models and chooses the configuration to write. Imports no torch.

Every candidate runs together with plain decoding, in separate processes that take turns round by round, for every batch size; a candidate
whose tokens are not those of plain decoding is rejected. The chosen configuration is run once more as it will be loaded, adaptive depths
included.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...config.catalog import resolve_variant
from ...config.command_options import LaunchConfig
from ...config.schema import AdaptiveConfig, Config
from ...errors import ResourceError
from ..measure.compare import Bench, Measured, Say, records, set_verdicts
from ..measure.metrics import figures, ratio
from ..measure.process import WorkerProcess
from ..measure.sides import PLAIN, SUBJECT, SideConfig, plain_config
from .choice import Choice, Outcome, Shape, backlog_for, choose, cycle_times, first_depths, mean_shares, shallower_depths

WRITTEN = "what is written"
"""Prefix of the cases that run the configuration to be written."""


@dataclass(slots=True)
class Tuning:
    """All measurements and conclusions.

    Attributes:
        prospects: rows of :func:`graphspec.lab.tune.short_list.short_list`.
        plain: batch size to tokens per second of plain decoding, in the run of the candidates.
        final: batch size to the outcome of ``config``; empty where that is plain decoding.
    """

    prospects: list[dict[str, Any]]
    outcomes: list[Outcome] = field(default_factory=list)
    plain: dict[int, float] = field(default_factory=dict)
    choice: Choice | None = None
    config: Config = field(default_factory=Config)
    final: dict[int, Outcome] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    head: dict[str, Any] = field(default_factory=dict)


def tune(config: LaunchConfig, batches: Sequence[int], say: Say = lambda text: None) -> Tuning:
    """Measure the short list at every batch size and conclude."""
    plain_runtime = replace(config.runtime, depth_per_bucket={})
    base = replace(config, adaptive=AdaptiveConfig(backlog=config.adaptive.backlog), runtime=plain_runtime)
    short_list = "graphspec.lab.tune.short_list"
    with WorkerProcess("short list", config.profile.timeout_seconds) as worker:
        tried = worker.ask("call", function=f"{short_list}:tried_shapes", config=base)
        trial = _try(base, [tuple(shape) for shape in tried], batches[0], say) if tried else []
        say("choosing a short list")
        listed = worker.ask("call", function=f"{short_list}:short_list", config=base, batches=list(batches), trial=trial)
    tuning = Tuning(listed["prospects"], rows=trial)
    shapes: list[Shape] = [tuple(prospect["shape"]) for prospect in tuning.prospects]
    for batch in batches:
        _measure(tuning, [base.with_shape(shape) for shape in shapes], batch, f"candidates, batch {batch}", say, final=False)
    if not tuning.outcomes:
        raise ResourceError("tune", "a candidate with the tokens of plain decoding", "none: " + ", ".join(tuning.wrong))
    tuning.choice = choose(tuning.outcomes, adapts=_adapts(base, listed))
    tuning.config = conclude(base, tuning, listed, batches, say)
    if tuning.choice.shape is not None:
        written = replace(base, variant=tuning.config.variant, runtime=tuning.config.runtime, adaptive=tuning.config.adaptive)
        for batch in batches:
            _measure(tuning, [written], batch, f"{WRITTEN}, batch {batch}", say, final=True)
    return tuning


TRIED_REQUESTS = 4
"""Requests of the workload that a trial runs."""


def _try(config: LaunchConfig, shapes: Sequence[Shape], batch: int, say: Say) -> list[dict[str, Any]]:
    """Measure acceptance and stage times: some shapes and plain decoding, one after the other, with every stage timed."""
    requests = max(batch, min(TRIED_REQUESTS, config.workload.requests))
    options = replace(config.profile, rounds=1, warm_up_seconds=0.0, interleave=False, stages=True, generations=0, trace=None)
    trial = replace(config, workload=replace(config.workload, batch=batch, requests=requests), profile=options)
    sides = [SideConfig(SUBJECT, trial.with_shape(shape)) for shape in shapes]
    measured = Bench(options, lambda text: say(f"trial: {text}")).measure([*sides, SideConfig(PLAIN, plain_config(trial))])
    set_verdicts(measured, None)
    return records(f"trial, batch {batch}", measured)


def _measure(tuning: Tuning, configs: Sequence[LaunchConfig], batch: int, case: str, say: Say, *, final: bool) -> None:
    """Measure some engines and plain decoding at one batch size."""
    options, workload = replace(configs[0].profile, rounds=configs[0].tune.rounds), configs[0].workload
    workload = replace(workload, batch=batch, requests=max(workload.requests, batch))
    bench = Bench(options, lambda text: say(f"{case}: {text}"), look_inside=False)
    sides = [SideConfig(SUBJECT, replace(config, workload=workload)) for config in configs]
    measured = bench.measure([*sides, SideConfig(PLAIN, plain_config(sides[0].config))])
    set_verdicts(measured, None)
    plain = measured[-1]
    for one in measured[:-1]:
        if final:
            one.about["label"] += ", as written"
        if one.verdict.equal is False:
            tuning.wrong.append(f"{one.label} at batch {batch}")
        elif final:
            tuning.final[batch] = outcome(one, plain, batch)
        else:
            tuning.outcomes.append(outcome(one, plain, batch))
    if not final:
        tuning.plain[batch] = statistics.median(one.tokens_per_second for one in plain.rounds)
    tuning.rows += records(case, measured)
    tuning.head = tuning.head or measured[0].about["provenance"]


def outcome(one: Measured, plain: Measured, batch: int) -> Outcome:
    """The figures of a side that :func:`choose` uses."""
    found = figures(one.rounds)
    shares: list[float] = []
    for share in found["acceptance_conditional"]:
        if share is None:
            break
        shares.append(share)
    shape: Shape = tuple(one.about["shape"])
    speed, against = found["tokens_per_second"]["median"], ratio(one.rounds, plain.rounds)["median"]
    cycle, plain_cycle = (gaps["p50"] if gaps is not None else None for gaps in (found["itl_ms"], figures(plain.rounds)["itl_ms"]))
    return Outcome(shape, batch, speed, against, found["acceptance_length"], tuple(shares), cycle, plain_cycle)


def conclude(base: LaunchConfig, tuning: Tuning, listed: dict[str, Any], batches: Sequence[int], say: Say) -> Config:
    """The configuration to write: the chosen shape, and depths by bucket where the drafter can change its depth."""
    assert tuning.choice is not None
    shape = tuning.choice.shape
    if shape is None:
        return plain_config(base)
    rows = max(batches[-1], base.runtime.max_rows)
    buckets = sorted({*base.runtime.buckets, *batches})
    config = replace(base, runtime=replace(base.runtime, max_rows=rows, buckets=buckets)).with_shape(shape)
    if not _adapts(base, listed):
        return config
    depths = shallower_depths(shape[0])
    backlog = min(base.adaptive.backlog, listed["backlog"])
    # Only buckets that the batch sizes need: each depth of each bucket is one more program to compile.
    workload = replace(config.workload, batch=max(batches))
    adapting = replace(config, adaptive=AdaptiveConfig(depths=depths, backlog=backlog), workload=workload)
    say("timing cycles of every depth")
    with WorkerProcess("depths", config.profile.timeout_seconds, say) as worker:
        worker.ask("prepare", role=SUBJECT, config=adapting, command=[], like=None)
        timed = worker.ask("depth_times")
    programs: dict[int, dict[int, float]] = {}
    for bucket, depth, seconds in timed:
        programs.setdefault(bucket, {})[depth] = 1e3 * seconds
    measured = [found for found in tuning.outcomes if found.shape == shape]
    times = cycle_times(programs, measured)
    shares = [round(share, 4) for share in mean_shares(measured)]
    first = first_depths(times, shares, {found.batch: found.ratio for found in measured})
    first |= {bucket: first[max(first)] for bucket in config.runtime.buckets if first and bucket > max(first)}
    shallow = {bucket: depth for bucket, depth in first.items() if depth != shape[0]}
    runtime = replace(config.runtime, depth_per_bucket=shallow)
    backlog = max(backlog, backlog_for(times, listed["backlog"]))
    if not config.tune.adaptive:
        depths, times, shares = [], {}, []
        if 0 not in shallow.values():
            backlog = base.adaptive.backlog
    return replace(config, runtime=runtime, adaptive=AdaptiveConfig(depths=depths, backlog=backlog, times=times, rates=shares))


def _adapts(base: LaunchConfig, listed: dict[str, Any]) -> bool:
    """Whether the drafter can change its depth."""
    return listed["heads"] == 1 and resolve_variant(base.variant.name).drafter in ("network", "history", "host")

"""``graphspec tune``: run a short list of shapes on the real models, write the best one as an experiment. Imports no torch.

Every candidate runs beside plain decoding, in processes of their own that take turns round by round, for every batch size; a candidate
whose tokens are not those of plain decoding is out. What is written is run once more as it will be loaded, depths that adapt included.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ...catalog import resolve_variant
from ...command_options import LaunchConfig
from ...config import AdaptiveConfig, Config
from ...errors import ConfigError, ResourceError
from ...paths import check_writable
from ..measure.compare import Bench, Measured, Say, Schedule, pass_judgement, records
from ..measure.metrics import figures, ratio
from ..measure.process import WorkerProcess, pack
from ..measure.provenance import result_file, write_jsonl
from ..measure.sides import PLAIN, SUBJECT, Side, plain_config
from .choice import Choice, Outcome, Shape, backlog_for, choose, cycle_times, first_depths, mean_shares, shallower_depths
from .experiment import write_experiment
from .tables import caution, comment, spell_rule, table

OUT = "tuned.yaml"
SMALLEST_RATIO = 0.97
"""What is written shall never be slower than this share of plain decoding; where it is, that is said."""


@dataclass(slots=True)
class Tuning:
    """All that was measured and concluded.

    Attributes:
        prospects: rows of :func:`graphspec.lab.tune.tune.short_list.short_list`.
        outcomes: of the candidates whose tokens were right.
        plain: batch size to tokens per second of plain decoding, in the run of the candidates.
        choice: what follows.
        config: what is written.
        final: batch size to what ``config`` did; empty where that is plain decoding.
        wrong: sides whose tokens were not those of plain decoding.
        rows: records of kind ``side``.
        head: where they come from.
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


def run(config: LaunchConfig) -> int:
    """Measure, write the experiment and a result file, print a table (or one JSON document).

    Returns:
        1 when what was to be written gave wrong tokens, and nothing was written; else 0.

    Raises:
        ConfigError: there is nothing to tune, tokens can't be compared, or a file can't be written.
        ResourceError: no candidate gave the right tokens.
        GraphspecError: a side refused, died or took too long.
    """
    batches = check(config)
    file = check_writable("tune.out", config.tune.out or OUT)
    folder = check_writable("results", config.results, folder=True)
    err = Console(stderr=True)
    if err.is_terminal:
        with err.status("") as status:
            tuning = tune(config, batches, status.update)
    else:
        tuning = tune(config, batches)
    right = all(row["equal"] is not False for row in tuning.rows if row["role"] != PLAIN and row["case"].startswith(WRITTEN))
    summary = summarise(tuning, file if right else None)
    results = result_file(folder, "tune")
    write_jsonl(results, [tuning.head, *tuning.rows, summary])
    if right:
        write_experiment(file, tuning.config, comment(config, tuning, file))
    if config.format == "json":
        print(json.dumps({"file": str(results), "tuned": summary, "records": tuning.rows}, default=str))
        return 0 if right else 1
    console = Console()
    console.print(table(tuning))
    for label in tuning.wrong:
        console.print(Text(f"{label}: its tokens are not those of plain decoding"), soft_wrap=True)
    if (busy := caution(tuning)) is not None:
        console.print(Text(busy), soft_wrap=True)
    for batch in summary["slower_than_plain"]:
        slower = f"batch {batch}: what is written had {tuning.final[batch].ratio:.2f} times the speed of plain decoding"
        console.print(Text(slower), soft_wrap=True)
    console.print(Text(f"measurements written to {results}"), soft_wrap=True)
    told = f"experiment written to {file}: graphspec generate experiment={file}" if right else "no experiment was written"
    console.print(Text(told), soft_wrap=True)
    return 0 if right else 1


def check(config: LaunchConfig) -> list[int]:
    """Refuse what can't be tuned; returns the batch sizes.

    Raises:
        ConfigError: a variant without drafts, a static tree, forced or lossy acceptance.
    """
    variant = resolve_variant(config.variant.name)
    if not variant.speculates:
        raise ConfigError("variant", "one that drafts: there is nothing to tune without", variant.name)
    if config.variant.tree_choices is not None:
        raise ConfigError("variant.tree_choices", "null: a static tree leaves nothing to choose", config.variant.tree_choices)
    accept = config.accept
    lossy = accept.threshold_single < 1 or accept.threshold_acc < 1
    if accept.synthetic_length is not None or accept.synthetic_rates is not None or lossy:
        raise ConfigError("accept", "a rule that keeps the target's distribution, so that output can be checked", accept.rule)
    runtime = config.runtime
    return list(config.tune.batches or [bucket for bucket in runtime.buckets if bucket <= runtime.max_rows] or runtime.buckets[:1])


def tune(config: LaunchConfig, batches: Sequence[int], say: Say = lambda text: None) -> Tuning:
    """Measure the short list at every batch size and conclude."""
    plain_runtime = replace(config.runtime, depth_per_bucket={})
    base = replace(config, adaptive=AdaptiveConfig(backlog=config.adaptive.backlog), runtime=plain_runtime)
    with WorkerProcess("short list", config.profile.timeout_seconds) as worker:
        tried = worker.ask("tried", config=pack(base))
        trial = _try(base, [tuple(shape) for shape in tried], batches[0], say) if tried else []
        say("choosing a short list")
        listed = worker.ask("short_list", config=pack(base), batches=list(batches), trial=trial)
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


WRITTEN = "what is written"
TRIED_REQUESTS = 4
"""Requests of the workload that a trial runs."""


def _try(config: LaunchConfig, shapes: Sequence[Shape], batch: int, say: Say) -> list[dict[str, Any]]:
    """What the draft is worth and what stages cost: some shapes and plain decoding, one after the other, with every stage timed."""
    requests = max(batch, min(TRIED_REQUESTS, config.workload.requests))
    asked = replace(
        config,
        workload=replace(config.workload, batch=batch, requests=requests),
        profile=replace(config.profile, stages=True),
    )
    sides = [Side(SUBJECT, asked.with_shape(shape)) for shape in shapes]
    schedule = Schedule(1, 0.0, interleave=False, timeout_seconds=config.profile.timeout_seconds, anatomy=True)
    measured = Bench(schedule, lambda text: say(f"trial: {text}")).measure([*sides, Side(PLAIN, plain_config(asked))])
    pass_judgement(measured, None)
    return records(f"trial, batch {batch}", measured)


def _measure(tuning: Tuning, configs: Sequence[LaunchConfig], batch: int, case: str, say: Say, *, final: bool) -> None:
    """Run some engines beside plain decoding at one batch size."""
    profile, asked = configs[0].profile, configs[0].workload
    workload = replace(asked, batch=batch, requests=max(asked.requests, batch))
    bench = Bench(
        Schedule(configs[0].tune.rounds, profile.warm_up_seconds, profile.interleave, profile.timeout_seconds),
        lambda text: say(f"{case}: {text}"),
    )
    sides = [Side(SUBJECT, replace(config, workload=workload)) for config in configs]
    measured = bench.measure([*sides, Side(PLAIN, plain_config(sides[0].config))])
    pass_judgement(measured, None)
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
    """The figures of a side that the choice goes by."""
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
    """The configuration that is written: the chosen shape, and depths by bucket where the drafter can change its depth."""
    assert tuning.choice is not None
    shape = tuning.choice.shape
    if shape is None:
        return plain_config(base)
    rows = max(batches[-1], base.runtime.max_rows)
    config = replace(base, runtime=replace(base.runtime, max_rows=rows, buckets=_buckets(base.runtime.buckets, batches))).with_shape(shape)
    if not _adapts(base, listed):
        return config
    depths = shallower_depths(shape[0])
    backlog = min(base.adaptive.backlog, listed["backlog"])
    # Only buckets that a batch size asked about needs: each depth of each bucket is one more program to compile.
    workload = replace(config.workload, batch=max(batches))
    adapting = replace(config, adaptive=AdaptiveConfig(depths=depths, backlog=backlog), workload=workload)
    say("timing cycles of every depth")
    with WorkerProcess("depths", config.profile.timeout_seconds, say) as worker:
        worker.ask("prepare", role=SUBJECT, config=pack(adapting), command=[], like=None)
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
    """The drafter can change its depth."""
    return listed["heads"] == 1 and resolve_variant(base.variant.name).drafter in ("network", "history")


def _buckets(buckets: Sequence[int], batches: Sequence[int]) -> list[int]:
    """The buckets there are, and one for each batch size that was asked about."""
    return sorted({*buckets, *batches})


def summarise(tuning: Tuning, file: Path | None) -> dict[str, Any]:
    """The record of kind ``tuned``."""
    choice, config = tuning.choice, tuning.config
    assert choice is not None
    batches = [
        {
            "batch": batch,
            "plain_tokens_per_second": plain,
            "fastest": list(fastest) if (fastest := choice.fastest[batch]) is not None else None,
            "ratio": next((found.ratio for found in tuning.outcomes if (found.shape, found.batch) == (choice.shape, batch)), None),
            "written_tokens_per_second": tuning.final[batch].tokens_per_second if batch in tuning.final else None,
            "written_ratio": tuning.final[batch].ratio if batch in tuning.final else None,
        }
        for batch, plain in tuning.plain.items()
    ]
    return {
        "kind": "tuned",
        "experiment": str(file) if file is not None else None,
        "variant": config.variant.name,
        "shape": list(choice.shape) if choice.shape is not None else None,
        "rule": spell_rule(choice),
        "score": choice.score,
        "scores": [{"shape": list(shape), "score": score, "ratio": choice.ratios[shape]} for shape, score in choice.scores.items()],
        "batches": batches,
        "depths": list(config.adaptive.depths),
        "depth_per_bucket": dict(config.runtime.depth_per_bucket),
        "backlog": config.adaptive.backlog,
        "times": {bucket: dict(times) for bucket, times in config.adaptive.times.items()},
        "rates": list(config.adaptive.rates),
        "wrong": tuning.wrong,
        "slower_than_plain": [batch for batch, found in tuning.final.items() if found.ratio < SMALLEST_RATIO],
    }

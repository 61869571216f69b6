"""The ``graphspec tune`` command: checks the configuration, measures, writes the experiment and a result file. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ...config.catalog import resolve_variant
from ...config.command_options import CLOSED, LaunchConfig
from ...config.paths import check_writable
from ...errors import ConfigError
from ...facts.hub import pinned
from ..measure.provenance import result_file, write_jsonl
from ..measure.sides import PLAIN
from .experiment import write_experiment
from .tables import caution, comment, spell_rule, table
from .tune import WRITTEN, Tuning, tune

OUT = "tuned.yaml"
SMALLEST_RATIO = 0.97
"""A written configuration slower than this share of plain decoding is reported."""


def run(config: LaunchConfig) -> int:
    """Measure, write the experiment and a result file, print a table (or one JSON document).

    Returns:
        1 if the configuration to be written gave wrong tokens, so that nothing was written; else 0.

    Raises:
        ConfigError: there is nothing to tune, tokens can't be compared, or a file can't be written.
        ResourceError: no candidate gave the right tokens.
        GraphspecError: a side refused, died or took too long.
    """
    config = pinned(config)
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
        slower = f"batch {batch}: the written configuration had {tuning.final[batch].ratio:.2f} times the speed of plain decoding"
        console.print(Text(slower), soft_wrap=True)
    console.print(Text(f"measurements written to {results}"), soft_wrap=True)
    closing = f"experiment written to {file}: graphspec generate experiment={file}" if right else "no experiment was written"
    console.print(Text(closing), soft_wrap=True)
    return 0 if right else 1


def check(config: LaunchConfig) -> list[int]:
    """Check that the configuration can be tuned; returns the batch sizes.

    Raises:
        ConfigError: a variant without drafts, a static tree, forced or lossy acceptance.
    """
    variant = resolve_variant(config.variant.name)
    if not variant.speculates:
        raise ConfigError("variant", "one that drafts: there is nothing to tune without", variant.name)
    if config.variant.tree_choices is not None:
        raise ConfigError("variant.tree_choices", "null: a static tree leaves nothing to choose", config.variant.tree_choices)
    if config.workload.arrivals != CLOSED:
        raise ConfigError("workload.arrivals", "closed: shapes are compared by tokens per second", config.workload.arrivals)
    accept = config.accept
    lossy = accept.threshold_single < 1 or accept.threshold_acc < 1
    if accept.synthetic_length is not None or accept.synthetic_rates is not None or lossy:
        raise ConfigError("accept", "a rule that keeps the target's distribution, so that output can be checked", accept.rule)
    runtime = config.runtime
    return list(config.tune.batches or [bucket for bucket in runtime.buckets if bucket <= runtime.max_rows] or runtime.buckets[:1])


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

"""The ``graphspec tune`` command: checks the configuration, measures, writes the experiment and a result file, and prints a table.

Imports no torch.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ...config.catalog import resolve_variant
from ...config.command_options import CLOSED, LaunchConfig
from ...config.paths import check_writable
from ...errors import ConfigError
from ...facts.hub import pinned
from ...host import terminal
from ...host.core_wait import busy_caution
from ...host.terminal import say, status
from ..measure.provenance import result_file, write_jsonl
from ..measure.sides import PLAIN
from .experiment import write_experiment
from .tune import WRITTEN, Tuning, tune

if TYPE_CHECKING:
    from rich.table import Table

    from .choice import Choice, Outcome, Shape

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
    with status() as progress:
        tuning = tune(config, batches, progress)
    right = all(row["equal"] is not False for row in tuning.rows if row["role"] != PLAIN and row["case"].startswith(WRITTEN))
    summary = summarise(tuning, file if right else None)
    results = result_file(folder, "tune")
    write_jsonl(results, [tuning.head, *tuning.rows, summary])
    if right:
        write_experiment(file, tuning.config, comment(config, tuning, file))
    if config.format == "json":
        print(json.dumps({"file": str(results), "tuned": summary, "records": tuning.rows}, default=str))
        return 0 if right else 1
    Console().print(table(tuning))
    say(*(f"{label}: its tokens are not those of plain decoding" for label in tuning.wrong))
    if (busy := caution(tuning)) is not None:
        say(busy)
    for batch in summary["slower_than_plain"]:
        say(f"batch {batch}: the written configuration had {tuning.final[batch].ratio:.2f} times the speed of plain decoding")
    say(f"measurements written to {results}")
    say(f"experiment written to {file}: graphspec generate experiment={file}" if right else "no experiment was written")
    return 0 if right else 1


def check(config: LaunchConfig) -> list[int]:
    """Check that the configuration can be tuned; returns the batch sizes."""
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


WIDTH = 110


def spell(shape: Shape | None) -> str:
    """``(5,4,16)``; plain decoding is ``none``."""
    return "none" if shape is None else "({},{},{})".format(*shape)


def spell_rule(choice: Choice) -> str:
    """The criterion of the choice."""
    mean = "highest geometric mean over batch sizes of the median ratio to plain decoding"
    return f"{mean}, below 1 counted as 1: there the engine decodes plainly" if choice.scores != choice.ratios else mean


def spell_choice(choice: Choice) -> str:
    """The shape with its measured ratio, and its score where the engine decodes plainly at some batch size."""
    if choice.shape is None:
        best = max(choice.ratios.values(), default=None)
        return "none: no shape was faster" + (f", the best {best:.2f}x plain decoding over all batch sizes" if best is not None else "")
    text = f"{spell(choice.shape)}, {choice.ratios[choice.shape]:.2f}x plain decoding over all batch sizes"
    if choice.score != choice.ratios[choice.shape]:
        text += f", {choice.score:.2f}x with plain decoding where that is faster"
    return text


def caution(tuning: Tuning) -> str | None:
    """A warning if the machine was busy during part of the run, judged by the side that waited longest for a core; None: it was not."""
    waited: dict[str, float | None] = {}
    for row in tuning.rows:
        case, share = row["case"], row.get("core_wait")
        if share is not None:
            waited[case] = max(share, waited.get(case) or 0.0)
    return busy_caution(waited)


def table(tuning: Tuning) -> Table:
    """Candidates by batch size: tokens per second and ratio to plain decoding; below them the written configuration."""
    choice = tuning.choice
    assert choice is not None
    clamped = choice.scores != choice.ratios
    overall = (choice.ratios, choice.scores) if clamped else (choice.ratios,)
    rows = [("none", "", *(f"{speed:.0f}" for speed in tuning.plain.values()), *("1.00" for _ in overall))]
    for prospect in tuning.prospects:
        shape = tuple(prospect["shape"])
        means = (f"{values[shape]:.2f}" if shape in values else "" for values in overall)
        rows.append((spell(shape), prospect["why"], *_cells(tuning, shape), *means))
    chosen = [number for number, row in enumerate(rows) if number and row[0] == spell(choice.shape)]
    if tuning.final:
        rows.append(("as written", "", *(spell_outcome(tuning.final.get(batch)) for batch in tuning.plain)))
    headings = ("S, K, N", "run because", *(f"batch {batch}" for batch in tuning.plain), *("ratio", "score")[: len(overall)])
    caption = "ratio: over all batch sizes, geometric mean. score: below 1 counted as 1, since the engine decodes plainly there."
    return terminal.table(f"chosen: {spell_choice(choice)}", headings, rows, headings[:2], caption=caption if clamped else "", bold=chosen)


def _cells(tuning: Tuning, shape: Shape) -> list[str]:
    """The outcome of a shape at every batch size."""
    found = {outcome.batch: outcome for outcome in tuning.outcomes if outcome.shape == shape}
    return [spell_outcome(found.get(batch)) for batch in tuning.plain]


def spell_outcome(outcome: Outcome | None) -> str:
    """``885 (1.68x)``; a shape whose tokens were wrong has no speed."""
    return "wrong tokens" if outcome is None else f"{outcome.tokens_per_second:.0f} ({outcome.ratio:.2f}x)"


def comment(config: LaunchConfig, tuning: Tuning, file: Path) -> list[str]:
    """Lines of the comment at the head of the written file: what was measured, how and where."""
    choice, head, side = tuning.choice, tuning.head, tuning.rows[0]
    assert choice is not None
    workload, temperature = config.workload, config.sampling.stated_temperature
    heat = f"temperature {temperature:g}" if temperature else "greedy"
    rule = f", accept={config.accept.rule}" if config.accept.rule != "match" else ""
    on_gpu = side["device"] == "cuda"
    where = ", ".join(gpu["name"] for gpu in head["gpus"]) if on_gpu else f"{head['torch_threads']} CPU threads"
    versions = ", ".join(f"{name} {head[name]}" for name in ("graphspec", "torch", "triton") if head.get(name))
    chosen = f"shape {spell(choice.shape)}" if choice.shape is not None else "plain decoding: no shape was faster"
    lengths = f"{round(side['input_tokens'])} + {workload.output_tokens} tokens"
    lines = [
        f"Written by graphspec tune on {head['date'][:10]}: {chosen}.",
        f"{config.model.path}, {config.variant.name}, {side['dtype']}, runtime {side['runtime']}, {where}; {versions}.",
        f"Workload: {workload.source}, {lengths}, at least {workload.requests} requests, {heat}{rule}. {_checked(tuning)}",
        f"Medians of {config.tune.rounds} rounds in which all sides took turns.",
        f"Rule: {spell_rule(choice)}.",
        *([busy] if (busy := caution(tuning)) is not None else []),
        "",
        "tokens/s (ratio to none)  " + "".join(f"{f'batch {batch}':>16}" for batch in tuning.plain) + f"{'ratio':>8}{'score':>8}",
        f"{'none':<26}" + "".join(f"{speed:>16.0f}" for speed in tuning.plain.values()) + f"{1:>8.2f}{1:>8.2f}",
    ]
    for shape, score in choice.scores.items():
        cells = "".join(f"{cell:>16}" for cell in _cells(tuning, shape))
        lines.append(f"{spell(shape):<26}{cells}{choice.ratios[shape]:>8.2f}{score:>8.2f}")
    if tuning.final:
        lines.append(f"{'as written':<26}" + "".join(f"{spell_outcome(tuning.final.get(batch)):>16}" for batch in tuning.plain))
    if tuning.config.adaptive.depths:
        lines += ["", "adaptive.times are milliseconds of a cycle on this machine: tune again on another one."]
    lines += ["", f"Use it: graphspec generate experiment={file}"]
    return [part for line in lines for part in (textwrap.wrap(line, WIDTH) if len(line) > WIDTH and "  " not in line else [line])]


def _checked(tuning: Tuning) -> str:
    """A sentence on the equality check of the sides that count."""
    rows = [row for row in tuning.rows if row["role"] != "none" and row["equal"] is not False]
    if all(row["equal"] for row in rows):
        return "Tokens equal those of plain decoding."
    sentence = next(row["equality"] for row in rows if not row["equal"])
    return f"{sentence[0].upper()}{sentence[1:]}."

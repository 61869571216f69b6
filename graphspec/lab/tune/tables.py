"""Output of ``graphspec tune``: a table, and the comment at the head of the experiment."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ...config.command_options import LaunchConfig
from ...host.core_wait import busy_caution

if TYPE_CHECKING:
    from .choice import Choice, Outcome, Shape
    from .tune import Tuning

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
    caption = "ratio: over all batch sizes, geometric mean. score: below 1 counted as 1, since the engine decodes plainly there."
    clamped = choice.scores != choice.ratios
    shown = Table(
        title=f"chosen: {spell_choice(choice)}", title_justify="left", caption=caption if clamped else None, caption_justify="left"
    )
    shown.add_column("S, K, N")
    shown.add_column("run because")
    for batch in tuning.plain:
        shown.add_column(f"batch {batch}", justify="right")
    overall = (choice.ratios, choice.scores) if clamped else (choice.ratios,)
    for name in ("ratio", "score")[: len(overall)]:
        shown.add_column(name, justify="right")
    shown.add_row("none", "", *(f"{speed:.0f}" for speed in tuning.plain.values()), *("1.00" for _ in overall))
    for prospect in tuning.prospects:
        shape = tuple(prospect["shape"])
        found = {outcome.batch: outcome for outcome in tuning.outcomes if outcome.shape == shape}
        style = "bold" if shape == choice.shape else None
        cells = [spell_outcome(found.get(batch)) for batch in tuning.plain]
        means = [f"{values[shape]:.2f}" if shape in values else "" for values in overall]
        shown.add_row(Text(spell(shape)), Text(prospect["why"]), *cells, *means, style=style)
    if tuning.final:
        shown.add_section()
        shown.add_row("as written", "", *(spell_outcome(tuning.final.get(batch)) for batch in tuning.plain), *("" for _ in overall))
    return shown


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
        found = {outcome.batch: outcome for outcome in tuning.outcomes if outcome.shape == shape}
        lines.append(
            f"{spell(shape):<26}"
            + "".join(f"{spell_outcome(found[batch]):>16}" for batch in tuning.plain)
            + f"{choice.ratios[shape]:>8.2f}{score:>8.2f}"
        )
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

"""The ``graphspec plan`` command: works the advice out, prints it as tables of at most 100 columns, writes its records."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ...config.command_options import LaunchConfig
from ...config.paths import check_writable, make_folder
from ...errors import spell_bytes
from ...host.terminal import status, table
from ...kernels.linear.moe_route import distinct_experts
from ..measure.provenance import provenance, write_jsonl
from .advice import FREE, LARGEST_BATCH, Efficiency
from .latency import gathered
from .passes import PassTimes
from .plan import CLOSE, advise
from .ranks import recommended

if TYPE_CHECKING:
    from rich.table import Table

    from ...shapes import CycleShape
    from .advice import Ranked, Timing
    from .plan import Advice, Row

WIDTH = 100
KERNELS_SHOWN = 6
NODES = (1, 2, 3, 4, 8, 16)
"""For which the experts that are read are shown."""
LENGTHS = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)
"""Acceptance lengths for which speeds are shown."""


def run(config: LaunchConfig) -> int:
    """The command.

    Raises:
        ConfigError, CheckpointError: as :func:`.plan.advise`; or ``plan.out`` can't be written.
    """
    out = check_writable("plan.out", config.plan.out) if config.plan.out is not None else None
    with status(lines=True) as say:
        advice = advise(config, say)
    if out is not None:
        make_folder("plan.out", out.parent)
        write_jsonl(out, [provenance(config), *advice.records()], "plan.out")
    if config.format == "json":
        print(json.dumps(advice.document(), default=str))
    else:
        show(advice)
        if out is not None:
            print(f"written to {out}")
    return 0


def spell(shape: CycleShape) -> str:
    """``(5, 4, 16)``, or ``none`` for plain decoding."""
    return f"({shape.num_steps}, {shape.topk}, {shape.num_draft_tokens})" if shape.num_steps else "none"


def show(advice: Advice, console: Console | None = None) -> None:
    """Print everything."""
    console = console or Console()
    if not console.is_terminal or console.width > WIDTH:
        console.width = WIDTH
    for line in shortfall_lines(advice):
        # Commands are copied: they may not be cut.
        console.print(Text(line), soft_wrap=True)
    for line in heading(advice):
        console.print(Text(line), soft_wrap=False)
    console.print()
    for draw in (memory_table, batches_table, stages_table, lengths_table):
        console.print(draw(advice))
    if advice.outlook.model.target.experts is not None and advice.variant.speculates:
        console.print(experts_table(advice))
    if advice.ranks:
        console.print(ranks_table(advice))
    if advice.launches:
        console.print(launches_table(advice))
    console.print(Text(crossover_line(advice)))
    if advice.predictions:
        console.print(predictions_table(advice))
        console.print(Text(error_line(advice)))
    for note in advice.notes:
        console.print(Text(f"note: {note}"))


def heading(advice: Advice) -> list[str]:
    """The model, the hardware and the figures that were used."""
    model, hardware, shares = advice.outlook.model, advice.outlook.hardware, advice.acceptance
    draft = f"{model.draft_own.number:,} parameters of its own" if model.draft_own is not None else "no parameters"
    peak = f", {hardware.flops / 1e12:g} TFLOPS" if hardware.flops is not None else ""
    spelled = ", ".join(f"{share:.2f}" for share in shares.shares)
    return [
        f"model       {advice.pair.name}, {model.target_weights.number:,} parameters, {advice.dtype}",
        f"draft       {advice.variant.name}: {advice.pair.described}; {draft}",
        f"hardware    {hardware.bandwidth / 1e9:,.0f} GB/s{peak} ({hardware.source})",
        f"acceptance  {spelled}, then as the last; sibling {shares.sibling:g} ({shares.source})",
        timing_line(advice.outlook.timing),
        f"context     {advice.outlook.context} tokens of each row",
    ]


def timing_line(timing: Timing) -> str:
    """The source of the times."""
    if isinstance(timing, Efficiency):
        rates = {name: f" and {rate / 1e9:,.3g} GFLOP/s" for name, rate in timing.rates.items()}
        stages = "".join(f", {name} {share:.0%}{rates.get(name, '')}" for name, share in timing.stages.items())
        host = f", {timing.host_ms:.3f} ms more" if timing.host_ms else ", nothing more"
        return f"efficiency  {timing.overall:.0%} of the floor's speed{stages}{host} ({timing.source})"
    assert isinstance(timing, PassTimes)
    curves = [("target", timing.curves["target.layers"]), ("draft", timing.curves.get("draft.layers"))]
    shown = "; ".join(
        f"{name} " + ", ".join(f"{curve.at(rows, curve.contexts[0]):.2f} ms for {rows} row{'s' * (rows > 1)}" for rows in (1, 16, 256))
        for name, curve in curves
        if curve is not None
    )
    return f"passes      layers of the {shown} ({timing.source})"


def shortfall_lines(advice: Advice) -> list[str]:
    """The first lines where not even one row fits."""
    found = advice.shortfall
    if found is None:
        return []
    alternatives = [line for each in found.alternatives for line in (f"  {each.what}:", f"    {each.command}")]
    ranks = recommended(advice.ranks)
    if ranks is not None:
        alternatives += [f"  {ranks.size} of these devices, each with {spell_bytes(ranks.needed)}: runtime.tensor_parallel={ranks.size}"]
    nothing = "Nothing known here has room for it."
    return [found.sentence, *(["What would fit:", *alternatives] if alternatives else [nothing]), ""]


def ranks_table(advice: Advice) -> Table:
    """Plain decoding of the smallest batch over several devices, and the fewest that have room for a row."""
    fewest = recommended(advice.ranks)
    words = f"{fewest.size} are the fewest with room for a row" if fewest is not None else "no number of them has room for a row"
    rows = [
        (str(price.size), price.refused)
        if price.refused
        else (
            str(price.size), spell_bytes(price.weights), spell_bytes(price.needed), "?" if price.rows is None else str(price.rows),
            f"{price.floor_ms:.2f} ms", str(price.sums), f"{price.sums_ms:.2f} ms", f"{price.total_ms:.2f} ms",
        )
        for price in advice.ranks
    ]  # fmt: skip
    headings = ("ranks", "weights of each", "one row needs", "rows", "floor", "sums", "time of sums", "together")
    return table(f"ranks, {advice.rows[0].batch} row(s), plain decoding: {words}", headings, rows, ("weights of each",))


def memory_table(advice: Advice) -> Table:
    """Memory that the engine would hold, and the rows and contexts that fit."""
    found = advice.capacity
    target, draft = found.kv_per_token
    rows = [(name, ("~" if estimate else "") + spell_bytes(size)) for name, size, estimate in found.parts]
    rows += [
        ("(of the KV: a token in the target's pool)", spell_bytes(target)),
        ("(of the KV: a token in the draft's pool)", spell_bytes(draft)),
        ("(of the KV: a row's window)", spell_bytes(found.window)),
    ]
    if (costs := found.states) is not None:
        moved = f"{spell_bytes(costs.traffic)} / {spell_bytes(costs.snapshot_traffic)}"
        rows += [
            ("(of the states: a row)", spell_bytes(costs.state)),
            ("(of the states: what a row's nodes record)", spell_bytes(costs.records)),
            ("(a state per node, which is not kept, would take)", spell_bytes(costs.snapshots)),
            ("(states moved in a cycle of a row; with a state per node)", moved),
        ]
    rows += [("(prompts are read in chunks of)", ", ".join(map(str, found.chunks))), ("(runtime)", found.runtime)]
    if found.rows is not None:
        fits = f"most rows at {found.context} tokens: {found.rows}; longest context of one row: {found.longest}"
        rows.append((f"({fits if found.rows or found.longest else 'not even one row fits'})", ""))
    if found.served is not None:
        lanes, context, tokens = found.served
        rows.append((f"(runtime.max_rows={lanes} rows of up to {context} share KV pools of {tokens} tokens)", ""))
    budget = f"{spell_bytes(found.budget)} allowed" if found.budget is not None else "memory of the hardware not known"
    title = f"memory, {found.shown_rows} row(s) of {found.context} tokens"
    return table(title, ("what", "bytes"), rows, ("what",), footers=(budget, spell_bytes(found.total)))


def batches_table(advice: Advice) -> Table:
    """One line per batch: plain decoding and the recommended shape."""
    headings = ("batch", "plain ms", "tok/s", "shape", "ms", "length", "tok/s", "ratio", "pays from", "free N", "fits")
    maximum = advice.capacity.rows
    rows = []
    for row in advice.rows:
        plain = (f"{row.plain.prediction.cycle_ms:.2f}", f"{row.plain.tokens_per_second:,.0f}")
        fits = "?" if maximum is None else "yes" if row.batch <= maximum else "no"
        pays = f"{row.break_even:.2f}" if row.best.shape.num_steps else "-"
        rows.append((str(row.batch), *plain, spell(row.best.shape), *_figures(row.best, row), pays, str(row.free), fits))
    other = [(entry, row) for entry, row in zip(advice.configured, advice.rows, strict=False) if entry.shape != row.best.shape]
    rows += [(str(row.batch), "", "", f"{spell(entry.shape)}*", *_figures(entry, row), "", "", "") for entry, row in other]
    title = f"recommended (S, K, N): fewest nodes within {CLOSE:.0%} of the fastest"
    return table(title, headings, rows, caption="* as configured" if other else "")


def _figures(entry: Ranked, row: Row) -> tuple[str, str, str, str]:
    """Milliseconds of a cycle, tokens per cycle, tokens per second and ratio to plain decoding."""
    speed, ratio = entry.tokens_per_second, entry.tokens_per_second / row.plain.tokens_per_second
    return f"{entry.prediction.cycle_ms:.2f}", f"{entry.acceptance_length:.2f}", f"{speed:,.0f}", f"{ratio:.2f}"


def stages_table(advice: Advice) -> Table:
    """Floors of the recommended shape at the smallest and the largest batch."""
    rows = []
    for row in {advice.rows[0].batch: advice.rows[0], advice.rows[-1].batch: advice.rows[-1]}.values():
        for stage in row.best.prediction.stages:
            parts = stage.cost.parts
            sizes = (stage.cost.bytes, parts["weights"], parts["experts"], parts["kv"] + parts["state"])
            name = stage.name + (f" x{stage.cost.passes}" if stage.cost.passes > 1 else "")
            bound = "compute" if stage.compute_bound else "bytes"
            rows.append((str(row.batch), name, *map(spell_bytes, sizes), f"{stage.floor_ms:.3f}", f"{stage.ms:.3f}", bound))
    headings = ("batch", "stage", "bytes", "weights", "experts", "KV, states", "floor ms", "ms", "bound")
    return table("stages with weights, recommended shape", headings, rows, ("stage", "bound"))


def experts_table(advice: Advice) -> Table:
    """What several nodes read of a mixture of experts, and how many tokens of a cycle that costs before any draft."""
    outlook, batch = advice.outlook, advice.rows[0].batch
    facts, rows = outlook.model.target.experts, []
    assert facts is not None, "a mixture"
    costs = outlook.verify_costs(batch, NODES)
    plain = costs[0].floor_ms(outlook.hardware)
    for nodes, cost in zip(NODES, costs, strict=True):
        floor, hit = cost.floor_ms(outlook.hardware), distinct_experts(facts.num_experts, facts.topk, batch * nodes)
        rows.append((str(nodes), f"{hit:.1f}", spell_bytes(cost.parts["experts"]), f"{floor:.3f}", f"{floor / plain:.2f}"))
    title = f"experts of a layer that N nodes read, of {facts.num_experts}, batch {batch}"
    caption = "As if nodes chose independently. Tokens: what a cycle has to commit to make up for it, drafts not counted."
    return table(title, ("N", "experts", "bytes of all", "floor ms", "tokens"), rows, caption=caption)


def launches_table(advice: Advice) -> Table:
    """Where the time of one cycle goes, launch by launch."""
    plain, programmatic = advice.launches
    rest = plain.parts[KERNELS_SHOWN:]
    rows = []
    for part in [*plain.parts[:KERNELS_SHOWN], *([gathered("others", rest)] if rest else []), plain.whole]:
        times = (f"{1e3 * seconds:.3f}" for seconds in (part.gap, part.exposed, part.stream, part.alone, part.seconds))
        rows.append((part.name, str(part.launches), f"{part.memory + part.cache:.0f}", *times))
    ratios = [1e3 * one.whole.seconds / one.floor_ms for one in (plain, programmatic)]
    caption = f"{ratios[0]:.2f}x the floor; {ratios[1]:.2f}x with kernels.programmatic_launch=true. Times in ms; none of it was measured."
    title = f"launch by launch, estimated: {spell(plain.shape)}, batch {plain.batch}, floor {plain.floor_ms:.2f} ms"
    headings = ("kernel", "launches", "round trips", "gaps", "exposed", "stream", "alone", "ms")
    return table(title, headings, rows, ("kernel",), caption=caption)


def lengths_table(advice: Advice) -> Table:
    """Tokens per second of the recommended shape by tokens committed per cycle."""
    rows = []
    for row in advice.rows:
        shape = row.best.shape
        speeds = [row.best.prediction.tokens_per_second(x) if 1 < x <= shape.num_steps + 1 else None for x in LENGTHS]
        rows.append((str(row.batch), spell(shape), *("-" if speed is None else f"{speed:,.0f}" for speed in speeds)))
    headings = ("batch", "shape", *(f"{length:g}" for length in LENGTHS))
    return table("tokens/s against acceptance length, recommended shape", headings, rows)


def crossover_line(advice: Advice) -> str:
    """From which batch on drafting stops paying."""
    free = f"free N: verification costs at most {FREE:.0%} more than for one node; pays from: tokens per cycle that beat plain decoding."
    if not advice.variant.speculates:
        return free
    maximum = advice.capacity.rows
    up_to = f"that fits, up to {maximum}" if maximum else f"up to {LARGEST_BATCH}"
    if advice.crossover == 1:
        return f"Drafting is predicted to pay at no batch {up_to}. {free}"
    losing = [str(row.batch) for row in advice.rows if not row.best.shape.num_steps and row.batch < (advice.crossover or LARGEST_BATCH)]
    stops = "" if advice.crossover is None else f"Drafting stops paying at batch {advice.crossover}. "
    if losing:
        return f"Drafting is predicted not to pay at batch {', '.join(losing)}. {stops}{free}"
    return f"{stops or f'Drafting is predicted to pay at every batch {up_to}. '}{free}"


def predictions_table(advice: Advice) -> Table:
    """Predicted against measured."""
    source = "timed passes" if isinstance(advice.outlook.timing, PassTimes) else "the other measured sides"
    rows = []
    for record in advice.predictions:
        shape = "none" if not record["shape"][0] else str(tuple(record["shape"]))
        times = (f"{record['predicted_ms']:.3f}", f"{record['measured_ms']:.3f}", f"{record['error']:+.1%}")
        rows.append((str(record["batch"]), shape, record["stage"] or "cycle", *times))
    headings = ("batch", "shape", "stage", "predicted ms", "measured ms", "error")
    return table(f"predicted from {source}, against measured", headings, rows, ("stage",))


def error_line(advice: Advice) -> str:
    """Median and largest error of whole cycles."""
    error = advice.document()["error"]
    return f"cycle time: median error {error['median']:.1%}, largest {error['largest']:.1%}, over {error['cycles']} measured cycle(s)"

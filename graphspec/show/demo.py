"""``graphspec demo``: stream a continuation, compare its speed with plain decoding, draw one draft tree."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..catalog import PLAIN_DECODING, resolve_variant
from ..config import Config, VariantConfig
from ..core_wait import CoreWait, busy_caution
from ..errors import ConfigError, ResourceError
from .draft_tree import draw_tree
from .progress import progress_bars

if TYPE_CHECKING:
    from ..engine.llm import LLM
    from ..engine.outputs import Output
    from ..engine.request import SamplingParams

DEMO_REPEATS = 3


def comparison_table(rows: dict[str, tuple[float, Any]], baseline: str) -> Table:
    """Speed and acceptance side by side.

    Args:
        rows: name -> (tokens per second, metrics with ``cycles``, ``acceptance_length`` and ``accepted_per_position``).
        baseline: the row the ratio refers to.
    """
    table = Table(title="decoding speed", title_justify="left")
    table.add_column("variant")
    for heading in ("tokens/s", f"x {baseline}", "cycles", "tokens per cycle"):
        table.add_column(heading, justify="right")
    table.add_column("accepted at depth 1, 2, ...")
    for name, (speed, metrics) in rows.items():
        positions = " ".join(f"{share:.2f}" for share in metrics.accepted_per_position) or "-"
        ratio = speed / rows[baseline][0] if rows[baseline][0] else float("nan")
        table.add_row(name, f"{speed:.1f}", f"{ratio:.2f}", str(metrics.cycles), f"{metrics.acceptance_length:.2f}", positions)
    return table


def run_demo(config: Config, prompt: str, console: Console | None = None) -> None:
    """Stream a continuation, time it with and without speculation on the same requests, and draw one tree.

    Raises:
        ConfigError: the configured variant does not speculate.
        ResourceError: greedy or seeded output differs between the two, which the runtime promises can't happen.
    """
    variant = config.variant.name
    if not resolve_variant(variant).speculates:
        raise ConfigError("variant", "one that speculates: the demo compares it with plain decoding", repr(variant))
    from ..engine.llm import LLM
    from ..engine.request import configured_params

    console = console or Console()
    plain = PLAIN_DECODING.name
    params = configured_params(config.sampling)
    if params.seed is None:
        # What is compared below is one request run on two engines.
        params = replace(params, seed=0)
    if config.runtime.name != "eager":
        Console(stderr=True).print("Building the cycles for this machine; the first time takes a minute or two.")
    with progress_bars() as progress:
        engines = {
            variant: LLM.from_config(config, progress=progress),
            plain: LLM.from_config(replace(config, variant=VariantConfig(name=plain)), progress=progress),
        }
        engines[variant].check(prompt, params)
        for llm in engines.values():
            llm.warm_up(sampling=params.sampling_class)
    console.print(Text(prompt, style="bold"), end="")
    for event in engines[variant].stream(prompt, params):
        console.print(Text(event.text), end="", soft_wrap=True)
    console.print("\n")

    watch = CoreWait()
    speeds, outputs = measure(engines, prompt, params)
    busy = busy_caution({"both together": watch.share()})
    if outputs[variant].token_ids != outputs[plain].token_ids:
        raise ResourceError("output", f"the tokens of {plain}", f"other tokens from {variant}")
    console.print(comparison_table({name: (speeds[name], outputs[name].metrics) for name in engines}, plain))
    console.print(f"Both gave the same {len(outputs[variant].token_ids)} tokens.")
    console.print(f"Speeds are medians of {DEMO_REPEATS} runs after a warm-up, prompt processing excluded.\n")
    if busy is not None:
        console.print(Text(busy + "\n"), soft_wrap=True)
    console.print("The draft tree of the first cycle (+ accepted, - rejected):")
    console.print(draw_tree(engines[variant].draft_tree(prompt)))


def measure(engines: dict[str, LLM], prompt: str, params: SamplingParams) -> tuple[dict[str, float], dict[str, Output]]:
    """Median decode speed and last output per engine; the first run of each warms it up, then they take turns.

    Raises:
        ResourceError: a run failed.
    """
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    outputs: dict[str, Output] = {}
    for repeat in range(DEMO_REPEATS + 1):
        for name, llm in engines.items():
            [output] = llm.generate(prompt, params)
            if output.finish_reason == "error":
                raise ResourceError(f"request under {name}", "an output", output.error)
            outputs[name] = output
            if repeat:
                speeds[name].append(output.metrics.tokens_per_second)
    return {name: median(values) for name, values in speeds.items()}, outputs

"""``graphspec demo``: stream a continuation, draw a draft tree, compare speeds with plain decoding."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from statistics import median
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..config.catalog import PLAIN_DECODING, resolve_variant
from ..config.schema import AdaptiveConfig, Config, KernelsConfig, RuntimeConfig, VariantConfig
from ..errors import ConfigError, ResourceError
from ..host.core_wait import CoreWait, busy_caution
from ..host.terminal import table
from .inspect import draw_tree

if TYPE_CHECKING:
    from rich.table import Table

    from ..api.llm import LLM
    from ..api.outputs import Output
    from ..engine.request import SamplingParams
    from ..text.conversation import Conversation

DEMO_REPEATS = 3
DEMO_WIDTH = 80
"""Most columns that the demo's text takes."""
TREE_TOPK, TREE_NODES = 4, 16
"""Shape of the tree that is drawn where the configured shape is a chain."""
NATIVE_KERNELS = "graphspec.kernels.native"
"""Compiles its library when it is imported."""
SMALL_CONTEXT = 1024
"""Most slots of the eager engine's context, where the demo's text fits: plain torch attends all of them in every cycle."""


class WordWrap:
    """Breaks a stream of text between words, so that no line is longer than ``width`` columns; a longer word is cut.

    Lines that are short enough stay as they are. A break takes the place of white space that has no room left.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._column, self._rest = 0, ""

    def push(self, text: str, *, last: bool = False) -> str:
        """Text to show after ``text``; a word that may go on in the next piece waits for it, unless this is the ``last``."""
        *whole, self._rest = re.split(r"(?<=\n)|(?<=\s)(?=\S)", self._rest + text)
        if last:
            whole, self._rest = [*whole, self._rest], ""
        return "".join(map(self._place, whole))

    def _place(self, word: str) -> str:
        """A word and the white space after it, at the next place that has room."""
        bare = word.rstrip()
        shown = "\n" if bare and self._column and self._column + cell_len(bare) > self.width else ""
        self._column = 0 if shown else self._column
        for character in word:
            size = cell_len(character)
            if character != "\n" and self._column + size > self.width:
                # White space that has no room is the break itself.
                shown, self._column = shown + "\n", 0
                character = "" if character.isspace() else character
            shown += character
            self._column = 0 if character == "\n" else self._column + cell_len(character)
        return shown


@contextmanager
def working(what: str, console: Console) -> Iterator[None]:
    """Says what goes on and then how long it took; in a terminal a bar moves meanwhile."""
    started = time.perf_counter()
    if console.is_terminal:
        with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True) as bars:
            bars.add_task(what, total=None)
            yield
        console.print(Text(what), end="")
    else:
        console.print(Text(what), end="", soft_wrap=True)
        yield
    console.print(Text(f": {time.perf_counter() - started:.1f} s"), soft_wrap=True)


def comparison_table(rows: dict[str, tuple[float, Any]], baseline: str) -> Table:
    """Speed and acceptance side by side.

    Args:
        rows: name -> (tokens per second, metrics with ``cycles``, ``acceptance_length`` and ``accepted_per_position``).
        baseline: the row the ratio refers to.
    """
    cells = [
        (
            name, f"{speed:.1f}", f"{speed / rows[baseline][0]:.2f}", str(metrics.cycles), f"{metrics.acceptance_length:.2f}",
            " ".join(f"{share:.2f}" for share in metrics.accepted_per_position) or "-",
        )
        for name, (speed, metrics) in rows.items()
    ]  # fmt: skip
    headings = ("variant", "tokens/s", f"x {baseline}", "cycles", "tokens/cycle", "accepted by depth")
    return table("decoding speed", headings, cells, ("variant", "accepted by depth"))


def run_demo(config: Config, prompt: str, console: Console | None = None, notes: Console | None = None) -> None:
    """Stream a continuation, draw a tree, then time it with and without speculation on the same request.

    The text comes from an eager engine, which needs no compiler and starts at once; what is timed is compiled next. All must give the
    same tokens.

    Args:
        config: of the engine that is compared with plain decoding.

    Raises:
        ConfigError: the configured variant does not speculate.
        ResourceError: greedy or seeded output differs between two engines, which the runtime promises can't happen.
    """
    variant = config.variant.name
    if not resolve_variant(variant).speculates:
        raise ConfigError("variant", "one that speculates: the demo compares it with plain decoding", repr(variant))
    console, notes = console or Console(), notes or Console(stderr=True)
    console.width = min(console.width, DEMO_WIDTH)
    wrap = WordWrap(console.width)
    console.print("From the eager program, while nothing is compiled:\n", style="dim")
    console.print(Text(wrap.push(prompt, last=True), style="bold"), end="", soft_wrap=True)
    plain = PLAIN_DECODING.name
    import torch

    from ..api.llm import LLM
    from ..engine.request import measured_params

    params = measured_params(config.sampling)
    if params.seed is None:
        # What is compared below is one request run on several engines.
        params = replace(params, seed=0)
    threads = torch.get_num_threads()
    eager = eager_engine(config, prompt, max(1, threads - 1))
    eager.check(prompt, params)
    compiles = config.runtime.name != "eager"
    tokens: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        native: Future[ModuleType] | None = None
        for event in eager.stream(prompt, params):
            console.print(Text(wrap.push(event.text, last=event.finished)), end="", soft_wrap=True)
            tokens += event.token_ids
            if native is None and compiles and (eager.plan.device, eager.plan.dtype) == ("cpu", "float32"):
                # The compiler is another process, and text keeps one core busy. Not before the first token, which is waited for.
                native = pool.submit(import_module, NATIVE_KERNELS)
        console.print("\n")
        shape = eager.plan.shape
        console.print(
            f"Draft tree of the first cycle, S, K, N = {shape.num_steps}, {shape.topk}, {shape.num_draft_tokens} (+ accepted, - rejected):"
        )
        console.print(draw_tree(eager.draft_tree(prompt)))
        console.print()
        del eager
        torch.set_num_threads(threads)
        if len(tokens) < 2:
            # Prompt processing gives the first token, and what is timed comes after it.
            console.print("The text is one token, so there is nothing to time: give another prompt='...', or a larger sampling.max_tokens.")
            return
        if native is not None:
            with working("compiling the C++ kernels", notes):
                # Where it failed, an engine that needs them fails in the same way.
                native.exception()
    engines: dict[str, LLM] = {}
    for name, each in ((variant, config), (plain, replace(config, variant=VariantConfig(name=plain)))):
        with working(f"{'compiling' if compiles else 'building'} the cycle of {name}", notes):
            engines[name] = LLM.from_config(each, progress=False)
            engines[name].warm_up(sampling=params.sampling_class)
    watch = CoreWait()
    with working(f"{DEMO_REPEATS} runs of each after a warm-up", notes):
        speeds, outputs = measure(engines, prompt, params)
    busy = busy_caution({"both together": watch.share()})
    found = {"the eager program": tokens, **{name: output.token_ids for name, output in outputs.items()}}
    for name, ids in found.items():
        if ids != found[plain]:
            raise ResourceError("output", f"the tokens of {plain}", f"other tokens from {name}")
    console.print(f"The eager program, {variant} and {plain} gave the same {len(tokens)} tokens.")
    runtime = engines[variant].plan.runtime.name
    console.print(f"Speeds are medians of {DEMO_REPEATS} runs, prompt processing excluded, runtime={runtime}.\n")
    if busy is not None:
        console.print(Text(busy + "\n"))
    console.print(comparison_table({name: (speeds[name], outputs[name].metrics) for name in engines}, plain))


def eager_engine(config: Config, prompt: str, threads: int) -> LLM:
    """An engine of the configured draft that compiles nothing: the smallest that holds the demo's text, with a tree where the draft can.

    ``threads``: of torch, fewer than there are cores, since threads of one operation wait for each other and compilers run next to them.
    """
    from ..api.llm import LLM

    # A token has at least one byte, but for a few that a tokenizer may put in front.
    room = len(prompt.encode()) + (config.sampling.max_tokens or SMALL_CONTEXT) + 64
    model = replace(config.model, max_context=room) if config.model.max_context is None and room <= SMALL_CONTEXT else config.model
    runtime = RuntimeConfig(name="eager", max_rows=1, buckets=[1], prefill_chunks=[32])
    hardware = replace(config.hardware, threads=threads)
    small = replace(config, model=model, runtime=runtime, hardware=hardware, kernels=KernelsConfig(), adaptive=AdaptiveConfig())
    if config.variant.topk == 1:
        # Heads of their own per step draft chains and nothing else, and so does accept=rejection.
        with suppress(ConfigError):
            return LLM.from_config(
                replace(small, variant=replace(config.variant, topk=TREE_TOPK, num_draft_tokens=TREE_NODES)), progress=False
            )
    return LLM.from_config(small, progress=False)


def measure(
    engines: dict[str, LLM], prompt: str | Conversation, params: SamplingParams, repeats: int = DEMO_REPEATS
) -> tuple[dict[str, float], dict[str, Output]]:
    """Median decode speed and last output per engine; the first run of each warms it up, then they take turns.

    Raises:
        ResourceError: a run failed.
    """
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    outputs: dict[str, Output] = {}
    for repeat in range(repeats + 1):
        for name, llm in engines.items():
            [output] = llm.generate(prompt, params)
            if output.finish_reason == "error":
                raise ResourceError(f"request under {name}", "an output", output.error)
            outputs[name] = output
            if repeat:
                speeds[name].append(output.metrics.tokens_per_second)
    return {name: median(values) for name, values in speeds.items()}, outputs

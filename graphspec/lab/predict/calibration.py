"""Measures network passes and a few whole cycles of an engine on this CPU, for ``graphspec plan plan.measure=true``.

Running a pass once shows which native ops it consists of; then only these are timed, without PyTorch's overhead around them in the eager
runtime. Whole cycles of the engine give the rest. The result is kept in the cache folder and is valid for this processor, number of
threads, versions, source of this package, and checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...api.llm import LLM, generate_through
from ...config.paths import reason
from ...config.schema import Config
from ...engine.request import SamplingParams
from ...host.native_build import cache_folder, cpu_flags
from ...models.attention import TreeAttention
from ...models.layers import Linear
from ...models.stack import DecoderStack
from ...plan.runtime import resolve_runtime
from ...shapes import PLAIN, CycleShape
from ..floor import FloorModel, has_tensors
from ..measure.machine import copy_bandwidth
from ..measure.provenance import provenance
from ..measure.recorder import Recorder
from .passes import Curve, PassTimes, TimedCycle, read_curves

if TYPE_CHECKING:
    from ...config.catalog import Variant
    from .model_pair import ModelPair

ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
"""Rows of a pass; more rows than one window has are spread over several lanes."""
LANES, LANE_ROWS = 4, 64
MAX_CONTEXT = 1024
"""Longest context that is measured; longer ones are extrapolated."""
IN_A_ROW = 3
ROUNDS, SECONDS = 15, 8.0
"""Most rounds over all points together, and the seconds after which no further round begins."""
PROMPT, NEW_TOKENS = 16, 96
"""Tokens of the request that whole cycles are timed with."""
FOLDER = "passes"

Say = Callable[[str], None]
Call = Callable[[], Any]


def identity(config: Config, folders: Sequence[Path]) -> dict[str, Any]:
    """What a measurement is valid for.

    Args:
        folders: of the checkpoints; a file is identified by name, size and modification time.
    """
    source = hashlib.sha256()
    package = Path(str(files("graphspec")))
    for file in sorted(file for file in package.rglob("*") if file.suffix in (".py", ".cpp", ".h")):
        if file.relative_to(package).parts[0] not in ("lab", "train"):
            source.update(file.read_bytes())
    checkpoints = [
        [str(folder), *sorted(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in folder.iterdir() if f.is_file())]
        for folder in folders
    ]
    values = asdict(config)
    return {
        "cpu": hashlib.sha256(cpu_flags().encode()).hexdigest()[:20],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "source": source.hexdigest()[:20],
        "checkpoints": checkpoints,
        **{key: values[key] for key in ("kernels", "hardware")},
        "runtime": resolve_runtime(config.runtime.name, "cpu").name,
        "variant": {key: values["variant"][key] for key in ("name", "token_map", "ngram", "draft_noise")},
    }


def kept_file(known: dict[str, Any], folder: Path | None = None) -> Path:
    """Where a measurement of this identity is kept.

    Raises:
        ResourceError: no cache folder can be determined.
    """
    name = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:20]
    return (folder or cache_folder()) / FOLDER / f"{name}.json"


def pass_times(
    config: Config, variant: Variant, pair: ModelPair, model: FloorModel, say: Say, folder: Path | None = None
) -> PassTimes | str:
    """The times kept for this machine and model; measured and kept where there are none.

    Args:
        folder: of the cache; None: the user's.

    Returns:
        The times, or why passes of this engine can't be measured.

    Raises:
        GraphspecError: the engine can't be built.
    """
    if not has_tensors(pair.target.path) or (pair.draft is not None and pair.from_config):
        return "there are no weights"
    if config.hardware.threads is not None:
        torch.set_num_threads(config.hardware.threads)
    folders = [pair.target.path, *([pair.draft.path] if pair.draft is not None else [])]
    known = identity(config, folders)
    file = kept_file(known, folder)
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        cycles = [TimedCycle(_shape(c["shape"], variant), c["batch"], c["context"], c["ms"]) for c in kept["cycles"]]
        source = f"measured on {kept['provenance']['date'][:10]}, kept in {file}"
        return PassTimes.fit(model, read_curves(kept), cycles, float(kept["bandwidth"]), source)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # nothing kept, or something else: it is measured
    found = measure(config, variant, model, say)
    if isinstance(found, PassTimes):
        record = {"identity": known, "provenance": provenance(config), **found.record()}
        found = replace(found, source=f"measured now, {_keep(file, record)}")
    return found


def _keep(file: Path, record: dict[str, Any]) -> str:
    """Write a record; returns where it is kept, or why it is not."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = file.with_name(f".{file.name}-{os.getpid()}")
        scratch.write_text(json.dumps(record, default=str, indent=1) + "\n", encoding="utf-8")
        scratch.replace(file)
    except OSError as error:
        return f"not kept: {file}: {reason(error)}"
    return f"kept in {file}"


def _shape(numbers: Sequence[int], variant: Variant) -> CycleShape:
    steps, topk, nodes = numbers
    return CycleShape(steps, topk, nodes, variant.auto_shape.pool) if steps else PLAIN


def measure(config: Config, variant: Variant, model: FloorModel, say: Say) -> PassTimes | str:
    """The times of :func:`pass_times`, without a cache."""
    cycles: list[TimedCycle] = []
    curves: dict[str, Curve] = {}
    for place, (shape, batches) in enumerate(cells := timed_shapes(variant, model), 1):
        what = f"cycle {tuple(shape.numbers)}" if shape.num_steps else "plain decoding"
        say(f"measuring passes and cycles, kept for the next time: {what}, {place} of {len(cells)}")
        llm = LLM.from_config(engine_of(config, shape, batches))
        for name, how in llm.decoders.items():
            if how.startswith("op by op"):
                return f"the {name}'s layers run {how}"
        cycles += [time_cycle(llm, shape, batch) for batch in batches]
        if place == len(cells):
            say("measuring passes")
            curves = time_passes(llm)
    last = cycles[-1]
    touched = model.working_set(last.shape, last.batch, last.context)
    return PassTimes.fit(model, curves, cycles, copy_bandwidth("cpu", seconds=0.2, working_set=touched), "measured now")


def timed_shapes(variant: Variant, model: FloorModel) -> list[tuple[CycleShape, list[int]]]:
    """Shapes whose whole cycles are timed, each with its batch sizes: plain decoding, a chain, a tree."""
    shapes = [PLAIN]
    if variant.speculates:
        pool, heads = variant.auto_shape.pool, model.draft.num_heads if model.draft is not None else 1
        shapes.append(CycleShape(2, 1, 3, pool))
        if heads == 1:
            shapes.append(CycleShape(2, 2, 5, pool))
    return [(shape, [1] if shape != shapes[-1] else [1, LANES]) for shape in shapes]


def engine_of(config: Config, shape: CycleShape, batches: Sequence[int]) -> Config:
    """The engine that runs cycles of a shape with this many rows."""
    drafting = replace(config.variant, tree_choices=None, num_steps=None, topk=None, num_draft_tokens=None)
    if shape.num_steps:
        drafting = replace(drafting, num_steps=shape.num_steps, topk=shape.topk, num_draft_tokens=shape.num_draft_tokens)
    else:
        drafting = replace(drafting, name="none", draft=None, draft_revision=None, token_map=None)
    limit = min(config.model.max_context or MAX_CONTEXT, MAX_CONTEXT)
    return Config(
        variant=drafting,
        model=replace(config.model, max_context=limit),
        runtime=replace(config.runtime, max_rows=max(batches), buckets=list(batches), num_pages=None, depth_per_bucket={}),
        kernels=config.kernels,
        hardware=config.hardware,
    )


def time_cycle(llm: LLM, shape: CycleShape, batch: int, runs: int = 3) -> TimedCycle:
    """Median cycle time of ``batch`` requests, the smallest over some runs."""
    vocab = llm.plan.target.vocab_size
    prompts = [[(31 * row + 7 * place) % vocab for place in range(PROMPT)] for row in range(batch)]
    new_tokens = min(NEW_TOKENS, llm.plan.max_context - PROMPT)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True).resolve()
    llm.generate(prompts, params)
    found: list[float] = []
    for _ in range(runs):
        recorder = Recorder(llm.cycle)
        generate_through(llm, recorder, prompts, params)
        found.append(statistics.median(whole for whole, _ in recorder.cycle_times(recorder.most_common())))
    return TimedCycle(shape, batch, PROMPT + new_tokens // 2, 1e3 * min(found))


def time_passes(llm: LLM) -> dict[str, Curve]:
    """Curves of both networks of an engine whose layers are native stacks."""
    points: dict[tuple[str, int, int], list[Call]] = {}
    for name, network in (("target", llm.cycle.target), ("draft", llm.cycle.draft)):
        if network is None:
            continue
        facts = llm.plan.target if name == "target" else cast("Any", llm.plan.draft).decoder
        limit = min(llm.plan.max_context, facts.longest_context)
        contexts = (limit // 16, limit * 3 // 4)
        room = limit - contexts[1]
        for rows in ROWS:
            lanes = -(-rows // min(LANE_ROWS, room))
            if lanes > LANES:
                continue
            for context in contexts:
                calls = network_calls(llm, name, lanes, -(-rows // lanes), context)
                for part, some in calls.items():
                    points[f"{name}.{part}", rows, context if part == "layers" else 0] = some
    found: dict[str, dict[int, dict[int, float]]] = {}
    for (curve, rows, context), ms in take_turns(points).items():
        found.setdefault(curve, {}).setdefault(rows, {})[context] = ms
    return {
        curve: Curve(tuple(some), tuple(tuple(times.values()) for times in some.values()), tuple(next(iter(some.values()))))
        for curve, some in found.items()
    }


def network_calls(llm: LLM, name: str, lanes: int, rows: int, context: int) -> dict[str, list[Call]]:
    """The native ops of one pass over ``rows`` tokens of each lane, by part, ready to be run again."""
    network = cast("Any", llm.cycle.target if name == "target" else llm.cycle.draft)
    attention = chain_attention(llm, f"{name}_kv", lanes, rows, context)
    tokens = torch.zeros(lanes, rows, dtype=torch.int64)
    parts: dict[str, list[Call]] = {}
    with torch.no_grad():
        if name == "target":
            hidden, parts["layers"] = noted(network, lambda: network(tokens, attention).hidden_BTH)
        else:
            carried = None
            if llm.plan.feature_width:
                features = torch.zeros(lanes, rows, llm.plan.feature_width)
                carried, parts["fuse"] = noted(network, lambda: network.fuse(features))
            hidden, parts["layers"] = noted(network, lambda: network(tokens, carried, attention))
        _, parts["head"] = noted(network, lambda: network.logits(hidden))
    return {part: calls for part, calls in parts.items() if calls}


def noted(network: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, list[Call]]:
    """The result of ``run``, and the calls of native ops that it makes."""
    calls: list[Call] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(partial(module.forward, *args, **kwargs))

    with ExitStack() as hooks:
        for module in network.modules():
            if isinstance(module, DecoderStack | Linear):
                hooks.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        return run(), calls


def chain_attention(llm: LLM, pool: str, lanes: int, rows: int, context: int) -> TreeAttention:
    """``rows`` tokens of each lane in a chain after ``context`` committed ones."""
    plan, arena = llm.plan, llm.cycle.arena
    pages = plan.pages_for(context + rows)
    slot_BT = (context + torch.arange(rows)).repeat(lanes, 1)
    ancestors_T = torch.tensor([(1 << (row + 1)) - 1 if row < 63 else -1 for row in range(rows)], dtype=torch.int64)
    return TreeAttention(
        kernels=llm.cycle.kernels,
        kv_pool=arena[pool],
        table_BP=torch.arange(1, 1 + lanes * pages, dtype=torch.int32).view(lanes, pages),
        position_BT=slot_BT,
        valid_BT=torch.ones(lanes, rows, dtype=torch.bool),
        slot_BT=slot_BT,
        begin_BT=torch.zeros(lanes, rows, dtype=torch.int64),
        prefix_end_B=torch.full((lanes,), context),
        ancestors_BTX=ancestors_T[None, :, None].repeat(lanes, 1, 1),
        further_pools=tuple(arena[slot.name] for slot in arena.slots if slot.name.startswith(f"{pool}_")),
    )


def take_turns(points: dict[tuple[str, int, int], list[Call]]) -> dict[tuple[str, int, int], float]:
    """Milliseconds of each point: the median of some calls in a row, and of these the lower quartile over rounds.

    Points take turns, so that a slow phase of the machine affects all of them; disturbances only make a round longer.
    """
    found: dict[tuple[str, int, int], list[float]] = {point: [] for point in points}
    end = time.perf_counter() + SECONDS
    with torch.no_grad():
        for number in range(ROUNDS):
            for point, calls in points.items():
                times = []
                for _ in range(1 + IN_A_ROW):  # the first is not counted: the caches still hold the data of the point before
                    began = time.perf_counter()
                    for call in calls:
                        call()
                    times.append(1e3 * (time.perf_counter() - began))
                found[point].append(statistics.median(times[1:]))
            if number >= 2 and time.perf_counter() > end:
                break
    return {point: sorted(times)[(len(times) - 1) // 4] for point, times in found.items()}

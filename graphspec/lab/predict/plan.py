"""``graphspec plan``: what fits, the least time of a cycle, and which shape to choose, from a ``config.json`` and figures of the hardware.

Its assumptions, which its output repeats: stages reach the share of their floor's speed that :class:`Efficiency` says; the host and stages
without weights cost nothing, unless a measured file, or passes timed on this CPU, give their cost; acceptance follows :mod:`.acceptance`.
Of the shapes within :data:`CLOSE` of the fastest, the one with the fewest nodes is recommended: the model is no more accurate than that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ...config.catalog import Variant, resolve_variant
from ...engine.device import resolve_device
from ...errors import ConfigError
from ...plan.plan import resolve_shape
from ...shapes import PLAIN, CycleShape
from ..floor import FloorModel, Hardware
from ..measure.machine import copy_bandwidth, matmul_rate
from .acceptance import Acceptance, usual_sibling
from .advice import LARGEST_BATCH, Efficiency, Outlook, Ranked, StagePrediction, Timing, candidate_shapes
from .capacity import Capacity, Shortfall, capacity, find_shortfall, kv_dtype_of, packs_weights
from .from_results import Measured, acceptance_of, calibrate, predictions, read_measured
from .latency import DEVICES, CycleEstimate, estimate_cycle
from .launches import planned_steps
from .model_pair import ModelPair, read_model_pair
from .passes import PassTimes
from .ranks import RankPrice, draft_of_rank, price_ranks

if TYPE_CHECKING:
    from ...config.command_options import LaunchConfig

Say = Callable[[str], None]

CLOSE = 0.02
DEFAULT_CONTEXT = 2048
_GIB = 2**30


@dataclass(slots=True)
class Row:
    """The advice for one batch size.

    Attributes:
        best: the recommended shape; plain decoding if nothing is faster.
        free: nodes per row that verification processes at no extra cost (:meth:`.advice.Outlook.free_width`).
        break_even: tokens per cycle above which ``best`` is faster than plain decoding.
    """

    plain: Ranked
    best: Ranked
    free: int
    break_even: float

    @property
    def batch(self) -> int:
        """Rows."""
        return self.plain.prediction.batch


@dataclass(slots=True)
class Advice:
    """The result of ``graphspec plan``.

    Attributes:
        configured: the shape that the configuration sets, ranked for every batch; empty if it sets none.
        crossover: smallest batch at which drafting no longer pays; None: it pays up to the largest that was tried.
        launches: launch by launch, with and without programmatic launch: the configured shape, else the recommended one, at the smallest
            batch; empty where the model does not know the hardware.
        shortfall: why not even one row fits, and what would fit; None: one row does, or the memory is not known.
        ranks: the same target over several ranks of the hardware; empty on a CPU, or where the link between them is not known.
    """

    pair: ModelPair
    variant: Variant
    dtype: str
    outlook: Outlook
    acceptance: Acceptance
    rows: list[Row]
    configured: list[Ranked]
    crossover: int | None
    capacity: Capacity
    predictions: list[dict[str, Any]] = field(default_factory=list)
    launches: list[CycleEstimate] = field(default_factory=list)
    shortfall: Shortfall | None = None
    ranks: list[RankPrice] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def records(self) -> list[dict[str, Any]]:
        """Records of kind ``plan``, one per batch, then those of kind ``prediction``."""
        return [*(self._record(row) for row in self.rows), *self.predictions]

    def _record(self, row: Row) -> dict[str, Any]:
        best, hardware, timing = row.best, self.outlook.hardware, self.outlook.timing
        return {
            "kind": "plan",
            "model": self.pair.name,
            "variant": self.variant.name,
            "hardware": hardware.name,
            "context": self.outlook.context,
            **best.record(),
            "floor_ms": best.prediction.floor_ms,
            "fits": None if self.capacity.rows is None else row.batch <= self.capacity.rows,
            "plain_floor_ms": row.plain.prediction.floor_ms,
            "plain_ms": row.plain.prediction.cycle_ms,
            "plain_tokens_per_second": row.plain.tokens_per_second,
            "ratio": best.tokens_per_second / row.plain.tokens_per_second,
            "break_even": row.break_even,
            "free_width": row.free,
            "bandwidth": hardware.bandwidth,
            "flops": hardware.flops,
            "efficiency": timing.overall if isinstance(timing, Efficiency) else None,
            "stages": [stage_record(stage) for stage in best.prediction.stages],
        }

    def document(self) -> dict[str, Any]:
        """Everything, for ``format=json``."""
        outlook, own = self.outlook, self.outlook.model.draft_own
        errors = [abs(record["error"]) for record in self.predictions if record["stage"] is None]
        return {
            "model": str(self.pair.folder),
            "variant": self.variant.name,
            "draft": self.pair.described,
            "dtype": self.dtype,
            "parameters": {"target": outlook.model.target_weights.number, "draft": own.number if own is not None else 0},
            "hardware": asdict(outlook.hardware),
            "acceptance": {"shares": list(self.acceptance.shares), "sibling": self.acceptance.sibling, "source": self.acceptance.source},
            "efficiency": outlook.timing.record() | {"source": outlook.timing.source},
            "memory": self.capacity.document(),
            "shortfall": asdict(self.shortfall) if self.shortfall is not None else None,
            "ranks": [price.document() for price in self.ranks],
            "plans": [self._record(row) for row in self.rows],
            "configured": [entry.record() for entry in self.configured],
            "crossover": self.crossover,
            "launches": [estimate.record() for estimate in self.launches],
            "predictions": self.predictions,
            "error": {"median": median(errors), "largest": max(errors), "cycles": len(errors)} if errors else None,
            "notes": self.notes,
        }


def stage_record(stage: StagePrediction) -> dict[str, Any]:
    """One stage of a record."""
    return {
        "name": stage.name,
        "passes": stage.cost.passes,
        "bytes": stage.cost.bytes,
        "parts": dict(stage.cost.parts),
        "flops": stage.cost.flops,
        "floor_ms": stage.floor_ms,
        "ms": stage.ms,
        "bound": "compute" if stage.compute_bound else "bytes",
    }


def _time_passes(
    config: LaunchConfig, variant: Variant, pair: ModelPair, model: FloorModel, say: Say, notes: list[str]
) -> PassTimes | None:
    """Times of passes on this CPU; None, with a note that says why, where they can't be taken."""
    from .calibration import pass_times

    found = pass_times(config, variant, pair, model, say)
    if isinstance(found, PassTimes):
        return found
    notes.append(f"passes were not timed: {found}")
    return None


def _unknowns(variant: Variant, hardware: Hardware, passes: PassTimes | None) -> list[str]:
    """Notes on what the prediction does not know."""
    notes = []
    if hardware.flops is None and passes is None:
        notes.append(
            "the peak of this hardware is not known (hardware.tflops): floors are those of the bytes alone, too low for large batches"
        )
    if variant.drafter in ("history", "host"):
        notes.append("the drafter is no network: its own time is not predicted")
    return notes


def advise(config: LaunchConfig, say: Say = lambda text: None) -> Advice:
    """Compute the advice.

    Raises:
        ConfigError: no figures of the hardware; a context longer than the model's; a bad ``plan.measured``; a missing draft that is
            needed; a name that is no model.
        CheckpointError: a config that is missing, wrong or not supported.
    """
    variant, options = resolve_variant(config.variant.name), config.plan
    pair = read_model_pair(config.model.path, config.variant, variant, config.model.revision)
    device, dtype = device_and_dtype(config, pair)
    whole, size = pair, config.runtime.tensor_parallel
    if size > 1:
        if options.measure:
            raise ConfigError("plan.measure", f"false with runtime.tensor_parallel={size}: one process is no rank", "true")
        pair = replace(pair, target=pair.target.of_rank(0, size))
    longest = pair.target.longest_context
    context = options.context or min(DEFAULT_CONTEXT, longest)
    if context > longest:
        raise ConfigError("plan.context", f"at most the checkpoint's {longest}", context)
    draft, chosen = draft_of_rank(config, pair.target, pair, variant, device=device, dtype=dtype)
    packed = packs_weights(config, device, dtype)
    kv = kv_dtype_of(config, device, dtype)
    model = FloorModel.of(pair.target, draft, dtype, variant, config.variant.token_map, pair.from_config, packed=packed, kv_dtype=kv)
    measured = read_measured(options.measured, variant, config.sampling.stated_temperature) if options.measured is not None else None
    here = measured.on(config.hardware.name, device) if measured is not None else None
    notes = list(pair.notes)
    if size > 1:
        notes.append(f"memory, floors and times are those of one of {size} ranks, without the sums between them")
    if chosen is not None:
        notes.append(f"the draft on {size} ranks: {chosen}")
    passes = _time_passes(config, variant, pair, model, say, notes) if options.measure and device == "cpu" else None
    hardware = resolve_hardware(config, device, dtype, here, passes, working_set=model.working_set(PLAIN, 1, context))
    acceptance = resolve_acceptance(config, variant, measured)
    efficiency: Timing = passes or (calibrate(model, here, hardware) if here is not None else None) or Efficiency()
    checked = predictions(model, here, hardware, Efficiency(), passes) if here is not None else []
    if measured is not None and not checked:
        notes.append("no measured side ran on this hardware with its cycle timed: of the file only its acceptance is used")
    notes += _unknowns(variant, hardware, passes)
    heads = pair.draft.num_heads if pair.draft is not None else 1
    configured = configured_shape(config, variant, pair, heads)
    lengths = {shape: acceptance.length(shape) for shape in candidate_shapes(variant, heads, deepest(pair))}
    if configured is not None:
        lengths[configured] = acceptance.length(configured)
    outlook = Outlook(model, context, hardware, efficiency)
    rows = [_row(outlook, lengths, batch) for batch in options.batches]
    own = {configured: lengths[configured]} if configured is not None else {}
    about_configured = [choice for batch in options.batches for choice in outlook.rank(own, batch)] if own else []
    widest = configured or max((row.best.shape for row in rows), key=lambda shape: (shape.window_width, shape.num_draft_tokens))
    fitting = capacity(config, pair, model, widest, context, device=device, dtype=dtype, memory=hardware.memory)
    maximum = fitting.rows or LARGEST_BATCH
    shown = configured or rows[0].best.shape
    prices = price_ranks(config, whole, variant, context, dtype=dtype, hardware=hardware) if device == "cuda" else []
    launches = _launches(config, pair, variant, outlook, shown, options.batches[0], dtype) if device == "cuda" and size == 1 else []
    return Advice(
        pair=pair,
        variant=variant,
        dtype=dtype,
        outlook=outlook,
        acceptance=acceptance,
        rows=rows,
        configured=about_configured,
        crossover=outlook.crossover(lengths, maximum) if lengths else None,
        capacity=fitting,
        predictions=checked,
        launches=launches,
        shortfall=find_shortfall(config, pair, model, widest, fitting, dtype, hardware.memory) if device == "cuda" else None,
        ranks=prices,
        notes=notes,
    )


def _launches(
    config: LaunchConfig, pair: ModelPair, variant: Variant, outlook: Outlook, shape: CycleShape, batch: int, dtype: str
) -> list[CycleEstimate]:
    hardware, context = outlook.hardware, outlook.context
    steps = planned_steps(config, pair, variant, shape, batch, context, dtype) if hardware.name in DEVICES else None
    if steps is None:
        return []
    floor_ms = outlook.predict(shape, batch).floor_ms
    return [estimate_cycle(steps, shape, batch, context, floor_ms, hardware, programmatic=flag) for flag in (False, True)]


def _row(outlook: Outlook, lengths: Mapping[CycleShape, float], batch: int) -> Row:
    [plain] = outlook.rank({PLAIN: 1.0}, batch)
    best = recommend([plain, *outlook.rank(lengths, batch)])
    return Row(plain, best, outlook.free_width(batch), best.prediction.cycle_ms / plain.prediction.cycle_ms)


def recommend(ranked: Sequence[Ranked]) -> Ranked:
    """The shape with the fewest nodes, then the fewest steps, among those within :data:`CLOSE` of the fastest.

    Plain decoding is among the candidates, so a shape is recommended only if it is predicted to be faster than that by more than
    :data:`CLOSE`.
    """
    fastest = max(entry.tokens_per_second for entry in ranked)
    near = [entry for entry in ranked if entry.tokens_per_second >= (1 - CLOSE) * fastest]
    return min(near, key=lambda entry: (entry.shape.num_draft_tokens, entry.shape.num_steps, entry.shape.topk))


def max_steps(pair: ModelPair) -> int | None:
    """The most levels the draft network can draft; None: any number."""
    return pair.draft.max_steps if pair.draft is not None else None


def deepest(pair: ModelPair) -> int | None:
    """Largest S that the block of the draft, and the sliding windows of target and draft, allow; None: any."""
    models = [pair.target, *([pair.draft.decoder] if pair.draft is not None else [])]
    windows = [window for model in models for window in model.sliding_window if window is not None]
    limits = [max_steps(pair), min(windows) - 1 if windows else None]
    return min((limit for limit in limits if limit is not None), default=None)


def configured_shape(config: LaunchConfig, variant: Variant, pair: ModelPair, heads: int) -> CycleShape | None:
    """The shape that the ``variant`` group sets; None if it sets none."""
    drafting = config.variant
    if drafting.tree_choices is None and all(value is None for value in (drafting.num_steps, drafting.topk, drafting.num_draft_tokens)):
        return None
    shape = resolve_shape(variant, drafting, pair.target.family, heads, max_steps(pair))
    return shape if shape.num_steps else None


def device_and_dtype(config: LaunchConfig, pair: ModelPair) -> tuple[str, str]:
    """Device and dtype as the engine would resolve them; no GPU is needed to plan for one."""
    device = resolve_device(config.hardware.device)
    dtype = config.hardware.dtype
    return device, dtype if dtype != "auto" else "float32" if device == "cpu" else pair.target.dtype


def resolve_hardware(
    config: LaunchConfig, device: str, dtype: str, here: Measured | None, passes: PassTimes | None = None, *, working_set: float
) -> Hardware:
    """Figures of the hardware: measured now, else measured with the sides of a file, else those of the ``hardware`` group.

    Args:
        working_set: bytes that a cycle touches, which a CPU's caches may hold.

    Raises:
        ConfigError: there are none; the message says what can be set.
    """
    given = config.hardware
    gib = given.memory_gib or given.capacity_gib
    memory = int(gib * _GIB) if gib is not None else None
    if memory is None and device == "cpu":
        from ...graphs.memory import available_bytes

        memory = available_bytes(device, None)
    flops = 1e12 * given.tflops if given.tflops is not None else None
    if passes is not None:
        return Hardware(passes.bandwidth, flops, memory, given.name, "bandwidth measured with the passes")
    if config.plan.measure:
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("plan.measure", "false, or a machine with this device (torch sees no CUDA device)", "true")
        if given.threads is not None:
            torch.set_num_threads(given.threads)
        return Hardware(
            copy_bandwidth(device, working_set=working_set), matmul_rate(device, dtype), memory, given.name, "measured on this machine"
        )
    if here is not None and here.bandwidth is not None:
        return Hardware(here.bandwidth, flops, memory, given.name, f"bandwidth measured, {here.file}")
    if given.bandwidth_gbs is None:
        expected = "figures: hardware=h200 (or b200, h100, a100, l40s, rtx4090), a number in GB/s, plan.measure=true, or plan.measured=FILE"
        raise ConfigError("hardware.bandwidth_gbs", expected, f"none with hardware={given.name}")
    return Hardware(1e9 * given.bandwidth_gbs, flops, memory, given.name, f"hardware={given.name}")


def resolve_acceptance(config: LaunchConfig, variant: Variant, measured: Measured | None) -> Acceptance:
    """Shares that the user gave; else measured ones; else the guess."""
    usual = usual_sibling(config)
    if config.plan.acceptance is not None:
        return Acceptance(tuple(config.plan.acceptance), "plan.acceptance", usual)
    found = acceptance_of(measured, usual) if measured is not None else None
    return found or Acceptance(source="a guess" if variant.has_network else "a guess made for draft networks", sibling=usual)

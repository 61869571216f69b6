"""Config and checkpoint facts become one frozen Plan: the only place where numbers are derived. Imports no torch."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .catalog import Variant, resolve_variant
from .config import Config, VariantConfig
from .errors import ConfigError
from .shapes import PLAIN, CycleShape, GraphKey

if TYPE_CHECKING:
    from .facts import DraftFacts, ModelFacts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every static number of an engine. Letters are those of :mod:`graphspec.shapes`."""

    variant: Variant
    target: ModelFacts
    draft: DraftFacts | None
    shape: CycleShape
    accept_width: int
    window_width: int
    num_words: int
    feature_width: int
    tap_layers: tuple[int, ...]
    buckets: tuple[int, ...]
    max_rows: int
    max_context: int
    max_positions: int
    """Rows of the RoPE tables: the context plus the window behind it."""
    draft_context: int
    """Positions the drafter was made for; rows past it are no longer drafted for."""
    page_size: int
    table_width: int
    num_pages: int
    """Pages of each pool, dummy page included."""
    page_updates: int
    """Page-table entries one launch can change."""
    prefill_chunks: tuple[int, ...]
    ring_depth: int
    run_ahead: int
    max_stop_ids: int
    coupled_noise: bool
    device: str
    dtype: str
    kernels: str
    attention: str
    linear: str
    captured: bool

    @property
    def tokens_in_flight(self) -> int:
        """Slots past the known length that a launch may touch, for every cycle not yet read and the next one."""
        return self.run_ahead * self.accept_width + self.window_width

    def graph_keys(self, sampling: bool) -> tuple[GraphKey, ...]:
        """Keys of every cycle, largest bucket first (the order of capture)."""
        return tuple(GraphKey(bucket, self.shape, sampling) for bucket in sorted(self.buckets, reverse=True))

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` slots."""
        return math.ceil(tokens / self.page_size)

    def describe(self) -> dict[str, Any]:
        """Flat, printable view of the plan."""
        described = {k: v for k, v in asdict(self).items() if k not in ("variant", "target", "draft", "shape")}
        shape = {"num_steps": self.shape.num_steps, "topk": self.shape.topk, "num_draft_tokens": self.shape.num_draft_tokens}
        return {
            "variant": self.variant.name,
            "target": self.target.path,
            "draft": self.draft.path if self.draft else None,
            **shape,
            **described,
        }


def resolve_shape(variant: Variant, config: VariantConfig, architecture: str) -> CycleShape:
    """``(S, K, N)`` from the config, or automatic when none is set.

    Raises:
        ConfigError: some of the three are set and others not, or they contradict each other.
    """
    given = {"num_steps": config.num_steps, "topk": config.topk, "num_draft_tokens": config.num_draft_tokens}
    missing = [key for key, value in given.items() if value is None]
    if not variant.speculates:
        if len(missing) < len(given) and (config.num_steps or config.num_draft_tokens not in (None, 1)):
            raise ConfigError("variant.num_steps", f"nothing to draft with variant {variant.name!r}", given)
        return PLAIN
    if len(missing) == len(given):
        return variant.shape_for(architecture)
    if config.num_steps == 0:
        raise ConfigError("variant.num_steps", "at least 1 (variant=none decodes plainly)", 0)
    if config.topk == 1 and config.num_steps is not None:
        nodes = config.num_steps + 1
        if config.num_draft_tokens not in (None, nodes):
            logger.warning("topk=1 is a chain: num_draft_tokens=%s becomes num_steps + 1 = %s", config.num_draft_tokens, nodes)
        return CycleShape(config.num_steps, 1, nodes)
    if config.num_steps is None or config.topk is None or config.num_draft_tokens is None:
        raise ConfigError(
            ", ".join(f"variant.{key}" for key in missing), "a value, since the others are set (or leave all three unset)", "no value"
        )
    return CycleShape(config.num_steps, config.topk, config.num_draft_tokens)


def make_plan(config: Config, target: ModelFacts, draft: DraftFacts | None, *, device: str) -> Plan:
    """Derive every number of an engine.

    Args:
        config: what the user asked for.
        target: facts of the target checkpoint.
        draft: facts of the draft checkpoint; None for variants without a network.
        device: the resolved device, ``cpu`` or ``cuda``.

    Raises:
        ConfigError: a value out of range for this model, or values that contradict each other.
    """
    variant, runtime = resolve_variant(config.variant.name), config.runtime
    shape = resolve_shape(variant, config.variant, target.architecture)
    max_context = config.model.max_context or target.max_position_embeddings
    longest = int(target.max_position_embeddings * (target.rope.factor if target.rope.kind == "dynamic" else 1))
    if max_context > longest:
        raise ConfigError("model.max_context", f"at most the checkpoint's {longest}", max_context)
    narrowest = min((window for window in target.sliding_window if window is not None), default=None)
    if narrowest is not None and narrowest < shape.accept_width:
        raise ConfigError("variant.num_steps", f"less than the target's sliding window of {narrowest}", shape.num_steps)
    buckets = tuple(bucket for bucket in runtime.buckets if bucket < runtime.max_rows)
    largest = min((bucket for bucket in runtime.buckets if bucket >= runtime.max_rows), default=None)
    if largest is None:
        raise ConfigError("runtime.buckets", f"a bucket of at least max_rows = {runtime.max_rows} lanes", list(runtime.buckets))
    buckets = (*buckets, largest)

    window, accept = shape.window_width, shape.accept_width
    ahead = runtime.run_ahead * accept + window
    slots = max_context + ahead
    table_width = math.ceil(slots / runtime.page_size)
    pages = runtime.num_pages if runtime.num_pages is not None else runtime.max_rows * table_width
    least = math.ceil((1 + window) / runtime.page_size)
    if pages < least:
        raise ConfigError(
            "runtime.num_pages", f"at least {least} pages of {runtime.page_size} (one token and the window of {window} slots)", pages
        )

    largest_chunk = runtime.prefill_chunks[-1]
    growth = largest * (math.ceil((accept + window) / runtime.page_size) + 1)
    page_updates = max(growth, math.ceil((largest_chunk + ahead) / runtime.page_size) + 1)

    kernels = config.kernels.mode if config.kernels.mode != "auto" else {"eager": "reference"}.get(runtime.name, "compiled")
    captured = runtime.name == "captured"
    if captured and device != "cuda":
        raise ConfigError("runtime", "eager or compiled on this machine (a captured cycle is a CUDA graph)", f"captured on {device}")
    dtype = config.hardware.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else target.dtype
    return Plan(
        variant=variant,
        target=target,
        draft=draft,
        shape=shape,
        accept_width=accept,
        window_width=window,
        num_words=shape.num_words,
        feature_width=draft.feature_size if draft else 0,
        tap_layers=draft.tap_layers if draft else (),
        buckets=buckets,
        max_rows=runtime.max_rows,
        max_context=max_context,
        max_positions=table_width * runtime.page_size,
        draft_context=draft.decoder.max_position_embeddings if draft else max_context,
        page_size=runtime.page_size,
        table_width=table_width,
        num_pages=pages + 1,
        page_updates=page_updates,
        prefill_chunks=tuple(runtime.prefill_chunks),
        ring_depth=runtime.run_ahead + 2,
        run_ahead=runtime.run_ahead,
        max_stop_ids=runtime.max_stop_ids,
        coupled_noise=config.variant.draft_noise == "coupled",
        device=device,
        dtype=dtype,
        kernels=kernels,
        attention=config.kernels.attention,
        linear=config.kernels.linear,
        captured=captured,
    )

"""Config and checkpoint facts become one frozen Plan: the only place where numbers are derived. Imports no torch."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..config.catalog import Variant, resolve_variant
from ..config.checks import brief
from ..config.schema import HOST_STEP_OVER_LATENT_ROWS, Config, NgramSettings, VariantConfig
from ..errors import ConfigError
from ..shapes import (  # fmt: skip
    MAX_WINDOW,
    NEUTRAL,
    PLAIN,
    WORD_BITS,
    CycleShape,
    GraphKey,
    SamplingClass,
    SamplingDefaults,
    prefill_budget,
    prefill_chunks,
    prepared_classes,
)
from .acceptance import AcceptPlan, resolve_accept
from .draft_parallel import DraftParallel, resolve_draft_parallel
from .dtypes import resolve_dtypes
from .numerics import resolve_activations, resolve_numerics
from .own_modules import check_own_modules
from .runtime import Runtime, resolve_runtime
from .static_tree import StaticTree

if TYPE_CHECKING:
    from ..facts import DraftFacts, ModelFacts
    from ..facts.family import Family

logger = logging.getLogger(__name__)

TREE_NODES = 8
"""Fewest nodes of a tree without a given number; the number of EAGLE-3's automatic tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every static number of an engine. Letters are those of :mod:`graphspec.shapes`."""

    variant: Variant
    target: ModelFacts
    draft: DraftFacts | None
    draft_parallel: DraftParallel | None
    """Which parts of the draft network a rank holds; None: there is no network, or one rank."""
    shape: CycleShape
    static_tree: StaticTree | None
    """A fixed topology instead of the best candidates of each cycle."""
    accept_width: int
    window_width: int
    window_capacity: int
    """Ac: tokens a row may commit before the drafter has to read them; ``accept_width`` where every cycle drafts."""
    num_words: int
    lookback: int
    """Y: committed entries before the window that the drafter reads again; one per head but the first."""
    ngram: NgramSettings
    feature_width: int
    """F; 0: the drafter reads no feature of the target."""
    tap_layers: tuple[int, ...]
    buckets: tuple[int, ...]
    max_rows: int
    max_context: int
    max_positions: int
    """Rows of the RoPE tables: the context plus the window after it."""
    draft_context: int
    """Positions the drafter was made for; rows past it are no longer drafted for."""
    page_size: int
    table_width: int
    num_pages: int
    """Pages of each pool, dummy page included."""
    page_updates: int
    """Page-table entries any launch can change."""
    prefill_chunks: tuple[int, ...]
    prefill_lanes: int
    """Most prompts whose chunks are read by one launch."""
    prefill_tokens_per_cycle: int
    """See :func:`graphspec.shapes.prefill_budget`."""
    max_queued: int | None
    ring_depth: int
    cycles_in_flight: int
    """Cycles queued before the host waits for the oldest one's result."""
    bucket_shapes: tuple[CycleShape, ...]
    """The cycle's shape for each of ``buckets``: ``shape``, or a shallower one. Where depths may change, the one to begin with."""
    depths: tuple[int, ...]
    """Depths that every bucket has cycles of in addition to those of ``shape`` and its own; empty: a bucket's depth never changes."""
    prefix_cache: bool
    """Requests share the pages of equal beginnings."""
    max_stop_ids: int
    max_logit_bias: int
    max_logprobs: int
    sampling_defaults: SamplingDefaults
    sampling_classes: tuple[SamplingClass, ...]
    """Whose programs are made at load where they are captured."""
    max_bad_words: int
    max_bad_word_tokens: int
    accept: AcceptPlan
    device: str
    dtype: str
    """Dtype of activations and kernels; see :class:`.dtypes.Dtypes`."""
    weight_dtype: str
    kv_dtype: str
    kernels: str
    attention: str
    linear: str
    numerics: str
    activations: str
    draft_activations: str
    programmatic_launch: bool | None
    compile_around: bool
    runtime: Runtime
    debug: bool

    @property
    def run_ahead(self) -> int:
        """Cycles launched after the oldest one whose result has not been read."""
        return self.cycles_in_flight - 1

    @property
    def shapes(self) -> tuple[CycleShape, ...]:
        """Shapes for which cycles exist, deepest first. Slots, window and ring have the sizes of ``shape``, the widest."""
        return tuple(sorted({self.shape.shortened(depth) for bucket in self.buckets for depth in self.depths_of(bucket)}, reverse=True))

    def depths_of(self, bucket: int) -> tuple[int, ...]:
        """Draft depths that ``bucket`` has cycles of, ascending; one where its depth never changes."""
        first = self.bucket_shapes[self.buckets.index(bucket)].num_steps
        return tuple(sorted({first, *self.depths, self.shape.num_steps})) if self.depths else (first,)

    @property
    def catches_up(self) -> bool:
        """Rows with a draft network may decode plainly for a while; its window then grows until the network reads all of it at once."""
        return self.draft_reads_tokens and any(0 in self.depths_of(bucket) for bucket in self.buckets)

    @property
    def draft_reads_tokens(self) -> bool:
        """There is a draft network that must read every committed token, for keys and values of its own."""
        return self.draft is not None and not self.draft.target_layers

    @property
    def keeps_page_features(self) -> bool:
        """Pages hold the target's feature of their last token, which the drafter's first row after a prefix hit reads."""
        return self.prefix_cache and self.feature_width > 0 and self.draft_reads_tokens

    def key(self, bucket: int, sampling: SamplingClass, depth: int | None = None, *, catch_up: bool = False) -> GraphKey:
        """A cycle of ``bucket`` lanes.

        Args:
            bucket: one of ``buckets``.
            sampling: what the requests ask of the sampler.
            depth: one of :meth:`depths_of`; None: the one to begin with.
            catch_up: the cycle, of depth 0, in which the drafter reads the whole window first.
        """
        if catch_up:
            return GraphKey(bucket, self.shape.shortened(0), sampling.of_cycles, catch_up=True)
        shape = self.bucket_shapes[self.buckets.index(bucket)]
        return GraphKey(bucket, shape if depth is None else self.shape.shortened(depth), sampling.of_cycles)

    @property
    def compiles(self) -> bool:
        """Cycles run through torch.compile; fused kernels on the CPU are interpreted, and their surroundings then run as they stand."""
        return self.kernels == "compiled" or (self.kernels == "fused" and self.device == "cuda" and self.compile_around)

    def numerics_of(self, model: ModelFacts) -> str:
        """Numerics of the target or of the draft's decoder, which fused kernels hold to no law."""
        return self.numerics if model is self.target else "fast"

    @property
    def cycles_need_host_step(self) -> bool:
        """The attention of every cycle needs a host step before its launch, from row lengths: nothing else may be in flight."""
        return self.attention in HOST_STEP_OVER_LATENT_ROWS and self.target.latent is not None

    @property
    def draft_attends(self) -> bool:
        """Writing a token's draft KV takes attention."""
        return self.draft is not None and self.draft.attends

    @property
    def keeps_history(self) -> bool:
        """The device keeps every row's tokens."""
        return self.variant.drafter == "history"

    @property
    def tokens_in_flight(self) -> int:
        """Slots past the known length that a launch may touch, for every cycle not yet read and the next one."""
        return self.run_ahead * self.accept_width + self.window_width

    @property
    def prefill_shapes(self) -> tuple[tuple[int, int], ...]:
        """``(lanes, chunk)`` of every prefill program: each chunk alone, then several lanes of those that together fit into the largest."""
        maximum, lanes = self.prefill_chunks[-1], self.prefill_lanes
        several = [chunk for chunk in self.prefill_chunks if 1 < lanes <= maximum // chunk]
        return (*((1, chunk) for chunk in self.prefill_chunks), *((lanes, chunk) for chunk in several))

    def graph_keys(self, sampling: SamplingClass) -> tuple[GraphKey, ...]:
        """Keys of every cycle, largest bucket first, then deepest first; the one that catches up, if any, ends its bucket."""
        keys: list[GraphKey] = []
        for bucket in sorted(self.buckets, reverse=True):
            keys += [self.key(bucket, sampling, depth) for depth in reversed(self.depths_of(bucket))]
            keys += [self.key(bucket, sampling, catch_up=True)] if self.catches_up else []
        return tuple(keys)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` slots."""
        return math.ceil(tokens / self.page_size)

    def describe(self) -> dict[str, Any]:
        """Flat, printable view of the plan."""
        spelled = ("variant", "target", "draft", "draft_parallel", "shape", "static_tree", "bucket_shapes", "runtime")
        described = {k: v for k, v in asdict(self).items() if k not in spelled}
        shape = {"num_steps": self.shape.num_steps, "topk": self.shape.topk, "num_draft_tokens": self.shape.num_draft_tokens}
        return {
            "variant": self.variant.name,
            "target": self.target.path,
            "draft": self.draft.path if self.draft else None,
            "draft_parallel": str(self.draft_parallel) if self.draft_parallel else None,
            "runtime": str(self.runtime),
            **shape,
            **described,
            "depth_per_bucket": {b: s.num_steps for b, s in zip(self.buckets, self.bucket_shapes, strict=True) if s != self.shape},
        }


def resolve_shape(variant: Variant, config: VariantConfig, family: Family, heads: int = 1, max_steps: int | None = None) -> CycleShape:
    """``(S, K, N)`` from the config. What is unset is that of the automatic shape, made to fit what is set.

    Args:
        variant: its catalog entry.
        config: what the user asked for.
        family: of the target.
        heads: prediction heads of the draft with layers of their own; more than one means one per step.
        max_steps: most levels the draft can give; None: any number.

    Raises:
        ConfigError: the numbers contradict each other, the variant or the draft.
    """
    given = {"num_steps": config.num_steps, "topk": config.topk, "num_draft_tokens": config.num_draft_tokens}
    unset = all(value is None for value in given.values())
    if not variant.speculates:
        if config.num_steps or config.num_draft_tokens not in (None, 1):
            key = "num_steps" if config.num_steps else "num_draft_tokens"
            raise ConfigError(f"variant.{key}", f"null with variant={variant.name}, which drafts nothing", given[key])
        return PLAIN
    if config.tree_choices is not None:
        if variant.drafter != "network" or variant.auto_shape.pool != "beams" or heads > 1:
            raise ConfigError(
                "variant.tree_choices",
                "null: only a drafter with one network, run step by step, fills a static tree",
                brief(config.tree_choices),
            )
        if not unset:
            raise ConfigError("variant.tree_choices", "num_steps, topk and num_draft_tokens unset: the tree says them", given)
        return StaticTree.of(config.tree_choices).shape
    auto = (variant.auto_tree if family.drafts_trees else None) or variant.auto_shape
    if heads > 1:
        auto = CycleShape(heads, 1, heads + 1)
    if max_steps is not None and max_steps < auto.num_steps:
        auto = auto.shortened(max_steps)
    try:
        shape = auto if unset else _fit(auto, config.num_steps, config.topk, config.num_draft_tokens)
    except ConfigError as error:
        # A shape knows its numbers by their bare names.
        keys = [key if key.startswith("variant.") else f"variant.{key}" for key in error.key.split(", ")]
        raise ConfigError(", ".join(keys), error.expected, error.found, error.hint) from error
    if max_steps is not None and shape.num_steps > max_steps:
        raise ConfigError("variant.num_steps", f"at most {max_steps}, the block of the draft", shape.num_steps)
    if heads > 1 and (shape.topk > 1 or shape.num_steps > heads):
        raise ConfigError("variant.num_steps, variant.topk", f"at most {heads} steps, one per head of the draft, and topk = 1", given)
    return shape


def _fit(auto: CycleShape, steps: int | None, topk: int | None, nodes: int | None) -> CycleShape:
    """The shape of the numbers that are set, the others as in ``auto`` as far as these allow.

    Raises:
        ConfigError: the ones that are set contradict each other.
    """
    if steps == 0:
        raise ConfigError("variant.num_steps", "at least 1 (variant=none decodes plainly)", 0)
    if nodes == 1:
        raise ConfigError("variant.num_draft_tokens", "at least 2, the root and a draft (variant=none decodes plainly)", 1)
    fan_out = topk if topk is not None else auto.topk
    if fan_out == 1:
        depth = steps if steps is not None else nodes - 1 if nodes is not None else auto.num_steps
        if nodes not in (None, depth + 1):
            if topk is None:
                expected = f"a value above 1, or num_draft_tokens = num_steps + 1 = {depth + 1}: the automatic shape is a chain"
                raise ConfigError("variant.topk", expected, f"num_draft_tokens = {nodes}")
            logger.warning("topk=1 is a chain: num_draft_tokens=%s becomes num_steps + 1 = %s", nodes, depth + 1)
        return CycleShape(depth, 1, depth + 1, auto.pool)
    # A tree of N nodes is no deeper than its N - 1 drafts.
    depth = steps if steps is not None else min(auto.num_steps, nodes - 1 if nodes is not None else auto.num_steps)
    if nodes is None:
        fullest = CycleShape(depth, fan_out, depth + 1, auto.pool).num_candidates
        if auto.pool == "nodes":
            fullest = sum(fan_out**level for level in range(1, depth + 1))
        nodes = min(max(auto.num_draft_tokens, TREE_NODES, depth + 1), fullest + 1)
    return CycleShape(depth, fan_out, nodes, auto.pool)


def resolve_bucket_shapes(
    depths: Mapping[int, int],
    adaptive: Sequence[int],
    buckets: tuple[int, ...],
    shape: CycleShape,
    variant: Variant,
    accept: AcceptPlan,
    *,
    fixed: bool,
) -> tuple[CycleShape, ...]:
    """The shape of each bucket's first cycle.

    Args:
        depths: bucket to draft depth.
        adaptive: depths that cycles may change to.
        buckets: all there are.
        shape: the widest.
        variant: its catalog entry.
        accept: the acceptance rule.
        fixed: the draft can't stop early: a static tree, or one head per step, whose KV a shorter cycle would not write.

    Raises:
        ConfigError: no such bucket, a depth that is none, or a drafter or rule whose depth is fixed.
    """
    key = "runtime.depth_per_bucket"
    if (depths or adaptive) and (fixed or variant.drafter not in ("network", "history", "host") or accept.synthetic):
        what = "a drafter that is one network or matches n-grams, no static tree, and a rule that forces no length"
        if depths:
            raise ConfigError(key, f"{{}}, or {what}", dict(depths))
        raise ConfigError("adaptive.depths", f"[], or {what}", list(adaptive))
    if adaptive and adaptive[-1] > shape.num_steps:
        raise ConfigError("adaptive.depths", f"at most num_steps = {shape.num_steps}", adaptive[-1])
    for bucket, depth in depths.items():
        if bucket not in buckets:
            raise ConfigError(key, "buckets of runtime.buckets, " + ", ".join(map(str, buckets)), bucket)
        if depth > shape.num_steps:
            raise ConfigError(f"{key}[{bucket}]", f"at most num_steps = {shape.num_steps}", depth)
    return tuple(shape.shortened(depths.get(bucket, shape.num_steps)) for bucket in buckets)


def resolve_window_capacity(backlog: int, shape: CycleShape, draft: DraftFacts | None, *, plain: bool) -> int:
    """Ac: entries of a row's window.

    Args:
        backlog: tokens a row may decode at depth 0 before the drafter reads them.
        shape: the widest.
        draft: facts of the draft network, if there is one.
        plain: some cycle has depth 0.

    Raises:
        ConfigError: more than one pass of the drafter takes.
    """
    if draft is None or draft.target_layers or not plain:
        return shape.accept_width
    capacity = max(backlog, shape.accept_width)
    # Entries of a pass see each other whatever the distance.
    narrowest = min((window for window in draft.decoder.sliding_window if window is not None), default=MAX_WINDOW)
    if capacity > MAX_WINDOW:
        raise ConfigError("adaptive.backlog", f"at most {MAX_WINDOW}", backlog)
    if capacity > narrowest:
        raise ConfigError("adaptive.backlog", f"at most the draft's sliding window of {narrowest}", backlog)
    return capacity


def _check_ranks(config: Config, target: ModelFacts) -> None:
    """Refuse what several ranks don't do."""
    spread = f"with runtime.tensor_parallel={target.sharding.size}"
    if config.variant.token_map is not None:
        raise ConfigError("variant.token_map", f"null {spread}: no rank has all rows of the head", config.variant.token_map)
    if config.kernels.attention == "flashinfer":
        raise ConfigError("kernels.attention", f"another implementation {spread}: its host step is not shared", "flashinfer")
    if config.kernels.linear_table is not None:
        raise ConfigError("kernels.linear_table", f"null {spread}: each rank would choose for itself", config.kernels.linear_table)


def make_plan(config: Config, target: ModelFacts, draft: DraftFacts | None, *, device: str, defaults: SamplingDefaults = NEUTRAL) -> Plan:
    """Derive every number of an engine.

    Args:
        config: what the user asked for.
        target: facts of the target checkpoint.
        draft: facts of the draft checkpoint; None for variants without a network.
        device: the resolved device, ``cpu`` or ``cuda``.
        defaults: what a request is sampled with where it says nothing.

    Raises:
        ConfigError: a value out of range for this model, or values that contradict each other.
    """
    variant, runtime = resolve_variant(config.variant.name), config.runtime
    shape = resolve_shape(variant, config.variant, target.family, *((draft.num_heads, draft.max_steps) if draft else (1, None)))
    max_context = config.model.max_context or target.max_position_embeddings
    if max_context > target.longest_context:
        raise ConfigError("model.max_context", f"at most the checkpoint's {target.longest_context}", max_context)
    entries = {"target": shape.accept_width, "draft": max((run.rows for run in draft.passes(shape)[:1]), default=0) if draft else 0}
    for whose, model in (("target", target), ("draft", draft.decoder if draft else None)):
        narrowest = min((window for window in model.sliding_window if window is not None), default=None) if model else None
        if narrowest is not None and narrowest < entries[whose]:
            expected = f"few enough that a pass of {entries[whose]} tokens lies in the {whose}'s sliding window of {narrowest}"
            raise ConfigError("variant.num_steps", expected, shape.num_steps)
    if target.family.own_modules:
        check_own_modules(config)
    if target.sharding.sharded:
        _check_ranks(config, target)
    if config.variant.token_map is not None and not variant.full_vocabulary:
        what = "brings its own vocabulary" if variant.has_network else "has no draft network"
        raise ConfigError("variant.token_map", f"null: variant {variant.name} {what}", config.variant.token_map)
    if config.variant.ngram.corpus is not None and variant.drafter != "host":
        raise ConfigError("variant.ngram.corpus", "null: only a drafter on the host reads a corpus", config.variant.ngram.corpus)
    if draft is not None and shape.topk > draft.draft_vocab_size:
        raise ConfigError("variant.topk", f"at most the draft's vocabulary of {draft.draft_vocab_size}", shape.topk)
    run_ahead = runtime.cycles_in_flight - 1
    if variant.drafter == "host" and run_ahead:
        raise ConfigError(
            "runtime.cycles_in_flight", "1: the host reads every cycle before it proposes the next tree", runtime.cycles_in_flight
        )
    if config.kernels.attention in HOST_STEP_OVER_LATENT_ROWS and target.latent is not None:
        if run_ahead:
            expected = f"1 with kernels.attention={config.kernels.attention} over latent rows: every cycle needs a host step"
            raise ConfigError("runtime.cycles_in_flight", expected, runtime.cycles_in_flight)
        if not shape.is_chain:
            expected = f"1 with kernels.attention={config.kernels.attention} over latent rows: its kernels take no tree mask"
            raise ConfigError("variant.topk", expected, shape.topk, "kernels.attention=fused serves trees")
    if config.kernels.attention in HOST_STEP_OVER_LATENT_ROWS and (target.family.attention_sinks or target.multipliers.score_softcap):
        expected = "another implementation for a target with attention sinks or capped scores"
        raise ConfigError("kernels.attention", expected, config.kernels.attention)
    buckets = tuple(bucket for bucket in runtime.buckets if bucket < runtime.max_rows)
    largest = min((bucket for bucket in runtime.buckets if bucket >= runtime.max_rows), default=None)
    if largest is None:
        raise ConfigError("runtime.buckets", f"a bucket of at least max_rows = {runtime.max_rows} lanes", list(runtime.buckets))
    buckets = (*buckets, largest)

    window, accept = shape.window_width if draft is None else max(shape.window_width, draft.slots(shape)), shape.accept_width
    if window > MAX_WINDOW:
        raise ConfigError("variant.num_steps", f"a window of at most {MAX_WINDOW} slots", f"{window}, which the draft's block takes")
    ahead = run_ahead * accept + window
    slots = max_context + ahead
    table_width = math.ceil(slots / runtime.page_size)
    pages = runtime.num_pages if runtime.num_pages is not None else runtime.max_rows * table_width
    minimum = math.ceil((1 + window) / runtime.page_size)
    if pages < minimum:
        raise ConfigError(
            "runtime.num_pages", f"at least {minimum} pages of {runtime.page_size} (one token and the window of {window} slots)", pages
        )

    chunks = tuple(runtime.prefill_chunks) if runtime.prefill_chunks is not None else prefill_chunks(device, max_context)
    # The work lists of a host step are made for the chunk of one prompt.
    prefill_lanes = 1 if config.kernels.attention in HOST_STEP_OVER_LATENT_ROWS else min(runtime.prefill_lanes, runtime.max_rows)
    page_updates = largest * (math.ceil((accept + window) / runtime.page_size) + 1)

    chosen = resolve_runtime(runtime.name, device, eager=target.family.own_modules)
    kernels = config.kernels.mode if config.kernels.mode != "auto" else chosen.kernels
    if kernels == "compiled" and not config.kernels.compile_around:
        raise ConfigError("kernels.compile_around", "true with kernels.mode=compiled, which compiles everything", False)
    draft_context = draft.decoder.longest_context if draft else max_context
    if draft_context < max_context:
        logger.warning("the draft was made for %d positions, the context is %d: rows past them decode plainly", draft_context, max_context)
    lookback = draft.num_heads - 1 if draft else 0
    dtypes = resolve_dtypes(config.hardware.dtype, runtime.kv_dtype, target.dtype, device, kernels)
    own_draft, draft_parallel = resolve_draft_parallel(config, variant, target.sharding, draft, shape, device=device, dtype=dtypes.weights)
    static_tree = StaticTree.of(config.variant.tree_choices) if config.variant.tree_choices is not None and shape.topk > 1 else None
    rule = resolve_accept(config.accept, config.variant, shape, has_network=draft is not None)
    bucket_shapes = resolve_bucket_shapes(
        runtime.depth_per_bucket, config.adaptive.depths, buckets, shape, variant, rule, fixed=static_tree is not None or lookback > 0
    )
    plain = 0 in config.adaptive.depths or any(first.num_steps == 0 for first in bucket_shapes)
    nodes = max(bucket * own.num_draft_tokens for bucket, own in zip(buckets, bucket_shapes, strict=True))
    logprobs = min(runtime.max_logprobs, target.vocab_size)
    return Plan(
        variant=variant,
        target=target,
        draft=own_draft,
        draft_parallel=draft_parallel,
        shape=shape,
        static_tree=static_tree,
        accept_width=accept,
        window_width=window,
        window_capacity=resolve_window_capacity(config.adaptive.backlog, shape, draft, plain=plain),
        num_words=max(shape.num_words, math.ceil(max(accept + lookback, entries["draft"]) / WORD_BITS)),
        lookback=lookback,
        ngram=config.variant.ngram,
        feature_width=draft.feature_size if draft else 0,
        tap_layers=draft.tap_layers if draft else (),
        buckets=buckets,
        max_rows=runtime.max_rows,
        max_context=max_context,
        max_positions=table_width * runtime.page_size,
        draft_context=draft_context,
        page_size=runtime.page_size,
        table_width=table_width,
        num_pages=pages + 1,
        page_updates=page_updates,
        prefill_chunks=chunks,
        prefill_lanes=prefill_lanes,
        prefill_tokens_per_cycle=prefill_budget(chunks, runtime.prefill_tokens_per_cycle),
        max_queued=runtime.max_queued,
        ring_depth=runtime.cycles_in_flight + 1,
        cycles_in_flight=runtime.cycles_in_flight,
        bucket_shapes=bucket_shapes,
        depths=tuple(config.adaptive.depths),
        prefix_cache=variant.resolve_prefix_cache(runtime.prefix_cache, recurrent=target.recurrent is not None),
        max_stop_ids=runtime.max_stop_ids,
        max_logit_bias=runtime.max_logit_bias,
        max_logprobs=logprobs,
        sampling_defaults=defaults,
        sampling_classes=prepared_classes(runtime.sampling_classes, defaults, logprobs),
        max_bad_words=runtime.max_bad_words,
        max_bad_word_tokens=runtime.max_bad_word_tokens,
        accept=rule,
        device=device,
        dtype=dtypes.compute,
        weight_dtype=dtypes.weights,
        kv_dtype=dtypes.kv,
        kernels=kernels,
        attention=config.kernels.attention,
        linear=config.kernels.linear,
        numerics=resolve_numerics(config.kernels, kernels, target, device=device, dtype=dtypes.compute, nodes=nodes),
        activations=resolve_activations(config.kernels, kernels, device=device, dtype=dtypes.compute),
        draft_activations=config.kernels.draft_activations,
        programmatic_launch=config.kernels.programmatic_launch,
        compile_around=config.kernels.compile_around,
        runtime=chosen,
        debug=runtime.debug,
    )

"""Chooses the shapes that ``graphspec tune`` runs: chains and trees that are predicted to be fastest on this machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...config.catalog import Variant, resolve_variant
from ...config.command_options import LaunchConfig
from ...errors import ConfigError
from ...facts import DraftFacts, ModelFacts
from ...plan.plan import make_plan, resolve_shape
from ...shapes import MAX_WINDOW, PLAIN, CycleShape
from ..floor import FloorModel
from ..predict.advice import Efficiency, Outlook, candidate_shapes
from ..predict.capacity import kv_dtype_of, packs_weights
from ..predict.from_results import calibrate, of_rows, read_measured
from ..predict.model_pair import ModelPair, read_model_pair
from ..predict.plan import configured_shape, deepest, device_and_dtype, max_steps, resolve_acceptance, resolve_hardware

TRIED_FAN, TRIED_NODES = 4, 16
"""Most children and most nodes of the tree in the trial."""


@dataclass(frozen=True)
class Candidates:
    """The shapes that could be run."""

    config: LaunchConfig
    variant: Variant
    pair: ModelPair

    @classmethod
    def of(cls, config: LaunchConfig) -> Candidates:
        """Read the candidates of a configuration.

        Raises:
            ConfigError, CheckpointError: the configuration or a checkpoint is wrong.
        """
        variant = resolve_variant(config.variant.name)
        return cls(config, variant, read_model_pair(config.model.path, config.variant, variant, config.model.revision))

    @property
    def heads(self) -> int:
        """Prediction heads of the draft."""
        return self.pair.draft.num_heads if self.pair.draft is not None else 1

    @cached_property
    def given(self) -> dict[CycleShape, str]:
        """Shapes that are run regardless of their prediction, and why."""
        unset = replace(self.config.variant, num_steps=None, topk=None, num_draft_tokens=None)
        given = {resolve_shape(self.variant, unset, self.pair.target.family, self.heads, max_steps(self.pair)): "automatic"}
        configured = configured_shape(self.config, self.variant, self.pair, self.heads)
        if configured is not None:
            given.setdefault(configured, "configured")
        return given

    @cached_property
    def possible(self) -> list[CycleShape]:
        """Every chain and tree that this drafter can serve."""
        device, _ = device_and_dtype(self.config, self.pair)
        shapes = candidate_shapes(self.variant, self.heads, deepest(self.pair))
        return [shape for shape in shapes if _runs(self.config, shape, self.pair.target, self.pair.draft, device)]

    def tried(self) -> list[CycleShape]:
        """Shapes of the trial, which measures acceptance and the cost of width: a chain and a wide tree of the deepest given depth."""
        depth = max(shape.num_steps for shape in self.given)
        chains = [shape for shape in self.possible if shape.is_chain and shape.num_steps <= depth]
        trees = [
            shape
            for shape in self.possible
            if not shape.is_chain and shape.num_steps <= depth and shape.topk <= TRIED_FAN and shape.num_draft_tokens <= TRIED_NODES
        ]
        deepest = [max(chains, key=lambda shape: shape.num_steps)] if chains else []
        widest = [max(trees, key=lambda shape: (shape.num_draft_tokens, shape.num_steps, shape.topk))] if trees else []
        return deepest + widest


@dataclass(frozen=True, slots=True)
class Prospect:
    """A shape that is run.

    Attributes:
        why: ``automatic``, ``configured``, or the batch size at which it is predicted to be fast.
        ratios: batch to predicted ratio to the speed of plain decoding.
    """

    shape: CycleShape
    why: str
    ratios: dict[int, float]


def tried_shapes(config: LaunchConfig) -> list[list[int]]:
    """(S, K, N) of :meth:`Candidates.tried`; none where ``plan.measured`` replaces the trial."""
    return [] if config.plan.measured is not None else [shape.numbers for shape in Candidates.of(config).tried()]


def short_list(config: LaunchConfig, batches: Sequence[int], trial: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Rank the shapes of this drafter.

    The prediction is that of ``graphspec plan``, calibrated by the trial or by ``plan.measured``. Bandwidth and peak are measured where the
    ``hardware`` group has no figures; acceptance is that of the trial, unless ``plan.acceptance`` is set.

    Args:
        config: model, draft, workload; ``tune.candidates`` is the length of the list.
        trial: records of sides that ran the shapes of :func:`tried_shapes`, and of plain decoding.

    Returns:
        ``prospects`` (rows of ``shape``, ``why``, ``ratios``), ``heads`` of the draft, ``backlog`` (the longest that its window allows),
        and the sources of ``hardware``, ``acceptance`` and ``efficiency``.

    Raises:
        ConfigError, CheckpointError: the configuration, a checkpoint or ``plan.measured`` is wrong.
    """
    candidates = Candidates.of(config)
    variant, pair, given = candidates.variant, candidates.pair, candidates.given
    device, dtype = device_and_dtype(config, pair)
    measuring = replace(config, plan=replace(config.plan, measure=config.hardware.bandwidth_gbs is None))
    packed = packs_weights(config, device, dtype)
    kv = kv_dtype_of(config, device, dtype)
    model = FloorModel.of(pair.target, pair.draft, dtype, variant, config.variant.token_map, pair.from_config, packed=packed, kv_dtype=kv)
    context = (config.workload.input_tokens or 0) + config.workload.output_tokens // 2
    hardware = resolve_hardware(measuring, device, dtype, None, working_set=model.working_set(PLAIN, batches[0], context))

    measured = here = of_rows(trial, variant, "a trial") if trial else None
    if config.plan.measured is not None:
        measured = read_measured(config.plan.measured, variant, config.sampling.stated_temperature)
        here = measured.on(config.hardware.name, device)
    efficiency = (calibrate(model, here, hardware) if here is not None else None) or Efficiency()
    acceptance = resolve_acceptance(config, variant, measured)

    outlook = Outlook(model, context, hardware, efficiency)
    lengths = {shape: acceptance.length(shape) for shape in (*given, *candidates.possible)}
    ratios: dict[CycleShape, dict[int, float]] = {shape: {} for shape in lengths}
    for batch in batches:
        plain = outlook.predict(PLAIN, batch).tokens_per_second(1.0)
        for entry in outlook.rank(lengths, batch):
            ratios[entry.shape][batch] = entry.tokens_per_second / plain
    windows = [window for window in pair.draft.decoder.sliding_window if window is not None] if pair.draft is not None else []
    return {
        "prospects": [
            {"shape": p.shape.numbers, "why": p.why, "ratios": list(p.ratios.items())} for p in pick(given, ratios, config.tune.candidates)
        ],
        "heads": candidates.heads,
        "backlog": min([MAX_WINDOW, *windows]),
        "hardware": hardware.source,
        "acceptance": {"shares": list(acceptance.shares), "source": acceptance.source},
        "efficiency": efficiency.source,
    }


def pick(given: dict[CycleShape, str], ratios: dict[CycleShape, dict[int, float]], count: int) -> list[Prospect]:
    """Choose the shapes that are run.

    Shapes that differ only in their number of nodes do not differ much in speed, so one chain and one tree of each depth are considered:
    those with the highest geometric mean of predicted ratios. Batch sizes then take turns to choose their best, the smallest first. Their
    turns alternate between chains and trees, because a wrong prediction is usually wrong for all trees.

    Args:
        given: shapes that are run in any case, and why; they are part of ``count``.
        ratios: shape to batch to predicted ratio to plain decoding, with those of ``given``.
        count: number of shapes, unless more are given.
    """
    best: dict[tuple[int, bool], CycleShape] = {}
    for shape in sorted(ratios, key=lambda shape: (-math.prod(ratios[shape].values()), shape.num_draft_tokens, shape)):
        best.setdefault((shape.num_steps, shape.is_chain), shape)
    taken = {shape: Prospect(shape, why, ratios[shape]) for shape, why in given.items()}
    left = [shape for shape in best.values() if shape not in taken]
    batches = list(next(iter(ratios.values())))
    last: dict[int, CycleShape] = {}
    while left and len(taken) < count:
        turn, place = divmod(len(taken) - len(given), len(batches))
        batch = batches[place]
        others = [shape for shape in left if turn % 2 and shape.is_chain != last[batch].is_chain]
        shape = last[batch] = max(others or left, key=lambda shape: (ratios[shape][batch], -shape.num_draft_tokens))
        left.remove(shape)
        taken[shape] = Prospect(shape, f"predicted at batch {batch}", ratios[shape])
    return list(taken.values())


def _runs(config: LaunchConfig, shape: CycleShape, target: ModelFacts, draft: DraftFacts | None, device: str) -> bool:
    """Whether an engine of that shape can be planned with the rest of the configuration."""
    try:
        make_plan(config.with_shape(shape.numbers), target, draft, device=device)
    except ConfigError:
        return False
    return True

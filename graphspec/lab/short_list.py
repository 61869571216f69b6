"""Which shapes ``graphspec tune`` runs: those that are predicted to be fastest on this machine, one of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from ..catalog import resolve_variant
from ..config import KernelsConfig
from ..errors import ConfigError
from ..facts import DraftFacts, ModelFacts
from ..launch import LaunchConfig
from ..plan import make_plan, resolve_shape
from ..shapes import MAX_WINDOW, PLAIN, CycleShape
from .acceptance import Acceptance
from .advice import candidate_shapes, rank_shapes
from .floor import FloorModel
from .metrics import Timeline
from .metrics import acceptance as measured_acceptance
from .paper import read_paper
from .planning import configured_shape, resolve_device, resolve_hardware, shallowest_window

TRIED_REQUESTS = 4
"""Requests of the workload that the first chain runs."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """A shape that is worth a run.

    Attributes:
        shape: (S, K, N).
        why: ``automatic``, ``configured``, or the batch size it is predicted to be fast at.
        ratios: batch to predicted speed by that of plain decoding.
    """

    shape: CycleShape
    why: str
    ratios: dict[int, float]


def short_list(config: LaunchConfig, batches: Sequence[int]) -> dict[str, Any]:
    """Rank what this drafter can do.

    The prediction is that of ``graphspec plan``. Bandwidth and peak are measured where the ``hardware`` group has no figures; acceptance is
    measured by a chain on some requests of the workload, unless ``plan.acceptance`` says it.

    Args:
        config: model, draft, workload; ``tune.candidates`` is the length of the list.
        batches: batch sizes the shapes are for, ascending.

    Returns:
        ``prospects`` (rows of ``shape``, ``why``, ``ratios``), ``heads`` of the draft, ``backlog`` (the longest its window allows),
        ``hardware`` and ``acceptance`` (``shares`` and ``source``).

    Raises:
        ConfigError, CheckpointError: the configuration or a checkpoint is wrong.
    """
    variant = resolve_variant(config.variant.name)
    paper = read_paper(config.model.path, config.variant, variant)
    device, dtype = resolve_device(config, paper)
    measuring = replace(config, plan=replace(config.plan, measure=config.hardware.bandwidth_gbs is None))
    hardware = resolve_hardware(measuring, device, dtype, None)
    model = FloorModel.of(paper.target, paper.draft, dtype, variant, config.variant.token_map, paper.from_config)
    heads = paper.draft.num_heads if paper.draft is not None else 1
    context = (config.workload.input_tokens or 0) + config.workload.output_tokens // 2

    unset = replace(config.variant, num_steps=None, topk=None, num_draft_tokens=None)
    given = {resolve_shape(variant, unset, paper.target.architecture, heads): "automatic"}
    configured = configured_shape(config, variant, paper, heads)
    if configured is not None:
        given.setdefault(configured, "configured")
    if config.plan.acceptance is None:
        acceptance = try_chain(config, max(shape.num_steps for shape in given))
    else:
        acceptance = Acceptance(tuple(config.plan.acceptance), "plan.acceptance")
    deepest = shallowest_window(paper)
    possible = [shape for shape in candidate_shapes(variant, heads, deepest) if _runs(config, shape, paper.target, paper.draft, device)]
    shapes = list(dict.fromkeys([PLAIN, *given, *possible]))
    ratios: dict[CycleShape, dict[int, float]] = {shape: {} for shape in shapes}
    for batch in batches:
        ranked = rank_shapes(model, shapes, acceptance, batch, context, hardware)
        plain = next(entry.tokens_per_second for entry in ranked if entry.shape == PLAIN)
        for entry in ranked:
            ratios[entry.shape][batch] = entry.tokens_per_second / plain
    del ratios[PLAIN]
    windows = [window for window in paper.draft.decoder.sliding_window if window is not None] if paper.draft is not None else []
    return {
        "prospects": [
            {"shape": [p.shape.num_steps, p.shape.topk, p.shape.num_draft_tokens], "why": p.why, "ratios": list(p.ratios.items())}
            for p in pick(given, ratios, config.tune.candidates)
        ],
        "heads": heads,
        "backlog": min([MAX_WINDOW, *windows]),
        "hardware": hardware.source,
        "acceptance": {"shares": list(acceptance.shares), "source": acceptance.source},
    }


def try_chain(config: LaunchConfig, steps: int) -> Acceptance:
    """What the draft is worth on the workload: a chain, without compiling anything."""
    from .engine_side import EngineSide

    eager = replace(
        config,
        runtime=replace(config.runtime, name="eager"),
        kernels=KernelsConfig(),
        workload=replace(config.workload, batch=1, requests=min(TRIED_REQUESTS, config.workload.requests)),
    )
    side = EngineSide(shaped(eager, (steps, 1, steps + 1)))
    timelines = [Timeline.from_json(row) for row in side.round()["timelines"]]
    shares = seen_shares(measured_acceptance(cycle for timeline in timelines for cycle in timeline.whole_cycles))
    return (
        Acceptance(tuple(shares), "measured with a chain") if shares else Acceptance(source="a guess: no cycle of the first run was whole")
    )


def seen_shares(figures: Mapping[str, Any]) -> list[float]:
    """Conditional shares up to the first depth that was never reached."""
    return [share for share in takewhile(lambda share: share is not None, figures["acceptance_conditional"]) if share is not None]


def pick(given: dict[CycleShape, str], ratios: dict[CycleShape, dict[int, float]], count: int) -> list[Prospect]:
    """The shapes that are run.

    Shapes that differ in their nodes only do not differ much, so there is one chain and one tree of each depth: the one with the highest
    geometric mean of predicted ratios. Batch sizes then take turns to name their best, the smallest first.

    Args:
        given: shapes that are run in any case, and why; they count.
        ratios: shape to batch to predicted ratio to plain decoding, ``given`` among them.
        count: how many, unless more are given.
    """

    def mean(shape: CycleShape) -> float:
        product = 1.0
        for ratio in ratios[shape].values():
            product *= ratio
        return product

    best: dict[tuple[int, bool], CycleShape] = {}
    for shape in sorted(ratios, key=lambda shape: (-mean(shape), shape.num_draft_tokens, shape)):
        best.setdefault((shape.num_steps, shape.is_chain), shape)
    taken = {shape: Prospect(shape, why, ratios[shape]) for shape, why in given.items()}
    left = [shape for shape in best.values() if shape not in taken]
    batches = list(next(iter(ratios.values())))
    while left and len(taken) < count:
        batch = batches[(len(taken) - len(given)) % len(batches)]
        shape = max(left, key=lambda shape: (ratios[shape][batch], -shape.num_draft_tokens))
        left.remove(shape)
        taken[shape] = Prospect(shape, f"predicted at batch {batch}", ratios[shape])
    return list(taken.values())


def shaped(config: LaunchConfig, shape: Sequence[int]) -> LaunchConfig:
    """``config`` with this (S, K, N)."""
    steps, topk, nodes = shape
    return replace(config, variant=replace(config.variant, num_steps=steps, topk=topk, num_draft_tokens=nodes))


def _runs(config: LaunchConfig, shape: CycleShape, target: ModelFacts, draft: DraftFacts | None, device: str) -> bool:
    """Whether an engine of that shape can be planned: some limits are those of the rest of the configuration."""
    try:
        make_plan(shaped(config, (shape.num_steps, shape.topk, shape.num_draft_tokens)), target, draft, device=device)
    except ConfigError:
        return False
    return True

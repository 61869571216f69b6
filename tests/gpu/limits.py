"""Time limits of checks, from the programs their engines compile. Needs no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphspec.api.overrides import DEFAULTS, engine_config
from graphspec.config.catalog import load_object, resolve_variant
from graphspec.facts import read_model_facts
from graphspec.facts.folders import model_folder
from graphspec.plan.plan import Plan, make_plan
from graphspec.shapes import GREEDY

MIN = 120.0
"""Time limit of a check without a marker, in seconds."""
PROGRAM = 6.0
"""Assumed seconds to compile one program, on one core, with some kernels not cached."""
OVERHEAD = 60.0
"""Seconds for everything else: imports, weights, the first kernels, the requests."""


def plan_of(engine: Mapping[str, Any]) -> Plan:
    """The plan of a demo engine on a GPU.

    Args:
        engine: arguments of ``LLM``.
    """
    named = {key: engine.get(key, default) for key, default in DEFAULTS.items()}
    config = engine_config(None, {key: value for key, value in engine.items() if key not in DEFAULTS}, **named)
    folder = model_folder(config.model.path)
    target, variant = read_model_facts(folder), resolve_variant(config.variant.name)
    draft = load_object(variant.facts)(folder.parent / str(variant.demo_draft), target) if variant.has_network else None
    return make_plan(config, target, draft, device="cuda")


def programs_of(plan: Plan) -> int:
    """Programs that an engine compiles at load and for a full batch of requests of one class."""
    classes = {GREEDY, *plan.sampling_classes} if plan.runtime.captured else {GREEDY}
    return sum(len(plan.graph_keys(each)) + len(plan.prefill_shapes) for each in classes) if plan.compiles else 0


def seconds(engines: Sequence[Mapping[str, Any]]) -> float:
    """The limit of a check that builds these engines one after another."""
    return max(MIN, OVERHEAD + PROGRAM * sum(programs_of(plan_of(engine)) for engine in engines))

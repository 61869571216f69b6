"""Acceptance of a finished checkpoint: the engine loads the written files and continues held-out prompts.

Above temperature 0, drafts are ranked without the sampler's noise (``variant.draft_noise=none``); the default accepts more. The figure is
new tokens per cycle, with the bonus token and without the prefill's token (Leviathan et al. 2023; tau in the EAGLE papers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from ..api.llm import LLM
from ..api.outputs import Output
from ..config.command_options import LaunchConfig
from ..config.schema import Config, RuntimeConfig, VariantConfig
from ..config.train_options import AcceptanceConfig
from ..engine.device import resolve_device
from ..engine.request import SamplingParams
from ..errors import ConfigError, ResourceError
from ..host.native_build import compiler_on_path
from .generate import cut_prompts, repetition
from .loop import Watch

NATIVE_PAYS = 4096
"""Number of tokens above which native programs on a CPU save more time than building them takes."""


def check_acceptance(config: AcceptanceConfig, context: int, stream: np.ndarray) -> None:
    """Check, before anything is trained, that acceptance can be measured.

    Raises:
        ConfigError: the held-out text is shorter than a prompt, or the target's context is shorter than prompt and continuation.
    """
    if len(stream) <= config.prompt_length:
        expected = f"less than the held-out text of {len(stream)} tokens"
        raise ConfigError("train.acceptance.prompt_length", expected, config.prompt_length)
    if config.prompt_length + config.new_tokens > context:
        expected = f"at most {context - config.prompt_length}, the rest of the target's context"
        raise ConfigError("train.acceptance.new_tokens", expected, config.new_tokens)


def small_engine(config: LaunchConfig, target: str, variant: VariantConfig) -> LLM:
    """An engine with the checkpoint ``target`` for one batch of the prompts: native on a CPU for many tokens, else eager."""
    measured = config.train.acceptance
    model = replace(config.model, path=target, max_context=measured.prompt_length + measured.new_tokens)
    on_cpu = resolve_device(config.hardware.device) == "cpu"
    native = on_cpu and compiler_on_path() is not None and measured.prompts * measured.new_tokens >= NATIVE_PAYS
    runtime = RuntimeConfig(name="compiled" if native else "eager", max_rows=measured.batch, buckets=[measured.batch])
    return LLM.from_config(Config(variant=variant, model=model, runtime=runtime, hardware=config.hardware))


def continue_held_out(llm: LLM, config: AcceptanceConfig, stream: np.ndarray, temperature: float = 0.0) -> list[Output]:
    """Continuations of prompts cut from ``stream``, each with a different seed.

    Raises:
        ResourceError: a request failed.
    """
    prompts = cut_prompts(stream, config.prompts, config.prompt_length, config.seed).tolist()
    seeds = range(config.seed, config.seed + len(prompts))
    params = [SamplingParams(max_tokens=config.new_tokens, temperature=temperature, seed=seed).resolve() for seed in seeds]
    outputs = llm.generate(prompts, params)
    for output in outputs:
        if output.error is not None:
            raise ResourceError(f"held-out prompt {output.index}", "a continuation", output.error)
    return outputs


def measure_acceptance(config: LaunchConfig, shapes: Sequence[Sequence[int]], stream: np.ndarray, watch: Watch) -> dict[str, Any]:
    """Figures of the draft in ``train.out`` for every shape: greedy, and under ``sampled`` at ``train.acceptance.temperature``.

    Args:
        config: of the run that wrote the draft.
        shapes: ``[S, K, N]`` of each.
        stream: the held-out text in the target's ids.
        watch: called after each shape.
    """
    measured = config.train.acceptance
    temperatures = [0.0, measured.temperature] if measured.temperature else [0.0]
    figures: list[dict[str, Any]] = [{"repeated_16_grams": 0.0, "shapes": []} for _ in temperatures]
    for done, (steps, topk, nodes) in enumerate(shapes):
        watch("acceptance", done, len(shapes))
        variant = replace(config.variant, draft=config.train.out, draft_noise="none", num_steps=steps, topk=topk, num_draft_tokens=nodes)
        llm = small_engine(config, config.model.path, variant)
        for temperature, found in zip(temperatures, figures, strict=True):
            outputs = continue_held_out(llm, measured, stream, temperature)
            found["repeated_16_grams"] = round(repetition([output.token_ids for output in outputs]), 4)
            assert llm.metrics is not None, "requests were served"
            found["shapes"].append(
                {
                    "num_steps": steps,
                    "topk": topk,
                    "num_draft_tokens": nodes,
                    "cycles": llm.metrics.cycles,
                    "tokens_per_cycle": round(llm.metrics.acceptance_length, 4),
                    "conditional_acceptance": conditional_shares(llm.metrics.accepted_per_position),
                }
            )
    watch("acceptance", len(shapes), len(shapes))
    settings = {"prompts": measured.prompts, "prompt_tokens": measured.prompt_length, "new_tokens": measured.new_tokens}
    greedy, *sampled = figures
    return settings | greedy | ({"sampled": {"temperature": measured.temperature} | sampled[0]} if sampled else {})


def conditional_shares(reached: Sequence[float]) -> list[float]:
    """Share of drafts accepted at each depth given the ones before, from the share of cycles that reached each depth."""
    return [round(share / before, 4) if before else 0.0 for before, share in pairwise([1.0, *reached])]

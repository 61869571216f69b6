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
from ..config.schema import VariantConfig
from ..config.train_options import AcceptanceConfig
from ..engine.request import SamplingParams
from ..errors import ConfigError, ResourceError
from .conversations import Sample
from .filters import repetition
from .generate import cut_prompts
from .loop import Watch
from .written import engine_for


def held_out_prompts(config: AcceptanceConfig, context: int, stream: np.ndarray, samples: Sequence[Sample] = ()) -> list[list[int]]:
    """Prompts of held-out text, before anything is trained: of the conversations, where there are any, up to the first answer of each;
    else cut from ``stream``.

    Raises:
        ConfigError: the held-out text is shorter than a prompt, or the target's context is shorter than prompt and continuation.
    """
    if samples:
        prompts = [sample.tokens[: sample.answers[0][0]] for sample in samples]
        fitting = [prompt for prompt in prompts if prompt and len(prompt) + config.new_tokens <= context]
        if not fitting:
            shortest = min(map(len, prompts))
            raise ConfigError("train.acceptance.new_tokens", f"at most {context - shortest}, after held-out prompts", config.new_tokens)
        return fitting[: config.prompts]
    if len(stream) <= config.prompt_length:
        expected = f"less than the held-out text of {len(stream)} tokens"
        raise ConfigError("train.acceptance.prompt_length", expected, config.prompt_length)
    if config.prompt_length + config.new_tokens > context:
        expected = f"at most {context - config.prompt_length}, the rest of the target's context"
        raise ConfigError("train.acceptance.new_tokens", expected, config.new_tokens)
    return [list(map(int, prompt)) for prompt in cut_prompts(stream, config.prompts, config.prompt_length, config.seed)]


def small_engine(config: LaunchConfig, target: str, variant: VariantConfig, prompts: Sequence[list[int]]) -> LLM:
    """An engine with the checkpoint ``target`` for a batch of these prompts."""
    measured = config.train.acceptance
    context, tokens = max(map(len, prompts)) + measured.new_tokens, len(prompts) * measured.new_tokens
    return engine_for(config, target, variant, rows=measured.batch, context=context, tokens=tokens)


def continue_held_out(llm: LLM, config: AcceptanceConfig, prompts: Sequence[list[int]], temperature: float = 0.0) -> list[Output]:
    """Continuations of prompts, each with a different seed.

    Raises:
        ResourceError: a request failed.
    """
    seeds = range(config.seed, config.seed + len(prompts))
    params = [SamplingParams(max_tokens=config.new_tokens, temperature=temperature, seed=seed).resolve() for seed in seeds]
    outputs = llm.generate(list(prompts), params)
    for output in outputs:
        if output.error is not None:
            raise ResourceError(f"held-out prompt {output.index}", "a continuation", output.error)
    return outputs


def measure_acceptance(config: LaunchConfig, shapes: Sequence[Sequence[int]], prompts: Sequence[list[int]], watch: Watch) -> dict[str, Any]:
    """Figures of the draft in ``train.out`` for every shape: greedy, and under ``sampled`` at ``train.acceptance.temperature``.

    Args:
        config: of the run that wrote the draft.
        shapes: ``[S, K, N]`` of each.
        prompts: of held-out text, in the target's ids.
        watch: called after each shape.
    """
    measured = config.train.acceptance
    temperatures = [0.0, measured.temperature] if measured.temperature else [0.0]
    figures: list[dict[str, Any]] = [{"repeated_16_grams": 0.0, "shapes": []} for _ in temperatures]
    for done, (steps, topk, nodes) in enumerate(shapes):
        watch("acceptance", done, len(shapes))
        variant = replace(config.variant, draft=config.train.out, draft_noise="none", num_steps=steps, topk=topk, num_draft_tokens=nodes)
        llm = small_engine(config, config.model.path, variant, prompts)
        for temperature, found in zip(temperatures, figures, strict=True):
            outputs = continue_held_out(llm, measured, prompts, temperature)
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
    settings = {"prompts": len(prompts), "prompt_tokens": max(map(len, prompts)), "new_tokens": measured.new_tokens}
    greedy, *sampled = figures
    return settings | greedy | ({"sampled": {"temperature": measured.temperature} | sampled[0]} if sampled else {})


def conditional_shares(reached: Sequence[float]) -> list[float]:
    """Share of drafts accepted at each depth given the ones before, from the share of cycles that reached each depth."""
    return [round(share / before, 4) if before else 0.0 for before, share in pairwise([1.0, *reached])]

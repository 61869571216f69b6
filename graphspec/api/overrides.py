"""The keyword arguments of ``LLM``: names and types for type checkers and editors, and the configuration that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypedDict

from ..config.checks import brief, typed
from ..config.hints import hint_for
from ..config.schema import Config, ModelConfig, NgramSettings, RuntimeConfig, VariantConfig
from ..engine.request import SamplingParams
from ..errors import ConfigError
from ..host.progress import Progress


class Overrides(TypedDict, total=False):
    """Keys of the configuration by their bare names, those of ``sampling`` apart, which belong to each request."""

    # variant
    draft_revision: str | None
    num_steps: int | None
    topk: int | None
    num_draft_tokens: int | None
    tree_choices: list[list[int]] | None
    token_map: str | None
    ngram: NgramSettings
    draft_noise: str

    # model
    path: str
    revision: str | None
    family: str
    max_context: int | None
    generation_config: str

    # runtime
    max_rows: int
    buckets: list[int]
    kv_dtype: str
    page_size: int
    num_pages: int | None
    prefill_chunks: list[int] | None
    prefill_lanes: int
    prefill_tokens_per_cycle: int | None
    max_queued: int | None
    cycles_in_flight: int
    depth_per_bucket: dict[int, int]
    memory_fraction: float
    prefix_cache: bool | None
    tensor_parallel: int
    draft_parallel: str
    debug: bool
    max_stop_ids: int
    max_logit_bias: int
    max_logprobs: int
    sampling_classes: list[str] | None
    max_bad_words: int
    max_bad_word_tokens: int

    # kernels
    mode: str
    attention: str
    linear: str
    numerics: str
    activations: str
    draft_activations: str
    programmatic_launch: bool | None
    compile_around: bool
    linear_table: str | None

    # accept
    rule: str
    threshold_single: float
    threshold_acc: float
    block_verification: bool
    synthetic_length: float | None
    synthetic_rates: list[float] | None

    # hardware
    device: str
    dtype: str
    threads: int | None
    memory_gib: float | None
    bandwidth_gbs: float | None
    tflops: float | None
    capacity_gib: float | None
    link_gbs: float | None
    sum_us: float

    # adaptive
    depths: list[int]
    backlog: int
    times: dict[int, dict[int, float]]
    rates: list[float]


class Arguments(Overrides, total=False):
    """All of ``LLM``."""

    model: str | Path
    variant: str
    draft: str | Path | None
    runtime: str
    config: Config | None
    progress: Progress | bool | None


DEFAULTS = {"model": "demo", "variant": "eagle3", "draft": None, "runtime": "auto"}
"""Arguments of ``LLM`` that a whole configuration replaces."""


def engine_config(config: object, overrides: Mapping[str, object], **named: Any) -> Config:
    """The configuration that ``LLM(...)`` asks for.

    Args:
        config: a whole one, or None.
        overrides: other keys by their bare names.
        named: ``model``, ``variant``, ``draft`` and ``runtime``.

    Raises:
        ConfigError: a value of the wrong type, a key that does not exist, or another argument next to a whole configuration.
    """
    if config is None:
        config = Config(
            variant=VariantConfig(name=named["variant"], draft=named["draft"]),
            model=ModelConfig(path=named["model"]),
            runtime=RuntimeConfig(name=named["runtime"]),
        )
    elif not isinstance(config, Config):
        raise ConfigError("config", "a graphspec.Config, as graphspec.load_config gives one", typed(config))
    else:
        for name, value in named.items():
            if type(value) is not type(DEFAULTS[name]) or value != DEFAULTS[name]:
                raise ConfigError(name, "nothing next to config=, which says it", typed(value))
    groups = {group.name: getattr(config, group.name) for group in fields(Config) if group.name != "sampling"}
    owners = {field.name: group for group, node in groups.items() for field in fields(node) if field.name != "name"}
    changes: dict[str, dict[str, Any]] = {}
    for name, value in overrides.items():
        if name not in owners:
            hint = hint_for(name, {*owners, *DEFAULTS}, [field.name for field in fields(SamplingParams)])
            raise ConfigError(name, "a configuration key", f"{name}={brief(value)}", hint)
        changes.setdefault(owners[name], {})[name] = value
    return replace(config, **{group: replace(groups[group], **values) for group, values in changes.items()})

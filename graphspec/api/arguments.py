"""What the Python API is called with, checked before anything is built or run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from ..config.checks import brief, in_range, typed, whole
from ..config.hints import hint_for
from ..config.schema import Config, ModelConfig, RuntimeConfig, VariantConfig
from ..engine.request import SamplingParams
from ..errors import ConfigError, GraphspecError, RequestError
from ..plan.plan import Plan
from ..shapes import SamplingClass

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


def check_progress(progress: object, error: type[GraphspecError] = RequestError) -> None:
    """Check a progress callback.

    Raises:
        GraphspecError: of class ``error``: neither None, a bool nor callable.
    """
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise error("progress", "a function, False for no progress, or None", typed(progress))


def check_warm_up(requests: object, sampling: object, plan: Plan) -> int:
    """Check what an engine is to be warmed up for; returns the number of requests.

    Raises:
        RequestError: no number of requests, or no class that a request of this engine can have.
    """
    count = whole("requests", requests, RequestError)
    in_range("requests", count, 1, error=RequestError)
    if not isinstance(sampling, SamplingClass):
        raise RequestError("sampling", "a SamplingClass", typed(sampling))
    in_range("sampling.logprobs", whole("sampling.logprobs", sampling.logprobs, RequestError), -1, plan.max_logprobs, error=RequestError)
    return count


def check_cycles(cycles: object, plan: Plan) -> int:
    """Check how many cycles a request is to run; every one commits a token, so the context bounds them.

    Raises:
        RequestError: no integer, below 1, or more than the context holds.
    """
    count = whole("cycles", cycles, RequestError)
    in_range("cycles", count, 1, max(1, plan.max_context - 2), error=RequestError)
    return count

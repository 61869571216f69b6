"""What the Python API is called with, checked before anything is built or run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from ..config.checks import brief, in_range, real, typed, whole
from ..config.hints import hint_for
from ..config.schema import Config, ModelConfig, RuntimeConfig, VariantConfig
from ..engine.request import Request, SamplingParams
from ..errors import ConfigError, GraphspecError, RequestError
from ..plan.plan import Plan
from ..shapes import SamplingClass
from ..text.tokenizer import check_text

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


def check_launcher(launcher: object) -> None:
    """Check what is to launch the programs of a call.

    Raises:
        RequestError: neither None nor something that launches and reads.
    """
    if launcher is not None and not all(hasattr(launcher, name) for name in ("launch", "read", "in_flight")):
        raise RequestError("launcher", "an object with launch, read and in_flight, or None", typed(launcher))


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


Priority = int | Sequence[int]
"""Requests with a lower value get a row earlier and are preempted later when pages run out; among equals the earlier arrival goes first."""
Deadline = float | Sequence[float | None] | None
"""Seconds after its arrival at which a request ends with the tokens it has, ``finish_reason="deadline"``; None: never."""

CacheSalt = str | Sequence[str | None] | None
"""Requests share pages of common beginnings only with requests of the same salt. A salt that others don't know keeps them from finding
out, by the time to the first token, which prompts were served before. None: shared with all others without one."""


def set_call_options(requests: Sequence[Request], priority: object, deadline: object, cache_salt: object = None) -> None:
    """Check the arguments and store them in a call's requests.

    Raises:
        RequestError: a value of another type or out of range, or not one for each prompt.
    """
    count = max((request.index for request in requests), default=-1) + 1
    priorities, deadlines = _each("priority", priority, count), _each("deadline", deadline, count)
    salts = _each("cache_salt", cache_salt, count)
    for request in requests:
        its_priority, its_deadline, its_salt = priorities[request.index], deadlines[request.index], salts[request.index]
        request.priority = whole("priority", its_priority, RequestError)
        if its_deadline is not None:
            request.deadline = real("deadline", its_deadline, RequestError)
            in_range("deadline", request.deadline, 0, error=RequestError)
        if its_salt is not None:
            request.cache_salt = check_text("cache_salt", its_salt)
            if not its_salt:
                raise RequestError("cache_salt", "a text of at least one character", "''")


def _each(key: str, value: object, count: int) -> list[object]:
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise RequestError(key, f"one value, or one for each of the {count} prompts", typed(value))
    return list(value)

"""A configuration as an experiment file: the groups it consists of, and what differs from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ...compose import config_groups, load_config
from ...config import Config
from ...paths import make_folder, unwritable

_NAMED_BY = {"variant": "name", "model": "path", "runtime": "name", "kernels": "mode", "accept": "rule", "hardware": "name"}
"""The field of a group that says which choice it is."""


def experiment_text(config: Config, comment: Sequence[str]) -> str:
    """YAML that makes ``config`` again when it is given as ``experiment=FILE``, of the form of those under ``conf/experiment``.

    Only what the engine and its sampling are is told; what only one command reads (the workload, files to write) is not part of it.

    Args:
        config: what is told.
        comment: lines for the head of the file.
    """
    choices = _choices(config)
    plain = asdict(load_config(*(f"{group}={choice}" for group, choice in choices.items())))
    told = asdict(config)
    keys = {group: values for f in fields(Config) if (values := _differing(told[(group := f.name)], plain[group]))}
    defaults = [*({f"override /{group}": choice} for group, choice in choices.items()), "_self_"]
    lines = "".join(f"# {line}".rstrip() + "\n" for line in comment)
    return f"# @package _global_\n{lines}{OmegaConf.to_yaml(OmegaConf.create({'defaults': defaults, **keys}))}"


def write_experiment(file: Path, config: Config, comment: Sequence[str]) -> None:
    """:func:`experiment_text` into ``file``, whose folder is made.

    Raises:
        ConfigError: the file can't be written.
    """
    make_folder("tune.out", file.parent)
    try:
        file.write_text(experiment_text(config, comment), encoding="utf-8")
    except OSError as error:
        raise unwritable("tune.out", file, error) from error


def _choices(config: Config) -> dict[str, str]:
    """Group to the choice that ``config`` comes nearest to."""
    groups, found = config_groups(), {}
    for group, key in _NAMED_BY.items():
        name = getattr(getattr(config, group), key)
        if name in groups[group]:
            found[group] = name
    found["sampling"] = "greedy" if config.sampling.temperature == 0 else "sample"
    return found


def _differing(told: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """The entries of ``told`` that ``plain`` has otherwise, nested groups likewise; a mapping that the user fills is told whole."""
    found: dict[str, Any] = {}
    for key, value in told.items():
        other = plain[key]
        if value == other:
            continue
        nested = (
            isinstance(value, dict) and isinstance(other, dict) and value.keys() == other.keys() and all(isinstance(k, str) for k in value)
        )
        found[key] = _differing(value, other) if nested else value
    return found

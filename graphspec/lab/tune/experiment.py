"""Writes a configuration as an experiment file: its choice of each group, and the keys that differ from these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ...config.compose import config_groups, load_config
from ...config.paths import make_folder, unwritable
from ...config.schema import Config

_NAMED_BY = {"variant": "name", "model": "path", "runtime": "name", "kernels": "mode", "accept": "rule", "hardware": "name"}
"""The field of a group with the name of the choice."""


def experiment_text(config: Config, comment: Sequence[str]) -> str:
    """YAML that gives ``config`` again as ``experiment=FILE``, in the form of the files under ``conf/experiment``.

    It contains engine and sampling; options of single commands (the workload, output files) are not part of it.

    Args:
        config: to write.
        comment: lines at the head of the file.
    """
    choices = _choices(config)
    plain = asdict(load_config(*(f"{group}={choice}" for group, choice in choices.items())))
    wanted = asdict(config)
    keys = {group: differing for f in fields(Config) if (differing := _differing(wanted[(group := f.name)], plain[group]))}
    defaults = [*({f"override /{group}": choice} for group, choice in choices.items()), "_self_"]
    lines = "".join(f"# {line}".rstrip() + "\n" for line in comment)
    return f"# @package _global_\n{lines}{OmegaConf.to_yaml(OmegaConf.create({'defaults': defaults, **keys}))}"


def write_experiment(file: Path, config: Config, comment: Sequence[str]) -> None:
    """Write :func:`experiment_text` to ``file``, making its folder.

    Raises:
        ConfigError: the file can't be written.
    """
    make_folder("tune.out", file.parent)
    try:
        file.write_text(experiment_text(config, comment), encoding="utf-8")
    except OSError as error:
        raise unwritable("tune.out", file, error) from error


def _choices(config: Config) -> dict[str, str]:
    """Per group, the choice that is closest to ``config``."""
    groups, found = config_groups(), {}
    for group, key in _NAMED_BY.items():
        name = getattr(getattr(config, group), key)
        if name in groups[group]:
            found[group] = name
    found["sampling"] = {None: "auto", 0.0: "greedy"}.get(config.sampling.temperature, "sample")
    return found


def _differing(values: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """The entries of ``values`` that differ from ``plain``, recursively; a mapping with the user's keys is kept whole."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        other = plain[key]
        if value == other:
            continue
        nested = (
            isinstance(value, dict) and isinstance(other, dict) and value.keys() == other.keys() and all(isinstance(k, str) for k in value)
        )
        found[key] = _differing(value, other) if nested else value
    return found

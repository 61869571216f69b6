"""Sampling defaults of a checkpoint, read from its ``generation_config.json``. Standard library only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from ..config.checks import check_defaults, conform, usable_temperature
from ..errors import CheckpointError
from ..shapes import NEUTRAL, SamplingDefaults
from .files import find_file
from .keys import read_keys

FILE = "generation_config.json"


def read_sampling_defaults(path: Path) -> SamplingDefaults:
    """How a checkpoint is sampled where a request says nothing; neutral where the file says nothing either, or there is none.

    As in transformers, ``do_sample`` false or absent means greedy, whatever temperature and filters are stated. Where it is true and no
    temperature is stated, that is 1.

    Args:
        path: folder of the checkpoint.

    Raises:
        CheckpointError: a value of another type or out of range; names file and key.
    """
    file = path / FILE
    if not find_file(file):
        return NEUTRAL
    keys = read_keys(file)
    sampled = keys.flag("do_sample", False)
    stated: dict[str, Any] = {
        name: conform(f"{keys.where}: {name}", keys.values[name], kind, CheckpointError)
        for name, kind in get_type_hints(SamplingDefaults).items()
        if keys.present(name)
    }
    found = SamplingDefaults(**{"temperature": 1.0} | stated)
    check_defaults(found, f"{keys.where}: ", CheckpointError)
    if not sampled:
        return replace(NEUTRAL, repetition_penalty=found.repetition_penalty)
    return replace(found, temperature=usable_temperature(found.temperature))

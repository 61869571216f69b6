"""Typed look-ups in the json files of a checkpoint; every failure names file and key. Standard library only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

_REQUIRED: Any = object()


class Keys:
    """Typed look-ups in one json object; every failure names file and key."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def error(self, key: str, expected: object, hint: str = "") -> CheckpointError:
        found = repr(self.values[key]) if key in self.values else "no such key"
        return CheckpointError(f"{self.where}: {key}", expected, found, hint)

    def present(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: Any = _REQUIRED, least: int = 1) -> int:
        value = self.values.get(key) if default is _REQUIRED else self.values.get(key, default)
        if value is None and default is not _REQUIRED:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(key, f"an integer >= {least}")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        value = self.values.get(key)
        if value is None and default is not _REQUIRED:
            value = default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise self.error(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value


def read_json(path: Path) -> Keys:
    """The keys of a json file that is one object.

    Raises:
        CheckpointError: unreadable, or something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(str(path), "a readable json file", f"{type(error).__name__}: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(str(path), "a json object", type(values).__name__)
    return Keys(values, str(path))


def read_config(path: Path) -> Keys:
    """The keys of a folder's ``config.json``.

    Raises:
        CheckpointError: no folder, or no such file in it.
    """
    if not path.is_dir():
        raise CheckpointError(str(path), "a folder with a Hugging Face checkpoint", "a file" if path.exists() else "nothing there")
    config = path / "config.json"
    if not config.is_file():
        raise CheckpointError(str(config), "the checkpoint's config.json", "no such file")
    return read_json(config)


def read_architecture(keys: Keys, expected: str) -> str:
    """The one entry of ``architectures``; ``expected`` is for the message.

    Raises:
        CheckpointError: not a list of one name.
    """
    names = keys.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise keys.error("architectures", expected)
    return names[0]

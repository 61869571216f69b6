"""Typed look-ups in the json files of a checkpoint; every failure names file and key. Standard library only."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard

from ..config.checks import LONG, brief
from ..errors import CheckpointError
from .files import MAX_CONFIG, read_json

_REQUIRED: Any = object()

MAX_INTEGER = 2**31 - 1
MAX_LAYERS = 1000
MAX_HEADS = 2**12
MAX_HEAD_DIM = 2**12
MAX_WIDTH = 2**20
MAX_VOCAB = 2**24
MAX_POSITIONS = 2**23
MAX_EXPERTS = 2**17
"""Limits of the numbers in a config, several times the largest published; of experts in all layers together. Sizes that are possible one
by one and too large together are refused by the memory plan."""
MAX_NUMBER, MAX_THETA = 1e6, 1e12
MAX_IDS = 1024
"""Ids in one list."""


class Keys:
    """Typed look-ups in one json object; every failure names file and key."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def error(self, key: str, expected: object, hint: str = "") -> CheckpointError:
        found = brief(self.values[key], LONG) if key in self.values else "no such key"
        return CheckpointError(f"{self.where}: {key}", expected, found, hint)

    def present(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: Any = _REQUIRED, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        """An integer from ``minimum`` to ``maximum``; with a default, absent or null means that.

        Raises:
            CheckpointError: something else.
        """
        value = self.values.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if not is_integer(value) or not minimum <= value <= maximum:
            too_large = is_integer(value) and value > maximum
            raise self.error(key, f"an integer from {minimum} to {maximum}" if too_large else f"an integer >= {minimum}")
        return value

    def number(self, key: str, default: Any = _REQUIRED, above: float = 0.0, maximum: float = MAX_NUMBER) -> float:
        """A number above ``above`` and at most ``maximum``; with a default, absent or null means that.

        Raises:
            CheckpointError: something else, NaN and infinity included.
        """
        value = self.values.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if not is_number(value) or not above < value <= maximum:
            fair = above == 0 and not (is_number(value) and value > maximum)
            raise self.error(key, "a positive number" if fair else f"a number above {above:g}, at most {maximum:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false; absent or null means the default.

        Raises:
            CheckpointError: something else.
        """
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def integers(self, key: str, expected: str, minimum: int, maximum: int) -> list[int]:
        """A list of integers from ``minimum`` to ``maximum``; absent or null means an empty one.

        Raises:
            CheckpointError: something else, or more than :data:`MAX_IDS` of them.
        """
        value = self.values.get(key)
        if value is None:
            return []
        if (
            not isinstance(value, list)
            or len(value) > MAX_IDS
            or not all(is_integer(item) and minimum <= item <= maximum for item in value)
        ):
            raise self.error(key, expected)
        return value


def is_integer(value: object) -> TypeGuard[int]:
    """An ``int`` that is no ``bool``; 2.0 is none either."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """An ``int`` or ``float`` that is no ``bool``."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_keys(path: Path) -> Keys:
    """The keys of a configuration file that is one json object.

    Raises:
        CheckpointError: unreadable, or something else.
    """
    return Keys(read_json(path, MAX_CONFIG), str(path))


def read_config(path: Path) -> Keys:
    """The keys of a folder's ``config.json``.

    Raises:
        CheckpointError: no folder, or no such file in it.
    """
    try:
        folder, there = path.is_dir(), path.exists()
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise CheckpointError(brief(str(path), LONG), "a folder with a Hugging Face checkpoint", f"{type(error).__name__}") from error
    if not folder:
        raise CheckpointError(str(path), "a folder with a Hugging Face checkpoint", "a file" if there else "nothing there")
    config = path / "config.json"
    return Keys(read_json(config, MAX_CONFIG, "the checkpoint's config.json"), str(config))


def read_architecture(keys: Keys, expected: str) -> str:
    """The one entry of ``architectures``; ``expected`` is for the message.

    Raises:
        CheckpointError: not a list of one name.
    """
    names = keys.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise keys.error("architectures", expected)
    return names[0]

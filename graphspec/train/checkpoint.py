"""Files of a run in progress: checkpoints, written atomically, and one JSON record per interval."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from ..config.paths import reason, unwritable
from ..errors import CheckpointError, ConfigError, spell_bytes

KEY = "train.work"


def write_whole(file: Path, write: Callable[[BinaryIO], object], key: str = KEY) -> None:
    """Write a file atomically: under another name, and renamed when it is on the disk.

    Raises:
        ConfigError: it can't be written; the error names ``key``.
    """
    unfinished = file.with_name(file.name + ".tmp")
    try:
        with unfinished.open("wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(file)
    except (OSError, RuntimeError) as error:
        # torch's writer turns errors of the system into RuntimeErrors.
        cause = error if isinstance(error, OSError) or not isinstance(error.__context__, OSError) else error.__context__
        unfinished.unlink(missing_ok=True)
        raise unwritable(key, file, cause) from error


def write_json(path: Path, value: Mapping[str, object], key: str = KEY) -> None:
    """Write indented JSON with a final newline, atomically."""
    text = json.dumps(value, indent=2) + "\n"
    write_whole(path, lambda stream: stream.write(text.encode()), key)


def check_text_settings(file: Path, settings: Mapping[str, object]) -> None:
    """Compare the settings of texts that ``file`` records with those of the run; without a file, record them.

    Raises:
        ConfigError: they differ.
    """
    if not file.exists():
        write_json(file, settings)
        return
    stored = json.loads(file.read_text(encoding="utf-8"))
    for key, value in settings.items():
        if stored.get(key) != value:
            hint = "another train.work leaves it alone, train.resume=false starts again"
            raise ConfigError(f"{file}: {key}", value, stored.get(key), hint)


def write_array(file: Path, array: np.ndarray) -> None:
    """Write a ``.npy`` file atomically."""
    write_whole(file, lambda stream: np.save(stream, array))


def save(file: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint.

    Raises:
        ConfigError: it can't be written.
    """
    write_whole(file, lambda stream: torch.save(dict(state), stream))


def load(file: Path, device: torch.device) -> dict[str, Any]:
    """Read a checkpoint of :func:`save`, without executing anything in it.

    Raises:
        CheckpointError: it can't be read.
    """
    try:
        state: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # torch's readers raise a dozen kinds
        raise CheckpointError(str(file), "a checkpoint of graphspec train", reason(error), "train.resume=false starts again") from error
    return state


def check_room(folder: Path, needed: int, what: str = "checkpoints") -> None:
    """Check that the disk has room for files of a run.

    Raises:
        ConfigError: less than ``needed`` bytes are free.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(KEY, f"room for {what}, {spell_bytes(needed)}", f"{spell_bytes(free)} free in {folder}")


class Log:
    """``<name>.jsonl``: one record per interval of a run.

    Args:
        file: its path.
        step: the step from which the run resumes; records of later steps, which are trained again, are dropped.
    """

    def __init__(self, file: Path, step: int) -> None:
        self.file = file
        kept: list[str] = []
        if step and file.exists():
            # A run that was killed may have written part of a line.
            lines = (line for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}"))
            kept = [line for line in lines if json.loads(line)["step"] <= step]
        text = "".join(line + "\n" for line in kept)
        write_whole(file, lambda stream: stream.write(text.encode()))

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record.

        Raises:
            ConfigError: it can't be written.
        """
        try:
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(record) + "\n")
        except OSError as error:
            raise unwritable(KEY, self.file, error) from error

"""Files of a checkpoint. A folder from elsewhere may hold anything, so all of them are found and read here. Standard library only."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from ..config.checks import LONG, brief
from ..errors import CheckpointError, spell_bytes

_MIB = 2**20
MAX_CONFIG, MAX_INDEX, MAX_TOKENIZER = 16 * _MIB, 128 * _MIB, 512 * _MIB
"""Bytes of a json file: configurations, an index of shards, ``tokenizer.json``. The largest published are 1, 15 and 35 MiB."""


def plain(text: str) -> str:
    """A name from a file for a message: as it is, or as :func:`~graphspec.config.checks.brief` where it is long or doesn't print."""
    return text if text.isprintable() and len(text) <= LONG else brief(text, LONG)


def find_file(file: Path) -> bool:
    """Whether there is such a file. Links are followed: a snapshot in the Hugging Face cache consists of links.

    Raises:
        CheckpointError: something else than a regular file, a link that leads nowhere or in a circle, or no permission to look.
    """
    try:
        mode = file.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if file.is_symlink():
            raise CheckpointError(str(file), "a regular file", "a link that leads nowhere") from None
        return False
    except (OSError, ValueError) as error:
        raise CheckpointError(plain(str(file)), "a regular file", _reason(error)) from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(str(file), "a regular file", _kind(mode))
    return True


def require_file(file: Path, expected: str = "a regular file") -> int:
    """Bytes of a file that must be there.

    Raises:
        CheckpointError: as :func:`find_file`, or it isn't there.
    """
    if not find_file(file):
        raise CheckpointError(plain(str(file)), expected, "no such file")
    return file.stat().st_size


def open_file(file: Path, expected: str = "a regular file") -> BinaryIO:
    """A file that must be there, for reading.

    Raises:
        CheckpointError: as :func:`require_file`, or it can't be opened.
    """
    require_file(file, expected)
    try:
        # what was a file a moment ago may be a pipe now: opening must not wait for a writer
        stream = os.fdopen(os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
    except OSError as error:
        raise CheckpointError(str(file), "a readable file", _reason(error)) from error
    mode = os.fstat(stream.fileno()).st_mode
    if not stat.S_ISREG(mode):
        stream.close()
        raise CheckpointError(str(file), "a regular file", _kind(mode))
    return stream


def read_json(file: Path, maximum: int, expected: str = "a readable json file") -> dict[str, Any]:
    """The object in a json file.

    Args:
        file: to be read.
        maximum: bytes it may have.
        expected: what it is, for the message when it isn't there.

    Raises:
        CheckpointError: as :func:`open_file`; also too large, no json in UTF-8 (without a byte order mark), or no object.
    """
    with open_file(file, expected) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > maximum:
            raise CheckpointError(str(file), f"a json file of at most {spell_bytes(maximum)}", spell_bytes(size))
        try:
            text = stream.read(maximum) or b""
        except OSError as error:
            raise CheckpointError(str(file), "a readable json file", _reason(error)) from error
    return parse_json(text, str(file))


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """The object that ``text`` spells. NaN and Infinity are numbers, as Python writes them; who reads one checks it.

    Raises:
        CheckpointError: no json in UTF-8, too deep, an integer of thousands of digits, a key twice with different values, or no object.
    """
    try:
        values = json.loads(text.decode("utf-8"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(where, "a readable json file", f"{type(error).__name__}: {reason}") from error
    if not isinstance(values, dict):
        raise CheckpointError(where, "a json object", type(values).__name__)
    return values


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        for key, value in pairs:
            if values[key] != value:
                raise ValueError(f"the key {brief(key, LONG)} is there twice, with different values")
    return values


def read_shards(index: Path) -> dict[str, str]:
    """Tensor name to file name, as an index says: names inside the folder, and of the index's own kind.

    An index of safetensors that led to a pickle would undo the choice of the harmless format.

    Raises:
        CheckpointError: as :func:`read_json`; also no ``weight_map``, or a file name that is none, leaves the folder or is of another kind.
    """
    shards = read_json(index, MAX_INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards or not set(map(type, shards.values())) <= {str}:
        raise CheckpointError(f"{index}: weight_map", "an object of tensor name: file name", brief(shards, LONG))
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    for name in dict.fromkeys(shards.values()):
        parts = PurePosixPath(name).parts
        if not name.isprintable() or "\\" in name or not parts or parts[0] == "/" or ".." in parts or PurePosixPath(name).suffix != suffix:
            tensor = next(tensor for tensor, file in shards.items() if file == name)
            raise CheckpointError(f"{index}: weight_map: {plain(tensor)}", f"the name of a {suffix} file in this folder", brief(name, LONG))
    return shards


def _reason(error: OSError | ValueError) -> str:
    return f"{type(error).__name__}: {(error.strerror if isinstance(error, OSError) else None) or error}"


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")

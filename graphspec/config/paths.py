"""Files and folders by the names users give them: looked up, read and tried before anything expensive starts. Standard library only."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from ..errors import ConfigError
from .checks import LONG, brief

OPEN_FILES = (Path("/dev/fd"), Path("/proc/self/fd"))
"""Folders whose entries are files this process was started with, a shell's ``<(command)`` among them; reading one ends with its writer."""


def user_path(key: str, name: str) -> Path:
    """``name`` as a path, its ``~`` resolved. It need not exist.

    Raises:
        ConfigError: a name that can't be looked up: too long, of an unknown user, in a folder without access. Names ``key``.
    """
    try:
        path = Path(name).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(key, "a path that can be looked up", brief(name, LONG), reason(error)) from error
    return path


def read_text(key: str, name: str) -> str:
    """The text of a UTF-8 file, or of one that is already open (``/dev/stdin``, ``/dev/fd/3``).

    Raises:
        ConfigError: no such file, a pipe or device by name, which may have no end, or bytes that are no UTF-8. Names ``key``.
    """
    path = user_path(key, name)
    expected = "a readable UTF-8 file"
    if not path.is_file() and path != Path("/dev/stdin") and path.parent not in OPEN_FILES:
        found = "a folder" if path.is_dir() else "a pipe or a device" if path.exists() else "No such file"
        raise ConfigError(key, expected, f"{brief(name, LONG)}: {found}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(key, expected, f"{brief(name, LONG)}: {reason(error)}") from error


def read_json(where: str, line: str) -> Any:
    """The JSON value of one line.

    Raises:
        ConfigError: no JSON; NaN and Infinity are none. Names ``where``.
    """
    try:
        return json.loads(line, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(where, "one JSON value per line", brief(line), str(error)) from error


def refuse_constant(constant: str) -> NoReturn:
    """Makes :func:`json.loads` refuse NaN and Infinity."""
    raise ValueError(f"{constant} is no JSON")


def check_writable(key: str, name: str, *, folder: bool = False) -> Path:
    """``name`` as a path where a file can be written; tries it in the nearest existing folder, and leaves no file.

    Args:
        key: named in errors.
        name: of the file.
        folder: ``name`` is that of a folder the file goes into, which need not exist.

    Raises:
        ConfigError: a folder in the file's place or a file in a folder's, or a place where nothing can be written.
    """
    path = user_path(key, name)
    if path.exists() and path.is_dir() != folder:
        raise ConfigError(key, "a folder" if folder else "a file", f"a {'file' if folder else 'folder'}: {brief(name, LONG)}")
    above = path if folder else path.parent
    while not above.exists() and above != above.parent:
        above = above.parent
    try:
        with tempfile.TemporaryFile(dir=above):
            return path
    except OSError as error:
        raise unwritable(key, path, error) from error


def make_folder(key: str, folder: Path) -> None:
    """Make a folder and those above it, where they are not there.

    Raises:
        ConfigError: that can't be done. Names ``key``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(key, folder, error) from error


@contextmanager
def new_folder(key: str, folder: Path) -> Iterator[Path]:
    """A folder that gets its name when the block ends well, so that nothing half written has it.

    Args:
        key: named in errors.
        folder: doesn't exist yet, or is empty.

    Raises:
        ConfigError: something is there, or it can't be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(key, "a folder that doesn't exist yet, or is empty", str(folder))
    check_writable(key, str(folder), folder=True)
    make_folder(key, folder.parent)
    made: Path | None = None
    try:
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        made.chmod(0o755)
        yield made
        if folder.exists():
            folder.rmdir()
        os.rename(made, folder)  # noqa: PTH104
    except OSError as error:
        raise unwritable(key, folder, error) from error
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def unwritable(key: str, path: Path, error: Exception) -> ConfigError:
    """The error for a file that is not writable."""
    return ConfigError(key, "a place where files can be written", brief(str(path), LONG), reason(error))


def reason(error: Exception) -> str:
    """The message of the system, without the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__

"""Compile C++ source that ships with the package, once per machine. No torch headers: a build takes seconds.

A library in the cache is code that will run, so no other user may be able to put one there. The folder is opened once and must be this
user's alone to write; all that follows happens relative to that open folder, so it doesn't matter who may write to its parents. A
library's name ends in the SHA-256 of its bytes, which is compared before the library is loaded: a file that was cut short is built again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import secrets
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ..errors import ResourceError

COMPILERS = ("c++", "g++")
ELSEWHERE = "set XDG_CACHE_HOME to a folder of your own"


def cache_folder() -> Path:
    """Where this user's caches are kept: ``$XDG_CACHE_HOME/graphspec``, or ``~/.cache/graphspec``.

    Raises:
        ResourceError: neither home nor an absolute cache folder is known.
    """
    # By hand: the one rule needs no package, and an engine has to start on machines that have torch and little else.
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111 - Path's raises without a home
    if not folder.is_absolute():
        raise ResourceError("cache folder", "XDG_CACHE_HOME or HOME to say where, as an absolute path", folder, ELSEWHERE)
    return folder / "graphspec"


def compiler_on_path() -> str | None:
    """``$CXX``, or the first of :data:`COMPILERS` on the path; None: there is none."""
    chosen = os.environ.get("CXX")
    found = (shutil.which(name) for name in ((chosen,) if chosen else COMPILERS))
    return next((path for path in found if path is not None), None)


def find_compiler(key: str, hint: str) -> str:
    """See :func:`compiler_on_path`.

    Args:
        key: the configuration that needs a compiler, for the message.
        hint: what to do without one.

    Raises:
        ResourceError: there is none.
    """
    found = compiler_on_path()
    if found is None:
        expected = "a C++ compiler: $CXX or one of " + ", ".join(COMPILERS)
        raise ResourceError(key, expected, os.environ.get("CXX") or "none on PATH", hint)
    return found


def check_trusted(folder: str | Path, key: str, hint: str) -> None:
    """Check that a folder of compiled code made by another program is safe to load from.

    Unlike this package's folder it may be root's, and its group may write to it if that is this user's primary group: the usual state of
    folders on systems that give every user a group.

    Args:
        folder: exists.
        key: the configuration that loads from it, for the message.
        hint: what to do when it is not safe.

    Raises:
        ResourceError: it is another user's, or others may write to it.
    """
    found = Path(folder).stat()
    ours = stat.S_IWGRP if found.st_gid == os.getegid() else 0
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) & ~ours:
        raise _untrusted(key, "folder for compiled code", Path(folder), found, hint)


def _untrusted(key: str, what: str, path: Path, found: os.stat_result, hint: str) -> ResourceError:
    expected = f"a {what} that is yours and that no one else may write to"
    return ResourceError(
        key, expected, f"{path}: user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}; you are {os.geteuid()}", hint
    )


def _is_private(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def cpu_flags() -> str:
    """Processor features that -march=native depends on: a cache folder may be shared between machines."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        wanted = ("flags", "Features", "model name")
        return "\n".join(sorted({line for line in info.read_text().splitlines() if line.startswith(wanted)}))
    return platform.machine() + platform.processor()


@dataclass(frozen=True, slots=True)
class SharedLibrary:
    """One shared library: where its source lies and how it is compiled."""

    name: str
    """First part of the file's name in the cache; then come digests of what it is made from, and of its own bytes."""
    package: str
    """Importable package whose folder holds the source."""
    sources: tuple[str, ...]
    headers: tuple[str, ...]
    flags: tuple[str, ...]
    key: str
    """Key of errors: the configuration that needs the library."""
    hint: str
    """Hint of the error if there is no compiler."""

    def build(self, folder: Path | None = None) -> Path:
        """The library for this source, compiler and CPU; compiled unless the cache has it.

        Raises:
            ResourceError: no compiler, or it failed; the cache can't be written, or is not this user's alone to write.
        """
        folder = folder or cache_folder()
        with self._open(folder) as directory:
            return folder / self._ensure(folder, directory)

    def load(self, folder: Path | None = None) -> ctypes.CDLL:
        """:meth:`build`, and open the library.

        Raises:
            ResourceError: as there, or the system can't load it.
        """
        folder = folder or cache_folder()
        with self._open(folder) as directory:
            name = self._ensure(folder, directory)
            opened = Path(f"/proc/self/fd/{directory}")
            # Under its path there may be another folder by now. Equal paths are one library to the loader; this one has its content in it.
            path = (opened if opened.exists() else folder) / name
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                raise ResourceError(self.key, f"a system that can load {folder / name}", error, ELSEWHERE) from error

    @contextmanager
    def _open(self, folder: Path) -> Iterator[int]:
        """The cache folder, made if it isn't there, and checked."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise self._no_folder(folder, error) from error
        try:
            found = os.fstat(directory)
            if not _is_private(found):
                hint = f"chmod go-w {folder} if only you wrote to it so far, else {ELSEWHERE}"
                raise _untrusted(self.key, "cache folder", folder, found, hint)
            yield directory
        finally:
            os.close(directory)

    def _no_folder(self, folder: Path, error: OSError, way: str = "written") -> ResourceError:
        return ResourceError(self.key, f"a cache folder that can be {way}", f"{folder}: {error.strerror}", ELSEWHERE)

    def _ensure(self, folder: Path, directory: int) -> str:
        """Name of a whole library in the folder."""
        compiler = find_compiler(self.key, self.hint)
        files = {name: resources.files(self.package).joinpath(name).read_bytes() for name in (*self.sources, *self.headers)}
        try:
            version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
        except OSError as error:
            raise ResourceError(self.key, "a C++ compiler that runs", f"{compiler}: {error.strerror}", self.hint) from error
        parts = (*files.values(), version, " ".join(self.flags).encode(), cpu_flags().encode())
        made_from = hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
        stem = f"{self.name}-{made_from}-"
        try:
            for name in sorted(os.listdir(directory)):
                if name.startswith(stem) and name.endswith(".so") and self._whole(folder, directory, name):
                    return name
        except OSError as error:
            raise self._no_folder(folder, error, "read") from error
        content = self._compile(compiler, files)
        name = f"{stem}{hashlib.sha256(content).hexdigest()}.so"
        try:
            self._store(directory, name, content)
        except OSError as error:
            raise self._no_folder(folder, error) from error
        return name

    def _whole(self, folder: Path, directory: int, name: str) -> bool:
        """The file's bytes are those its name tells."""
        path = folder / name
        if stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            raise ResourceError(self.key, "a library, no link to one", path, f"remove {path}")
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or not _is_private(found):
                raise _untrusted(self.key, "library", path, found, f"remove {path}")
            return name.endswith(f"-{hashlib.sha256(file.read()).hexdigest()}.so")

    def _compile(self, compiler: str, files: dict[str, bytes]) -> bytes:
        """The bytes of the library."""
        try:
            with tempfile.TemporaryDirectory(prefix="graphspec-") as scratch:
                for name, source in files.items():
                    Path(scratch, name).write_bytes(source)
                built, texts = Path(scratch, "built.so"), [str(Path(scratch, name)) for name in self.sources]
                done = subprocess.run([compiler, *self.flags, "-o", str(built), *texts], capture_output=True, text=True, check=False)
                if done.returncode == 0:
                    return built.read_bytes()
        except OSError as error:
            raise ResourceError(self.key, "a temporary folder to compile in", error, "set TMPDIR to a folder with room") from error
        found = f"exit code {done.returncode}: {done.stderr.strip()[-500:]}"
        raise ResourceError(self.key, f"{compiler} to compile {', '.join(self.sources)}", found)

    def _store(self, directory: int, name: str, content: bytes) -> None:
        """Written under another name, then renamed: processes that build at the same time all find one whole file."""
        draft = f".{name[:40]}-{secrets.token_hex(8)}"
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory), "wb") as file:
                file.write(content)
            os.rename(draft, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=directory)
            raise

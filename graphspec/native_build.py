"""Compile C++ source that ships with the package, once per machine. Standard library only, no torch headers: a build takes seconds."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from .errors import ResourceError

COMPILERS = ("c++", "g++")


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/graphspec``, or ``~/.cache/graphspec``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphspec"


def find_compiler(key: str, hint: str) -> str:
    """``$CXX``, or the first of :data:`COMPILERS` on the path.

    Args:
        key: what asked for a compiler, for the message.
        hint: what to do without one.

    Raises:
        ResourceError: there is none.
    """
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    raise ResourceError(key, "a C++ compiler: $CXX or one of " + ", ".join(COMPILERS), asked or "none on PATH", hint)


def _cpu_flags() -> str:
    """What -march=native depends on: a cache folder may be shared between machines."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        wanted = ("flags", "Features", "model name")
        return "\n".join(sorted({line for line in info.read_text().splitlines() if line.startswith(wanted)}))
    return platform.machine() + platform.processor()


@dataclass(frozen=True, slots=True)
class SharedLibrary:
    """One shared library: where its source lies and how it is compiled."""

    name: str
    """Stem of the file in the cache."""
    package: str
    """Importable package whose folder holds the source."""
    sources: tuple[str, ...]
    headers: tuple[str, ...]
    flags: tuple[str, ...]
    key: str
    """What a failure is reported as: the configuration that asked for the library."""
    hint: str
    """What to do where there is no compiler."""

    def build(self, folder: Path | None = None) -> Path:
        """The library for this source, compiler and CPU; compiled unless the cache has it.

        Raises:
            ResourceError: no compiler, or it failed.
        """
        folder = folder or cache_folder()
        compiler = find_compiler(self.key, self.hint)
        files = {name: resources.files(self.package).joinpath(name).read_bytes() for name in (*self.sources, *self.headers)}
        version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
        parts = (*files.values(), version, " ".join(self.flags).encode(), _cpu_flags().encode())
        digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
        library = folder / f"{self.name}-{digest}.so"
        if library.is_file():
            return library
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            for name, source in files.items():
                Path(scratch, name).write_bytes(source)
            texts = [str(Path(scratch, name)) for name in self.sources]
            built = Path(scratch) / library.name
            done = subprocess.run([compiler, *self.flags, "-o", str(built), *texts], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                found = f"exit code {done.returncode}: {done.stderr.strip()[-500:]}"
                raise ResourceError(self.key, f"{compiler} to compile {', '.join(self.sources)}", found)
            # Atomic: another process that builds at the same time ends up with one whole file as well.
            built.replace(library)
        return library

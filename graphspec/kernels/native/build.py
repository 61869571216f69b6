"""Compile the C++ source once per machine and open it. No torch headers, so a build takes seconds."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

from ...errors import ResourceError

SOURCES = ("attention.cpp", "linear.cpp")
HEADERS = ("simd.h",)
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC")
COMPILERS = ("c++", "g++")


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/graphspec``, or ``~/.cache/graphspec``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphspec"


def find_compiler() -> str:
    """``$CXX``, or the first of :data:`COMPILERS` on the path.

    Raises:
        ResourceError: there is none.
    """
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    hint = "install g++, or choose kernels.attention=reference"
    raise ResourceError("kernels.attention=native", "a C++ compiler: $CXX or one of " + ", ".join(COMPILERS), asked or "none on PATH", hint)


def _cpu_flags() -> str:
    """What -march=native depends on: a cache folder may be shared between machines."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        wanted = ("flags", "Features", "model name")
        return "\n".join(sorted({line for line in info.read_text().splitlines() if line.startswith(wanted)}))
    return platform.machine() + platform.processor()


def build(folder: Path | None = None) -> Path:
    """The shared library for this source, compiler and CPU; compiled unless the cache has it.

    Raises:
        ResourceError: no compiler, or it failed.
    """
    folder = folder or cache_folder()
    compiler = find_compiler()
    sources = {name: resources.files(__package__).joinpath(name).read_bytes() for name in (*SOURCES, *HEADERS)}
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256(b"\0".join((*sources.values(), version, " ".join(FLAGS).encode(), _cpu_flags().encode()))).hexdigest()[:20]
    library = folder / f"native-{digest}.so"
    if library.is_file():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for name, source in sources.items():
            Path(scratch, name).write_bytes(source)
        texts = [str(Path(scratch, name)) for name in SOURCES]
        built = Path(scratch) / library.name
        done = subprocess.run([compiler, *FLAGS, "-o", str(built), *texts], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            found = f"exit code {done.returncode}: {done.stderr.strip()[-500:]}"
            raise ResourceError("kernels.attention=native", f"{compiler} to compile {', '.join(SOURCES)}", found)
        # Atomic: another process that builds at the same time ends up with one whole file as well.
        built.replace(library)
    return library


@functools.cache
def load() -> ctypes.CDLL:
    """The library, opened once per process, argument types declared."""
    library = ctypes.CDLL(str(build()))
    pointer, integer, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_double
    library.graphspec_tree_attention.argtypes = [pointer] * 8 + [real, integer]
    library.graphspec_chunk_attention.argtypes = [pointer] * 8 + [real, integer]
    library.graphspec_pack_linear.argtypes = [pointer] * 2 + [ctypes.c_int64] * 2
    library.graphspec_linear.argtypes = [pointer] * 3 + [ctypes.c_int64] * 4 + [integer]
    for name in ("tree_attention", "chunk_attention", "pack_linear", "linear"):
        getattr(library, f"graphspec_{name}").restype = None
    return library

"""The library of the C++ kernels: its sources, its flags, and its functions with their argument types."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from ... import native_build

SOURCES = ("attention.cpp", "linear.cpp")
HEADERS = ("simd.h",)
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC")
KEY, HINT = "kernels.attention=native", "install g++, or choose kernels.attention=reference"


def find_compiler() -> str:
    """See :func:`graphspec.native_build.find_compiler`."""
    return native_build.find_compiler(KEY, HINT)


def build(folder: Path | None = None) -> Path:
    """The shared library for this source, compiler and CPU; compiled unless the cache has it.

    Raises:
        ResourceError: no compiler, or it failed.
    """
    return native_build.SharedLibrary("native", __package__, SOURCES, HEADERS, FLAGS, KEY, HINT).build(folder)


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

"""The library of the C++ kernels: its sources, its flags, and its functions."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from ...host import native_build

SOURCES = (
    "attention.cpp",
    "cycle.cpp",
    "experts.cpp",
    "linear.cpp",
    "ngram.cpp",
    "paired.cpp",
    "product.cpp",
    "recurrent.cpp",
    "rounded.cpp",
    "rows.cpp",
    "sampling.cpp",
    "shaping.cpp",
    "stack.cpp",
    "state.cpp",
    "tape.cpp",
    "team.cpp",
)
HEADERS = (
    "attention.h",
    "call.h",
    "codes.h",
    "delta.h",
    "integers.h",
    "noise.h",
    "pace.h",
    "product.h",
    "rounded.h",
    "row_program.h",
    "simd.h",
    "ssm.h",
    "states.h",
    "team.h",
    "thresholds.h",
    "words.h",
)
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-pthread", "-shared", "-fPIC")
KEY = "kernels.attention=native"
HINT = "install g++, or choose runtime=eager, with kernels.attention and kernels.linear auto or reference"
LIBRARY = native_build.SharedLibrary("native", __package__, SOURCES, HEADERS, FLAGS, KEY, HINT)


def find_compiler() -> str:
    """See :func:`graphspec.host.native_build.find_compiler`."""
    return native_build.find_compiler(KEY, HINT)


@functools.cache
def load() -> ctypes.CDLL:
    """The library, opened once per process.

    Raises:
        ResourceError: see :meth:`graphspec.host.native_build.SharedLibrary.load`.
    """
    return LIBRARY.load()


@functools.cache
def function(name: str) -> Callable[..., None]:
    """``graphspec_<name>(fields, threads)`` of the library; ``replay`` takes ``(entries, count, threads)``."""
    found = getattr(load(), f"graphspec_{name}")
    found.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int] if name == "replay" else [ctypes.c_char_p, ctypes.c_int]
    found.restype = None
    run: Callable[..., None] = found
    return run

"""The library of the C++ kernels: its sources, its flags, and its functions with their argument types."""

from __future__ import annotations

import ctypes
import functools

from ... import native_build

SOURCES = ("attention.cpp", "cycle.cpp", "linear.cpp", "stack.cpp", "team.cpp")
HEADERS = ("attention.h", "product.h", "simd.h", "team.h")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-pthread", "-shared", "-fPIC")
KEY = "kernels.attention=native"
HINT = "install g++, or choose runtime=eager, with kernels.attention and kernels.linear auto or reference"
LIBRARY = native_build.SharedLibrary("native", __package__, SOURCES, HEADERS, FLAGS, KEY, HINT)


def find_compiler() -> str:
    """See :func:`graphspec.native_build.find_compiler`."""
    return native_build.find_compiler(KEY, HINT)


@functools.cache
def load() -> ctypes.CDLL:
    """The library, opened once per process, argument types declared.

    Raises:
        ResourceError: see :meth:`graphspec.native_build.SharedLibrary.load`.
    """
    library = LIBRARY.load()
    pointer, integer, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_double
    library.graphspec_tree_attention.argtypes = [pointer] * 8 + [real, integer]
    library.graphspec_chunk_attention.argtypes = [pointer] * 8 + [real, integer]
    library.graphspec_linear.argtypes = [pointer] * 5 + [ctypes.c_int64] * 5 + [real, integer]
    filled = ("decode", "draft_topk", "draft_level", "marginal_pool", "tree_build")
    for name in filled:
        getattr(library, f"graphspec_{name}").argtypes = [ctypes.c_char_p]
    for name in ("tree_attention", "chunk_attention", "linear", *filled):
        getattr(library, f"graphspec_{name}").restype = None
    return library

"""Native products compiled for the instruction sets of other processors."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from graphspec.host.native_build import cpu_flags
from graphspec.kernels.native import build

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", *AVX2)
FLAGS = {"generic": (), "avx2": AVX2, "avx512": AVX512, "avx512_vnni": (*AVX512, "-mavx512vnni"), "avx512_bf16": (*AVX512, "-mavx512bf16")}
"""Of the compiler, by instruction set."""
SOURCES = ("linear.cpp", "paired.cpp", "product.cpp", "rounded.cpp", "team.cpp")
CPU_NAMES = {"avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16"}
"""What Linux calls an instruction set, where the compiler calls it otherwise."""


def use_products_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the native products by those compiled for instruction set ``name``. Skips on a processor that lacks it."""
    flags = FLAGS[name]
    features = (flag.removeprefix("-m") for flag in flags)
    if any(CPU_NAMES.get(feature, feature) not in cpu_flags().split() for feature in features):
        pytest.skip("a processor without these instructions")
    others = tuple(flag for flag in build.FLAGS if flag not in ("-march=native", "-O3"))
    library = replace(build.LIBRARY, name=f"test-{name}", sources=SOURCES, flags=(*others, "-O1", *flags)).load()
    found: dict[str, Callable[..., None]] = {}

    def function(name: str) -> Callable[..., None]:
        op = found.setdefault(name, getattr(library, f"graphspec_{name}"))
        op.argtypes, op.restype = build.function(name).argtypes, None  # type: ignore[attr-defined]
        return op

    monkeypatch.setattr(importlib.import_module("graphspec.kernels.native.call"), "function", function)

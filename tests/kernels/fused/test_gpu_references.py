"""Every fused op has a test against its reference on a GPU, where programs run concurrently."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from graphspec.kernels import OPS

FOLDER = Path(__file__).resolve().parents[2] / "gpu"


def referenced() -> Iterator[str]:
    """The ops that the marker ``references`` names, in every file of tests of fused kernels."""
    for file in sorted(FOLDER.glob("test_fused_*.py")):
        for name, value in vars(importlib.import_module(f"tests.gpu.{file.stem}")).items():
            if name.startswith("test_"):
                yield from (op for mark in getattr(value, "pytestmark", ()) if mark.name == "references" for op in mark.args)


def test_every_fused_op_has_a_reference_test_on_a_gpu() -> None:
    assert sorted(referenced()) == sorted(op.name for op in OPS if op.fused_names)

"""Warnings of Triton's interpreter that say nothing about a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from graphspec.kernels.op import KernelOp

TINY_TEMPERATURES = ("filter_logits", "sample_tokens")
"""Ops with a case of the smallest normal temperature: a distance divided by it is infinite, as it has to be."""


def interpreter_warnings(op: KernelOp) -> list[pytest.MarkDecorator]:
    """Marks of a test that interprets the op's kernel: the interpreter divides with NumPy, which warns where a quotient is infinite."""
    return [pytest.mark.filterwarnings("ignore:overflow encountered in divide:RuntimeWarning")] if op.name in TINY_TEMPERATURES else []

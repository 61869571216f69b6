"""Stores declared disjoint in :mod:`tests.kernels.proof.races` are: no program writes an address twice between two barriers."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from graphspec.kernels import OPS, KernelOp
from graphspec.kernels.fused.launch import INTERPRETED, launch, recording
from tests.kernels.cases import cases_of
from tests.kernels.fused._touches import meetings
from tests.kernels.proof.races import CONSTANT, DISJOINT, STORED_ONCE
from tests.support.interpreter import interpreter_warnings

ROOT = Path(__file__).resolve().parents[3]

FUSED = [pytest.param(op, name, id=f"{op.name}-{name}", marks=interpreter_warnings(op)) for op in OPS for name in op.fused_names]

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="watches the interpreter")


@triton.jit
def _twice(out, BARRIER: tl.constexpr, APART: tl.constexpr):
    tl.store(out + tl.arange(0, 4), 1)
    if BARRIER:
        tl.debug_barrier()
    tl.store(out + APART + tl.arange(0, 4), 2)


@triton.jit
def _there_and_back(out, BARRIER: tl.constexpr):
    held = tl.load(out + tl.arange(0, 4))
    if BARRIER:
        tl.debug_barrier()
    tl.store(out + 3 - tl.arange(0, 4), held)


def met(kernel: object, **constexprs: object) -> list[str]:
    out = torch.zeros(8, dtype=torch.int32)
    with meetings() as found:
        launch(kernel, (2,), out, **constexprs)
    return found


def test_a_conflict_of_stores_is_found() -> None:
    """Both programs touch the same places, which does not matter here."""
    assert met(_twice, BARRIER=False, APART=3) == ["store after store of 1 places"] * 2
    assert met(_twice, BARRIER=True, APART=3) == met(_twice, BARRIER=False, APART=4) == []
    assert met(_there_and_back, BARRIER=False) == ["store after load of 4 places"] * 2
    assert met(_there_and_back, BARRIER=True) == []


@pytest.mark.parametrize(("op", "name"), FUSED)
def test_declared_stores_do_not_overlap(op: KernelOp, name: str) -> None:
    """In calls that launch a kernel with a declaration; the other kernels are checked in compiled form."""
    function = op.implementation(name)
    for case in cases_of(op, torch.Generator().manual_seed(3)):
        with recording() as recorded:
            op.call(function, case)
        if {each.kernel.fn.__name__ for each in recorded} & {*DISJOINT, *STORED_ONCE}:
            with meetings() as found:
                op.call(function, {key: value.clone() if isinstance(value, Tensor) else value for key, value in case.items()})
            assert not found


def test_what_is_declared_exists() -> None:
    files = (file.relative_to(ROOT).with_suffix("").parts for file in ROOT.glob("graphspec/kernels/**/fused/*.py"))
    modules = [importlib.import_module(".".join(parts)) for parts in files if parts[-1] != "__init__"]
    kernels = {name: value.arg_names for module in modules for name, value in vars(module).items() if hasattr(value, "arg_names")}
    for table in (DISJOINT, STORED_ONCE, CONSTANT):
        for kernel, arguments in table.items():
            assert arguments <= set(kernels[kernel]), kernel

"""Kernels that count the programs that are done, rightly and in wrong ways, compiled for sm_90: what is found fault with.

``python -m tests.kernels.fused._compiled``, in a process in which Triton does not interpret; prints JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

ROOT = Path(__file__).resolve().parents[3]


@triton.jit
def _sum_of_parts(x, part, out, counter, parts, SEM: tl.constexpr, SCOPE: tl.constexpr, BARRIER: tl.constexpr, PARTS: tl.constexpr):
    program = tl.program_id(0)
    offset = tl.arange(0, 128)
    tl.store(part + program * 128 + offset, tl.load(x + program * 128 + offset) * 2)
    if BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem=SEM, scope=SCOPE) == parts - 1:
        every = tl.arange(0, PARTS)[:, None] * 128 + offset[None, :]
        tl.store(out + offset, tl.sum(tl.load(part + every), 0))


@triton.jit
def _written_twice(out, BARRIER: tl.constexpr):
    tl.store(out + tl.arange(0, 64), 1.0)
    if BARRIER:
        tl.debug_barrier()
    tl.store(out + 63 - tl.arange(0, 64), 2.0)


def without_interpreter(module: str, *arguments: str) -> str:
    """What a module prints that is run where Triton compiles."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def main() -> None:
    from graphspec.kernels.fused.launch import Launch
    from tests.kernels.proof import aot
    from tests.kernels.proof.races import merged
    from tests.kernels.proof.sass import cuobjdump, fenced_arrivals, instructions

    def found(kernel: Any, arguments: tuple[Any, ...], **constexprs: Any) -> list[Any]:
        launch = Launch(kernel, (4,), arguments, constexprs, 4, 2)
        compiled = aot.compiled_for_gpu(launch)
        ttgir = compiled.asm["ttgir"]
        fenced = fenced_arrivals(instructions(cuobjdump(compiled.asm["cubin"], "-sass")))
        return [merged(ttgir), fenced, aot.faults(launch, ttgir) + aot.unfenced(compiled)]

    floats = torch.empty(512, dtype=torch.float32, device="meta")
    parts = (floats, floats, floats, torch.empty(1, dtype=torch.int32, device="meta"), 4)
    ways = {"right": ("acq_rel", "gpu", True), "relaxed": ("relaxed", "gpu", True), "block": ("acq_rel", "cta", True)}
    ways |= {"release": ("release", "gpu", True), "no barrier": ("acq_rel", "gpu", False)}
    tables = {
        name: found(_sum_of_parts, parts, SEM=sem, SCOPE=scope, BARRIER=barrier, PARTS=4) for name, (sem, scope, barrier) in ways.items()
    }
    tables |= {f"twice, {barrier}": found(_written_twice, (floats,), BARRIER=barrier) for barrier in (False, True)}
    print(json.dumps(tables))


if __name__ == "__main__":
    main()

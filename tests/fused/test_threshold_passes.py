"""How often the search for a threshold goes over its list: a constant, read from the compiled kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOWERED = """
from graphspec.kernels.fused import aot
from graphspec.kernels.fused.launch import recording
case = next(case for op, case in aot.aot_cases() if (op, case.name) == ("filter_logits", "v128256-t8"))
with recording() as launches:
    case.launcher(**case.arguments())
for launch in launches[2:4]:
    print(aot.lowered(launch))
"""
PASSES = {"_kth_largest": 4, "_least": 3}
"""Three by bits; the top-k threshold one more, for the mass it leaves."""


@pytest.fixture(scope="module")
def kernels() -> dict[str, str]:
    """Triton's GPU dialect by name, made in a process of its own: here kernels are interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", LOWERED], capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    return {found[1]: text for text in done.stdout.split("tt.func public")[1:] if (found := re.match(r" @(\w+)", text))}


@pytest.mark.parametrize("kernel", PASSES)
def test_passes_over_a_list(kernels: dict[str, str], kernel: str) -> None:
    """Loops whose number of turns depends on data are those over the blocks of a list; none lies in another."""
    lines = kernels[kernel].splitlines()
    loops = [line for line in lines if re.search(r"= scf\.(while|for)|^\s*scf\.(while|for)", line)]

    assert len(loops) == PASSES[kernel]
    for first, second in zip(loops, loops[1:], strict=False):
        between = lines[lines.index(first) + 1 : lines.index(second)]
        assert any(len(line) - len(line.lstrip()) <= len(first) - len(first.lstrip()) for line in between if line.strip()), "nested"

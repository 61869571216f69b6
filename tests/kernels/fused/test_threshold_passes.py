"""The number of passes of the threshold search over its list is constant, read from the compiled kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LOWERED = """
from tests.kernels.proof import aot
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
    """Triton's GPU dialect by name, made in a separate process: here kernels are interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", LOWERED], capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    return {found[1]: text for text in done.stdout.split("tt.func public")[1:] if (found := re.match(r" @(\w+)", text))}


@pytest.mark.parametrize("kernel", PASSES)
def test_passes_over_a_list(kernels: dict[str, str], kernel: str) -> None:
    """The only loops with data-dependent trip counts are those over the blocks of a list, and they are not nested."""
    loops, open_at = 0, None
    for line in kernels[kernel].splitlines():
        indent = len(line) - len(line.lstrip())
        if "scf.while" in line or "scf.for" in line:
            assert open_at is None, "a loop in a loop"
            loops, open_at = loops + 1, indent
        elif indent == open_at and line.lstrip().startswith("}") and not line.endswith("{"):
            open_at = None
    assert loops == PASSES[kernel]

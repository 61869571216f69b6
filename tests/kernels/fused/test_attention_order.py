"""Dependent loads of tree attention, read from the compiled kernel: a whole split is in flight before its arithmetic."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphspec.kernels.attention.fused import tree_attention as fused
from graphspec.kernels.fused.launch import recording

ROOT = Path(__file__).resolve().parents[3]
CASES = ("llama-8b-t8", "llama-8b-t64", "d80-t8", "d256-t8")
LOWERED = """
import json, sys
from tests.kernels.proof import aot
from graphspec.kernels.fused.launch import recording
found = {}
for op, case in aot.aot_cases():
    if op == "tree_attention" and case.name in sys.argv[1:]:
        with recording() as launches:
            case.launcher(**case.arguments())
        found[case.name] = aot.lowered(launches[0])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def kernels() -> dict[str, str]:
    """Triton's GPU dialect of each case, made in a separate process: here kernels are interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", LOWERED, *CASES]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", CASES)
def test_two_round_trips_before_the_first_product(kernels: dict[str, str], case: str) -> None:
    """First: page ids, lengths, words and queries, all issued before any is used. Second: keys and values, before the first product.

    Page ids of the next block are asked for together with the first, and its rows are prefetched before keys are loaded.
    """
    before, _, loop = kernels[case].partition("scf.while")
    loads = re.findall(r"%(\w+?)_?\d* = tt\.load", before)
    first = re.findall(r"%(\w+?)_?\d* = tt\.load", before.partition("ttg.local_alloc")[0].partition('"tt.reduce"')[0])
    assert first == ["page", "next_page", "row_begin", "prefix", "words", "q"]
    # Page ids once more, for a program whose first splits are not the ones expected.
    assert loads == [*first, "page", "next_page"]
    again = before[: before.rindex("tt.load")].rindex("tt.load")
    assert "scf.if" in before[again - 2000 : again]
    assert re.findall(r"%(\w+?)_?\d* = tt\.load", loop.partition("warp_group_dot")[0]) == ["k", "v"]
    assert loop.partition("= tt.load")[0].count("prefetch.global.L2") == (2 if case != "d256-t8" else 0)


@pytest.mark.parametrize("case", CASES)
def test_a_merging_program_asks_for_eight_partials_at_once(kernels: dict[str, str], case: str) -> None:
    """Loads of a step of the merge are adjacent: no loop, branch or barrier separates them."""
    merge = kernels[case][kernels[case].rindex("scf.for") :]
    step = merge.partition("scf.yield")[0]
    assert len(re.findall(r"%acc_?\d* = tt\.load", step)) == 8 and "gpu.barrier" not in step and "scf.if" not in step


@pytest.mark.parametrize(("lanes", "tokens", "context", "maximum"), [(1, 8, 4096, 9), (1, 8, 131072, 23), (8, 64, 131072, 145)])
def test_partials_stay_few(lanes: int, tokens: int, context: int, maximum: int) -> None:
    """Megabytes of partial results of an 8B shape, whatever the length of the context."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    lengths = empty(lanes, tokens, dtype=torch.int64), empty(lanes, dtype=torch.int64), empty(lanes, tokens, 1, dtype=torch.int64)
    table = empty(lanes, context // 16, dtype=torch.int32)
    with recording() as launches:
        fused.tree_attention(empty(lanes, tokens, 32, 128), empty(32, 2, 1025, 16, 8, 128), 3, table, *lengths, 0.1)
    partials = [value for value in launches[0].args if isinstance(value, torch.Tensor) and value.dtype == torch.float32]
    assert len(partials) == 2 and sum(4 * value.numel() for value in partials) <= maximum * 1e6
    assert launches[0].grid[0] * launches[0].grid[1] * launches[0].grid[2] <= 264, "more programs than run at once"

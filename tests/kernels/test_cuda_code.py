"""Inductor's code for a GPU, of every program that an engine builds by default: all of them fail to load when one of them has none.

No GPU is needed to find that out, and no test that runs on a CPU does: there another backend writes the code.
"""

from __future__ import annotations

import pytest

from graphspec.shapes import PREPARED
from tests.support.codegen import Launches, compile_kernels
from tests.support.programs import class_of, generate, gpu_plan, programs
from tests.support.tiny import HYBRIDS, STRUCTURES

SHORT = (("chain", "everything", "cycle"), ("chain", "everything", "prefill"))
"""In the tier of kernels; the others are marked ``full``, and ``make rehearse-gpu`` runs them all."""
FLAGS = ("noise", "noise+truncate", "penalties", "bias", "allowed", "bad_words", "logprobs", "grammar", "prompt_logprobs")
DEFAULTS = PREPARED
EVERY = (*STRUCTURES, *HYBRIDS)
CASES = [
    *programs(DEFAULTS, EVERY),
    *programs(("everything+grammar",), EVERY, ("cycle",)),
    *programs(FLAGS, ("chain", "tree", "hybrid-tree")),
]
COMPILED = {*programs(DEFAULTS, EVERY, ("cycle",)), *programs(("everything",), EVERY)}
"""Whose Triton kernels are compiled; other programs are these with fewer kernels, or cut in two."""

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize(("structure", "spelled", "kind"), SHORT)
def test_a_chain_that_takes_every_request_has_code(structure: str, spelled: str, kind: str) -> None:
    """No host read and no size that depends on data, either."""
    for found in generate(structure, spelled, kind):
        assert len(found) and found.host_marks == [] and found.copied_arguments == [] and not found.returned


@pytest.mark.full
@pytest.mark.parametrize(("structure", "spelled", "kind"), CASES)
def test_every_program_has_code_that_compiles(structure: str, spelled: str, kind: str) -> None:
    """By Inductor; for sm_90 by Triton and ptxas, where that is not much the same again."""
    compiled = (structure, spelled, kind) in COMPILED
    assert all(
        len(found) and found.copied_arguments == [] and not found.returned
        for found in generate(structure, spelled, kind, compiled=compiled)
    )


@pytest.mark.full
@pytest.mark.parametrize("structure", ["none", "chain", "tree", "hybrid-chain"])
def test_a_cycle_of_one_lane_has_code(structure: str) -> None:
    """Where sizes of 1 are left out of every index."""
    assert all(len(found) for found in generate(structure, "everything", "cycle", lanes=1))


@pytest.mark.full
def test_a_kernel_that_does_not_compile_is_noticed() -> None:
    code = "async_compile.triton('kernel', '''raise SyntaxError('no kernel')''', device_str='cuda')"
    with pytest.raises(AssertionError, match="no kernel"):
        compile_kernels(Launches((), code))


def test_the_classes_are_those_of_an_engine() -> None:
    plan = gpu_plan("chain")
    assert [class_of(plan, name) for name in DEFAULTS] == list(plan.sampling_classes)
    assert {(structure, name) for structure, name, _ in CASES} >= {("mamba-tree", name) for name in DEFAULTS}

"""Fences around the arrivals of programs that merge parts, in PTX and SASS; kernels are checked where they are compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kernels.fused._compiled import without_interpreter
from tests.kernels.proof.families import CALLS, matrix_instructions
from tests.kernels.proof.sass import arrivals, fenced_arrivals, instructions

RELEASE, ERROR, ADD = "@P0 MEMBAR.ALL.GPU", "@P0 ERRBAR", "@P0 ATOMG.E.ADD.STRONG.GPU PT, R8, desc[UR4][R6.64], R3"
ACQUIRE, LOAD = "@P0 CCTL.IVALL", "@P0 LDG.E.128 R8, desc[UR4][R2.64]"


def listing(*lines: str) -> str:
    text = "\n".join(f"        /*{16 * index:04x}*/   {line} ;   /* 0x000000ff */\n   /* 0x000fe2 */" for index, line in enumerate(lines))
    return f'\tFunction : kernel\n.headerflags @"EF_CUDA_SM90"\n{text}\n'


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((RELEASE, ERROR, ADD, ACQUIRE, LOAD), 1),
        ((RELEASE.removeprefix("@P0 "), ERROR, ADD, "IADD3 R1, R1, R2, RZ", ACQUIRE.removeprefix("@P0 "), LOAD), 1),
        ((RELEASE, ADD, ACQUIRE, LOAD, RELEASE, ADD, ACQUIRE), 2),
        ((ADD, ACQUIRE, LOAD), 0),
        ((RELEASE, ADD, LOAD, ACQUIRE), 0),
        ((RELEASE, ADD), 0),
        ((RELEASE, "@P0 STG.E desc[UR4][R2.64], R3", ADD, ACQUIRE), 0),
        ((RELEASE.replace("P0", "!P0"), ADD, ACQUIRE), 0),
        ((RELEASE.replace("GPU", "CTA"), ADD, ACQUIRE), 0),
        ((RELEASE, ADD.replace("GPU", "SM"), ACQUIRE), 0),
    ],
)
def test_fenced_arrivals(lines: tuple[str, ...], expected: int) -> None:
    assert len(instructions(listing(*lines))) == len(lines)
    assert fenced_arrivals(instructions(listing(*lines))) == expected


def test_arrivals_of_ptx() -> None:
    line = "@%p1 atom.global.gpu.{}.add.u32 %r1, [ %rd1 + 0 ], %r2;"
    assert [arrivals(line.format(order)) for order in ("acq_rel", "relaxed", "release")] == [1, 0, 0]


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(without_interpreter("tests.kernels.fused._compiled"))
    return found


def test_a_merge_in_order_has_its_fences(compiled: dict[str, Any]) -> None:
    assert compiled["right"] == [["part"], 1, []]


@pytest.mark.parametrize("way", ["relaxed", "block", "release", "no barrier"])
def test_a_weaker_arrival_is_found(compiled: dict[str, Any], way: str) -> None:
    _, fenced, faults = compiled[way]
    assert "loads parts of part that its arrival does not show it" in faults
    assert fenced == (way == "no barrier")


def test_a_store_after_a_store_is_found(compiled: dict[str, Any]) -> None:
    assert compiled["twice, False"][2] == ["stores out twice with no barrier between"]
    assert compiled["twice, True"][2] == []


def test_every_number_of_rows_is_multiplied_by_one_instruction() -> None:
    """1 to 64 rows, and those of prompts, under batch-invariant numerics: every product of an 8B model, and attention."""
    found: dict[str, dict[str, list[int]]] = json.loads(without_interpreter("tests.kernels.proof.families"))
    assert set(found) == set(CALLS)
    for name, used in found.items():
        assert len(used) == 1, f"{name}: {used}"
        [(instructions_of_it, rows)] = used.items()
        assert instructions_of_it and set(range(1, 65)) <= set(rows), name


def test_two_families_are_told_apart() -> None:
    code = instructions(listing("HMMA.16816.F32.BF16 R4, R8, R12, R4", "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24", ADD))
    assert matrix_instructions(code) == ("HGMMA.64x64x16.F32.BF16", "HMMA.16816.F32.BF16")

"""Machine code of a compiled kernel, read with the cuobjdump that comes with Triton, and the fences around its arrivals.

An acquire-release atomic at GPU scope is three instructions in SASS: ``MEMBAR``, which orders the program's earlier stores; ``ATOMG``; and
``CCTL.IVALL``, which invalidates L1, so that later loads see the stores of other programs. If one is missing, a merge may read stale data,
on some launches and some machines.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import triton

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
_MEMORY = ("LDG", "LD.", "STG", "ST.", "ATOM", "RED.", "MEMBAR", "CCTL", "BAR", "BRA", "EXIT", "RET")
"""Instructions that must not come between an arrival and its fences."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a listing.

    Attributes:
        predicate: such as ``!P0``; empty: always executed.
        opcode: with modifiers, such as ``ATOMG.E.ADD.STRONG.GPU``.
        operands: the rest of the line.
    """

    predicate: str
    opcode: str
    operands: str


def cuobjdump(cubin: bytes, option: str) -> str:
    """Output of ``cuobjdump`` for a compiled kernel.

    Args:
        cubin: ``CompiledKernel.asm["cubin"]``.
        option: of cuobjdump, such as ``-sass``.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(listing: str) -> list[Instruction]:
    """Parse the output of ``cuobjdump -sass``, in order of addresses."""
    return [Instruction(predicate or "", opcode, operands) for predicate, opcode, operands in _INSTRUCTION.findall(listing)]


def _fence(found: Iterator[Instruction], opcode: re.Pattern[str], arrival: Instruction) -> bool:
    """Whether the next memory instruction matches ``opcode`` and is executed whenever the arrival is."""
    for instruction in found:
        if instruction.opcode.startswith(_MEMORY):
            return opcode.match(instruction.opcode) is not None and instruction.predicate in ("", arrival.predicate)
    return False


_RELEASE = re.compile(r"MEMBAR\.(ALL|SC)\.(GPU|SYS)")
_ACQUIRE = re.compile(r"CCTL\.IVALL")


def fenced_arrivals(code: Sequence[Instruction]) -> int:
    """Number of GPU-scope atomics with a ``MEMBAR`` before and a ``CCTL.IVALL`` after them, and no memory access between."""
    return sum(
        _fence(iter(code[:place][::-1]), _RELEASE, instruction) and _fence(iter(code[place + 1 :]), _ACQUIRE, instruction)
        for place, instruction in enumerate(code)
        if instruction.opcode.startswith("ATOMG") and instruction.opcode.endswith("STRONG.GPU")
    )


def arrivals(ptx: str) -> int:
    """Number of acquire-release atomics at GPU scope in the PTX."""
    return len(re.findall(r"\batom\.global\.gpu\.acq_rel\.", ptx))

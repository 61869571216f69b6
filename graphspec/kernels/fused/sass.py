"""Machine code of a compiled kernel, through the cuobjdump that comes with Triton, and the fences around its arrivals.

An arrival that acquires and releases at the scope of the GPU is three things in SASS: ``MEMBAR`` before the atomic operation, so that what
the program stored comes first; ``ATOMG``; and ``CCTL.IVALL`` after it, which empties the first-level cache, so that what is loaded next
comes from where the others wrote. Where one is missing, a merge may read what stood there before, on some launches and on some machines.
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
"""Instructions that may not stand between an arrival and its fences."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a listing.

    Attributes:
        predicate: as ``!P0``; empty: always executed.
        opcode: with its modifiers, as ``ATOMG.E.ADD.STRONG.GPU``.
        operands: the rest of the line.
    """

    predicate: str
    opcode: str
    operands: str


def cuobjdump(cubin: bytes, option: str) -> str:
    """Output of ``cuobjdump`` for a compiled kernel.

    Args:
        cubin: ``CompiledKernel.asm["cubin"]``.
        option: of cuobjdump, as ``-sass``.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(listing: str) -> list[Instruction]:
    """The instructions of what ``cuobjdump -sass`` prints, in the order of their addresses."""
    return [Instruction(predicate or "", opcode, operands) for predicate, opcode, operands in _INSTRUCTION.findall(listing)]


def _fence(found: Iterator[Instruction], opcode: re.Pattern[str], arrival: Instruction) -> bool:
    """Whether the next instruction that touches memory has ``opcode``, and is executed wherever the arrival is."""
    for instruction in found:
        if instruction.opcode.startswith(_MEMORY):
            return opcode.match(instruction.opcode) is not None and instruction.predicate in ("", arrival.predicate)
    return False


_RELEASE = re.compile(r"MEMBAR\.(ALL|SC)\.(GPU|SYS)")
_ACQUIRE = re.compile(r"CCTL\.IVALL")


def fenced_arrivals(code: Sequence[Instruction]) -> int:
    """Atomic operations at the scope of the GPU that have a ``MEMBAR`` before and a ``CCTL.IVALL`` after them, and no access between."""
    return sum(
        _fence(iter(code[:place][::-1]), _RELEASE, instruction) and _fence(iter(code[place + 1 :]), _ACQUIRE, instruction)
        for place, instruction in enumerate(code)
        if instruction.opcode.startswith("ATOMG") and instruction.opcode.endswith("STRONG.GPU")
    )


def arrivals(ptx: str) -> int:
    """Atomic operations of the PTX that acquire and release at the scope of the GPU."""
    return len(re.findall(r"\batom\.global\.gpu\.acq_rel\.", ptx))

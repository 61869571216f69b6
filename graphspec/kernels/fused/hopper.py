"""Limits of a Hopper GPU, for choices and estimates that may not depend on the device at hand.

Of a multiprocessor: CUDA C++ Programming Guide, technical specifications of compute capability 9.0.
"""

from __future__ import annotations

from collections.abc import Mapping

MULTIPROCESSORS = 132
"""Of an H200."""
REGISTERS, SHARED_BYTES, WARPS, PROGRAMS = 65536, 228 * 1024, 64, 32
"""Of a multiprocessor."""
PROGRAM_SHARED_BYTES = 227 * 1024
"""Shared memory of one program, at most."""
RESERVED_BYTES = 1024
"""Shared memory that the system takes for every program."""


def resident(used: Mapping[str, int]) -> int:
    """Programs of a compiled kernel that a multiprocessor holds at once.

    Args:
        used: ``registers`` of a thread, bytes of ``shared`` memory, and ``warps``, as in a line of the committed table.
    """
    # Registers are given out to a warp in units of 256.
    registers = -(-used["registers"] * 32 // 256) * 256 * used["warps"]
    return min(REGISTERS // registers, SHARED_BYTES // (used["shared"] + RESERVED_BYTES), WARPS // used["warps"], PROGRAMS)

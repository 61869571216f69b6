"""Limits of a Hopper GPU, for choices and estimates that must not depend on the current device.

Source: CUDA C++ Programming Guide, technical specifications of compute capability 9.0.
"""

from __future__ import annotations

from collections.abc import Mapping

MULTIPROCESSORS = 132
"""Multiprocessors of an H200."""
REGISTERS, SHARED_BYTES, WARPS, PROGRAMS = 65536, 228 * 1024, 64, 32
"""Limits of one multiprocessor."""
PROGRAM_SHARED_BYTES = 227 * 1024
"""Most shared memory of one program."""
RESERVED_BYTES = 1024
"""Shared memory that the system reserves per program."""


def resident(used: Mapping[str, int]) -> int:
    """Occupancy: programs of a compiled kernel that fit one multiprocessor.

    Args:
        used: ``registers`` per thread, bytes of ``shared`` memory, and ``warps``, as in a row of the committed table.
    """
    # Registers are allocated per warp in units of 256.
    registers = -(-used["registers"] * 32 // 256) * 256 * used["warps"]
    return min(REGISTERS // registers, SHARED_BYTES // (used["shared"] + RESERVED_BYTES), WARPS // used["warps"], PROGRAMS)

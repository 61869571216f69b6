"""Launches an instantiated CUDA graph without what ``torch.cuda.CUDAGraph.replay`` adds.

Some releases of torch fill the seed and the offset of torch's generator before each replay, whether or not the graph draws from it: two
kernels, and two gaps, for every launch. Programs have their own noise (:mod:`graphspec.kernels.sampling.noise`) and may not draw.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

GraphLaunch = Callable[[int, int], None]
"""Takes the handles of an instantiated graph and of a stream."""


@cache
def graph_launch() -> GraphLaunch | None:
    """``cudaGraphLaunch`` of the runtime that torch is linked with; None if torch has it inside and does not export it.

    The function it returns raises RuntimeError with CUDA's own message if the launch fails.
    """
    # Looks through the libraries that torch's own one needs.
    linked = ctypes.CDLL(torch._C.__file__)  # noqa: SLF001
    try:
        launch, spell, forget = linked.cudaGraphLaunch, linked.cudaGetErrorString, linked.cudaGetLastError
    except AttributeError:
        return None
    launch.argtypes, launch.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int
    spell.argtypes, spell.restype = (ctypes.c_int,), ctypes.c_char_p

    def checked(executable: int, stream: int) -> None:
        code = launch(executable, stream)
        if code:
            forget()  # otherwise torch reports it once more, for whatever it does next
            raise RuntimeError(f"CUDA error: {spell(code).decode()}")

    return checked

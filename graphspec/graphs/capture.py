"""CUDA-graph capture of a whole program. Knows no stage: it captures a callable over buffers that never move."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..buffers import Arena
from ..errors import CaptureError

WARM_UP_CALLS = 3


class Captured:
    """One captured program. Replaying it is one launch; the program's tensors stay alive with it."""

    def __init__(self, program: Callable[[], None], graph: torch.cuda.CUDAGraph) -> None:
        self._program, self._graph = program, graph

    def __call__(self) -> None:
        self._graph.replay()


class Capturer:
    """Captures programs one after another into one memory pool.

    The pool is shared because programs never run at the same time and nothing but slots crosses from one to the next. Capture the largest
    bucket first: the smaller ones then fit into its memory.
    """

    def __init__(self, arena: Arena) -> None:
        if arena.device.type != "cuda":
            raise CaptureError("device", "cuda", arena.device.type)
        self._arena = arena
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(arena.device)

    def capture(self, program: Callable[[], None]) -> Captured:
        """Warm ``program`` up on a side stream, then capture one call of it.

        The caller's buffers must make the program inert (an empty message): the warm-up calls are real.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._arena.device))
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_CALLS):
                program()
        torch.cuda.current_stream(self._arena.device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            program()
        return Captured(program, graph)

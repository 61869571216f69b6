"""CUDA-graph capture of a whole program. Knows no stage: it captures a callable over buffers that never move."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from ..buffers import Arena, Views
from ..errors import CaptureError

WARM_UP_CALLS = 3


class Replay(Protocol):
    """A captured program: calling it replays it over the same buffers."""

    @property
    def pool_bytes(self) -> int | None:
        """Device memory the capture added to the pool; None where there is no pool."""
        ...

    def __call__(self) -> None: ...


class ProgramCapturer(Protocol):
    """What turns programs into replays. Tests put a simulator here, which replays recorded operations on the CPU."""

    def capture(self, program: Callable[[], None]) -> Replay:
        """Capture one call of ``program``, which was called before; the caller's buffers make it inert (an empty message)."""
        ...


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """What it took to build one program.

    Attributes:
        name: lanes and depth, or chunk size, and what its requests ask of the sampler.
        warm_up_seconds: compilation, tuning and a first direct run.
        capture_seconds: None: it runs directly.
        pool_bytes: device memory the capture added to the graphs' pool; None without a GPU.
    """

    name: str
    warm_up_seconds: float
    capture_seconds: float | None = None
    pool_bytes: int | None = None


class Captured:
    """One captured program. Replaying it is one launch; the program's tensors stay alive with it."""

    def __init__(self, program: Callable[[], None], graph: torch.cuda.CUDAGraph, pool_bytes: int) -> None:
        self._program, self._graph = program, graph
        self.pool_bytes: int | None = pool_bytes

    def __call__(self) -> None:
        self._graph.replay()


class Capturer:
    """Captures programs one after another into one memory pool.

    The pool is shared because programs never run at the same time and nothing but slots crosses from one to the next. Capture the largest
    program first: the smaller ones then fit into its memory.
    """

    def __init__(self, arena: Arena) -> None:
        if arena.device.type != "cuda":
            raise CaptureError("device", "cuda", arena.device.type)
        self._device = arena.device
        self._pool = torch.cuda.graph_pool_handle()
        self._captured = 0
        self._stream = torch.cuda.Stream(arena.device)

    def capture(self, program: Callable[[], None]) -> Captured:
        """Warm ``program`` up on a side stream, then capture one call of it. The warm-up calls are real.

        Raises:
            torch.OutOfMemoryError: it does not fit; what was captured before stays usable.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_CALLS):
                program()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        # What the warm-up left in the caching allocator must not count as the graph's.
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                program()
        except BaseException:
            if not self._captured:
                # Nothing else lives in it; a pool that a failed capture began may not be begun again.
                self._pool = torch.cuda.graph_pool_handle()
            raise
        self._captured += 1
        return Captured(program, graph, torch.cuda.memory_reserved(self._device) - before)


def ran_out_of_memory(error: BaseException) -> bool:
    """The error, or one it came from, says that device memory ran out; capture reports it in several ways."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, torch.OutOfMemoryError) or (isinstance(link, RuntimeError) and "out of memory" in str(link)):
            return True
        link = link.__cause__ or link.__context__
    return False


Signature = Mapping[str, tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]]


def signature(views: Views) -> Signature:
    """Address, shape, strides and dtype of every slot a program may touch."""
    found = {name: getattr(views, name) for name in views.names}
    return {name: (t.data_ptr(), tuple(t.shape), t.stride(), t.dtype) for name, t in found.items()}


def check_unmoved(views: Views, captured: Signature) -> None:
    """That every slot is what it was at capture time. Slots that came later are not looked at.

    Raises:
        CaptureError: names the slot, what it was and what it is.
    """
    now = signature(views)
    for name, was in captured.items():
        if now[name] != was:
            raise CaptureError(name, _spell(was) + ", as captured", _spell(now[name]))


def _spell(entry: tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]) -> str:
    address, shape, strides, dtype = entry
    return f"{dtype} {list(shape)} strides {list(strides)} at {address:#x}"


@contextmanager
def no_synchronisation(device: torch.device) -> Iterator[None]:
    """On CUDA, a call inside that waits for the device is an error."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)

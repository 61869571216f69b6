"""CUDA-graph capture of whole programs. Knows nothing of stages: it captures a callable over buffers that never move."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from ..errors import CaptureError, GraphspecError, spell_bytes
from ..plan.buffers import Arena, Views
from .graph_launch import graph_launch

logger = logging.getLogger(__name__)
WARM_UP_CALLS = 3
_unended_graphs: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture could not be ended. They are kept alive because torch goes on asking them whether an allocation is theirs."""


class Replay(Protocol):
    """A captured program: calling it replays it over the same buffers."""

    @property
    def pool_bytes(self) -> int | None:
        """Device memory the capture added to the pool; None if there is no pool."""
        ...

    def __call__(self) -> None: ...


class ProgramCapturer(Protocol):
    """Turns programs into replays. Tests use a simulator that replays recorded operations on the CPU."""

    def capture(self, program: Callable[[], None]) -> Replay:
        """Capture one call of ``program``, which has run before; an empty message in its buffers makes the call inert."""
        ...


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """What it took to build one program.

    Attributes:
        name: lanes and depth, or chunk size, and the sampling class, in words.
        warm_up_seconds: for compilation, tuning and a first direct run.
        capture_seconds: None if the program is not captured.
        pool_bytes: device memory that the capture added to the graphs' pool; None without a GPU.
    """

    name: str
    warm_up_seconds: float
    capture_seconds: float | None = None
    pool_bytes: int | None = None

    @property
    def sentence(self) -> str:
        """Name, times and memory in one line."""
        captured = "" if self.capture_seconds is None else f", captured in {self.capture_seconds:.1f} s"
        held = "" if self.pool_bytes is None else f", {spell_bytes(self.pool_bytes)} more in the graphs' pool"
        return f"{self.name}, warm in {self.warm_up_seconds:.1f} s{captured}{held}"


class Captured:
    """One captured program. Replaying it is one launch; the program's tensors stay alive with it."""

    def __init__(self, program: Callable[[], None], graph: torch.cuda.CUDAGraph, pool_bytes: int, device: torch.device) -> None:
        self._program, self._graph, self._device = program, graph, device
        self.pool_bytes: int | None = pool_bytes
        self._launch, self._executable = graph_launch(), graph.raw_cuda_graph_exec()

    def __call__(self) -> None:
        if self._launch is None:
            self._graph.replay()
            return
        with torch.cuda.device(self._device):
            self._launch(self._executable, torch.cuda.current_stream(self._device).cuda_stream)


class Capturer:
    """Captures programs one after another into one memory pool.

    The pool can be shared because programs never run at the same time and pass nothing but slots to each other. Capture the largest program
    first: the smaller ones then fit into its memory.
    """

    def __init__(self, arena: Arena) -> None:
        if arena.device.type != "cuda":
            raise CaptureError("device", "cuda", arena.device.type)
        self._device = arena.device
        self._pool = torch.cuda.graph_pool_handle()
        self._captured = 0
        self._stream = torch.cuda.Stream(arena.device)

    def capture(self, program: Callable[[], None]) -> Captured:
        """Warm ``program`` up on a side stream, capture one call of it, and replay that once. All of these calls really run.

        The replay uploads the graph, so that the first launch does not have to, and fails here if the graph can't be replayed. It is
        torch's own, which advances torch's generator if the program draws from it; later launches would repeat those numbers.

        Raises:
            CaptureError: the program draws from torch's generator.
            torch.OutOfMemoryError: it does not fit; programs captured before stay usable.
            Exception: raised by the program; another capture may follow.
        """
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_CALLS):
                program()
        here.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        if not self._captured:
            gc.collect()
        # Memory cached by the warm-up must not be counted as the graph's.
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), _garbage_collection_paused(), _private_cublas_workspaces():
            self._record(program, graph)
        try:
            self._first_replay(graph)
        except BaseException:
            if not self._captured:
                # A pool whose only graph is gone can't be used again.
                self._pool = torch.cuda.graph_pool_handle()
            raise
        self._captured += 1
        return Captured(program, graph, torch.cuda.memory_reserved(self._device) - before, self._device)

    def _first_replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay once, by torch, and wait.

        Raises:
            CaptureError: torch's generator has advanced.
        """
        generator = torch.cuda.default_generators[torch.cuda.current_device() if self._device.index is None else self._device.index]
        drawn = generator.get_offset()
        graph.replay()
        torch.cuda.synchronize(self._device)
        if generator.get_offset() != drawn:
            found = "a program that draws from torch's generator"
            raise CaptureError("random numbers", "noise keyed by seed and position (graphspec.kernels.sampling.noise)", found)

    def _record(self, program: Callable[[], None], graph: torch.cuda.CUDAGraph) -> None:
        """Capture one call of ``program``. On failure, leave stream, allocator and pool ready for another capture.

        ``torch.cuda.graph`` does not: when a capture can't be ended, because the program did something that a graph can't hold, it leaves
        the capture's stream current, and the allocator goes on serving the failed capture.
        """
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            program()
        except BaseException:
            self._abandon(graph, end=True)
            raise
        try:
            graph.capture_end()
        except BaseException:
            self._abandon(graph, end=False)
            raise

    def _abandon(self, graph: torch.cuda.CUDAGraph, *, end: bool) -> None:
        if end:
            try:
                graph.capture_end()
            except RuntimeError as error:
                logger.debug("the capture could not be ended: %s", error)
        device, ended = torch.cuda.current_device(), True
        try:
            torch._C._cuda_endAllocateToPool(device, self._pool)  # noqa: SLF001
        except RuntimeError as error:
            # The capture was ended properly, and the graph releases its part of the pool itself.
            logger.debug("the pool was left: %s", error)
        else:
            torch._C._cuda_releasePool(device, self._pool)  # noqa: SLF001
            _unended_graphs.append(graph)
            ended = False
        if not ended or not self._captured:
            # The allocator of pinned host memory still records into the pool of a capture that could not be ended, and refuses to begin
            # there again. A pool that only a failed capture has used can't be used again either.
            self._pool = torch.cuda.graph_pool_handle()


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Suspend garbage collection: destroying an older graph or event makes a call that is forbidden during a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _private_cublas_workspaces() -> Iterator[None]:
    """Make cuBLAS allocate its workspaces from the capture's pool, for this capture alone.

    torch keeps a workspace for each handle and stream, and may free all of them at any time, as ``mode="reduce-overhead"`` does.
    A graph captured with a workspace from outside its pool would then write to freed memory.
    """
    torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` or one of its causes reports that device memory ran out; capturing reports it in several ways."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, torch.OutOfMemoryError) or (isinstance(link, RuntimeError) and "out of memory" in str(link)):
            return True
        link = link.__cause__ or link.__context__
    return False


@contextmanager
def capturing(name: str) -> Iterator[None]:
    """Name the program in errors of its capture.

    Raises:
        CaptureError: it does what a graph can't hold. What memory runs out for, and errors of graphspec, stay as they are.
    """
    try:
        yield
    except Exception as error:
        if ran_out_of_memory(error) or isinstance(error, GraphspecError):
            raise
        found, hint = f"{type(error).__name__}: {error}", "runtime=compiled runs it without a graph"
        raise CaptureError(name, "only what a CUDA graph can hold", found, hint) from error


Signature = Mapping[str, tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]]


def signature(views: Views) -> Signature:
    """Address, shape, strides and dtype of every slot a program may touch."""
    found = {name: getattr(views, name) for name in views.names}
    return {name: (t.data_ptr(), tuple(t.shape), t.stride(), t.dtype) for name, t in found.items()}


def check_unmoved(views: Views, captured: Signature) -> None:
    """Check that every slot is what it was at capture time. Slots added later are not checked.

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
    """On CUDA, make calls that wait for the device raise an error."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)

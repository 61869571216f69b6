"""CUDA without a GPU: fake tensors with shape, dtype and device but without data, checks for operations that capture forbids, a driver that
records the calls of a capture, and a device that does everything as late as possible.

A bare ``FakeTensorMode`` (no shape environment) raises wherever a value is needed on the host or a shape depends on data.
:class:`NoHostTraffic` refuses what it accepts: copies between devices, boolean masks on the left of an assignment.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphspec.graphs import capture

GUARD = Path(__file__).with_name("fake_cuda_guard.cpp")


class HostTrafficError(RuntimeError):
    """An operation that would synchronise with the host, or move data to or from it, inside a captured program."""


@functools.cache
def load_cuda_guard() -> None:
    """Make fake ``cuda`` tensors usable on a machine without a GPU, whether torch was built for one or not; with one nothing is needed.

    Raises:
        RuntimeError: no C++ compiler, or it failed. The check can't be left out, so neither can the compiler.
    """
    # A build for CUDA queries the current device from the driver whenever a tensor is indexed, even a fake one.
    if torch.cuda.device_count():
        return
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("capture-safety tests without a GPU need a C++ compiler ($CXX, c++ or g++); none was found")
    root = Path(torch.__file__).parent
    flags = [
        "-O0", "-std=c++20", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{root / 'include'}", f"-L{root / 'lib'}",
    ]  # fmt: skip
    digest = hashlib.sha256(repr((GUARD.read_text(), compiler, flags, torch.__version__)).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphspec"
    library = folder / f"fake-cuda-{digest}.so"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / library.name
            done = subprocess.run([compiler, *flags, "-o", str(built), str(GUARD), "-lc10"], capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"{compiler} could not compile {GUARD.name}:\n{done.stderr[-2000:]}")
            built.replace(library)
    ctypes.CDLL(str(library))


def tensors(*values: Any) -> Iterator[Tensor]:
    """Every tensor inside nested arguments."""
    if len(values) == 1 and isinstance(values[0], Tensor):
        return iter(values)
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


class NoHostTraffic(TorchDispatchMode):
    """Refuses operations that a CUDA graph can't contain and that fake tensors accept.

    Copies between devices, results on the CPU, and masks that index an assignment (their positions are counted on the host).
    Zero-dimensional CPU tensors as *arguments* pass: that is how torch hands a Python number to a kernel.
    """

    COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
    ASSIGNMENTS = (torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default, torch.ops.aten._index_put_impl_.default)

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ops += 1
        if func in self.COPIES and len({t.device.type for t in tensors(args, result)}) > 1:
            raise HostTrafficError(f"{func}: a copy between devices")
        if func in self.ASSIGNMENTS:
            _, indices, value = args[:3]
            masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
            if masks and not (value.dim() == 0 and value.device.type == "cpu"):
                raise HostTrafficError(f"{func}: a boolean mask on the left of an assignment")
        for tensor in tensors(result):
            if tensor.device.type != "cuda" and tensor.dim() > 0:
                raise HostTrafficError(f"{func}: result {list(tensor.shape)} on {tensor.device}")
        return result


class UnorderedSumError(RuntimeError):
    """An operation that adds floating-point numbers in an order that differs from run to run on a GPU."""


class FixedOrder(TorchDispatchMode):
    """Refuses operations on floats that torch lists as not deterministic on CUDA (``torch.use_deterministic_algorithms``).

    Sums of integers are exact in any order and pass. Writes to one place by several indices pass too: only their values decide whether the
    order matters.
    """

    SUMS = frozenset(
        ("cumsum", "cumsum_", "cumprod", "cumprod_", "logcumsumexp", "scatter_add", "scatter_add_", "index_add", "index_add_",
         "scatter_reduce", "index_reduce", "index_reduce_", "histc", "bincount", "kthvalue", "median", "put", "put_", "_embedding_bag")
    )  # fmt: skip
    ACCUMULATING = frozenset(("index_put", "index_put_", "_index_put_impl_", "scatter", "scatter_"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, overload = func.overloadpacket.__name__, func._overloadname
        adds = name in self.SUMS
        if name in self.ACCUMULATING:
            adds = "reduce" in overload or (name.lstrip("_").startswith("index_put") and bool((*args, False)[3]))
        if adds and any(t.is_floating_point() for t in tensors(args)):
            raise UnorderedSumError(f"{func}: floats added in no fixed order")
        return func(*args, **(kwargs or {}))


class FakeDriver:
    """Streams, graphs and private pools as :class:`graphspec.graphs.capture.Capturer` uses them, with torch's rules.

    As in torch, a capture that can't be ended raises and leaves the allocator directed at its pool; a pool whose last share was released
    can't be used again; allocations can be directed at only one capture at a time. The allocator of pinned host memory records too, from
    begin to end: a capture that can't be ended leaves it recording, and it refuses to begin twice in one pool. cuBLAS's workspace is in a
    pool if it was first requested during a capture.
    """

    def __init__(self) -> None:
        self.current = "default"
        self.capturing: FakeGraph | None = None
        self.directed: dict[int, int] = {}
        """Pool to shares of it that were taken by captures, for those the allocator is directed at now."""
        self.shares: dict[int, int] = {}
        self.pools = 0
        self.host_records: set[int] = set()
        """Pools into which the allocator of pinned host memory records."""
        self.workspace: int | None = None
        """The pool of cuBLAS's workspace; 0: it is in none."""
        self.can_end = True
        self.can_instantiate = True
        self.replays: list[str] = []
        """The current stream at each replay by torch, and at each launch of an instantiated graph."""
        self.fills = 0
        """Fills of the generator's seed and offset, which torch's replay does."""
        self.offset = 0
        self.graphs: dict[int, FakeGraph] = {}

    def draw(self) -> None:
        """A random number of torch's generator, drawn by the program."""
        if self.capturing is not None:
            self.capturing.draws += 1
        else:
            self.offset += 1

    def get_offset(self) -> int:
        assert self.capturing is None
        return self.offset

    def launch(self, executable: int, stream: int) -> None:
        """``cudaGraphLaunch``: what it launches has the offsets of the last fill."""
        assert self.graphs[executable].ready
        self.replays.append({0: "default", 1: "side"}[stream])

    def pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def multiply(self) -> int:
        """A product by cuBLAS; returns the pool of the workspace that it writes to."""
        if self.workspace is None:
            self.workspace = self.capturing.pool if self.capturing is not None else 0
        return self.workspace

    def clear_workspaces(self) -> None:
        self.workspace = None

    def end_allocate(self, device: int, pool: int) -> None:
        if pool not in self.directed:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        del self.directed[pool]

    def release(self, device: int, pool: int) -> None:
        assert self.shares[pool] > 0
        self.shares[pool] -= 1

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before


class FakeStream:
    def __init__(self, name: str) -> None:
        self.name, self.cuda_stream = name, int(name == "side")

    def wait_stream(self, other: FakeStream) -> None:
        pass


class FakeGraph:
    """The methods of ``torch.cuda.CUDAGraph`` that are used."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver, self.owns_share, self.ready, self.draws = driver, False, False, 0

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        driver = self.driver
        assert driver.current == "side" and capture_error_mode == "thread_local"
        assert not driver.directed, "the allocator still serves a capture that is over"
        assert driver.shares.get(pool) != 0, "a pool without shares may not be begun again"
        driver.shares[pool] = driver.shares.get(pool, 0) + 1
        driver.directed[pool], self.pool = 1, pool
        if pool in driver.host_records:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        driver.host_records.add(pool)
        driver.capturing = self

    def capture_end(self) -> None:
        driver = self.driver
        if driver.capturing is not self:
            raise RuntimeError("capture_end: not capturing")
        driver.capturing = None
        if not driver.can_end:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        driver.end_allocate(0, self.pool)
        driver.host_records.remove(self.pool)
        self.owns_share = True
        if not driver.can_instantiate:
            raise RuntimeError("CUDA error: out of memory")
        self.ready = True

    def raw_cuda_graph_exec(self) -> int:
        assert self.ready
        self.driver.graphs[id(self)] = self
        return id(self)

    def replay(self) -> None:
        assert self.ready
        self.driver.fills += 2
        self.driver.offset += self.draws
        self.driver.replays.append(self.driver.current)

    def __del__(self) -> None:
        if self.owns_share:
            self.driver.release(0, self.pool)


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A :class:`FakeDriver`, patched into torch."""
    driver = FakeDriver()
    side, default = FakeStream("side"), FakeStream("default")
    on_cuda: dict[str, Any] = {
        "graph_pool_handle": driver.pool_handle, "Stream": lambda device: side, "current_stream": lambda device: default,
        "stream": driver.on, "synchronize": lambda device: None, "empty_cache": lambda: None, "memory_reserved": lambda device: 0,
        "current_device": lambda: 0, "CUDAGraph": lambda: FakeGraph(driver), "default_generators": (driver,),
        "device": lambda device: nullcontext(),
    }  # fmt: skip
    for name, value in on_cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(capture, "graph_launch", lambda: driver.launch)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", driver.end_allocate, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", driver.release, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", driver.clear_workspaces, raising=False)
    return driver


class LateDevice:
    """A device that runs nothing until the host waits for it: non-blocking copies and programs are queued; its memory is this CPU's.

    A buffer that the host overwrites before it was copied, or reads before it has waited, is then certainly wrong.
    """

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()
        self.done = self.queued = self.waits = self.longest = 0
        self.host_steps = False
        """Whether a stage on the host is running, which writes memory of the device."""
        self._working = False

    def put(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        self.queued += 1
        self.longest = max(self.longest, len(self.queue))

    def work_until(self, mark: int) -> None:
        """Run what was queued before ``mark``."""
        self._working = True
        try:
            while self.done < mark:
                self.queue.popleft()()
                self.done += 1
        finally:
            self._working = False

    def synchronize(self) -> None:
        self.work_until(self.queued)

    def event(self) -> LateEvent:
        return LateEvent(self)

    def program(self, run: Callable[[], None]) -> Callable[[], None]:
        """``run`` as the device runs it."""
        return lambda: self.put(run)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace torch's copies and events; pinned memory becomes ordinary memory."""
        copy, fill = Tensor.copy_, Tensor.fill_

        def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            if self._working:
                return copy(target, source)
            if non_blocking:
                self.put(lambda: copy(target, source))
                return target
            self.synchronize()
            return copy(target, source)

        def fill_(target: Tensor, value: Any) -> Tensor:
            if self.host_steps and not self._working:
                self.put(lambda: fill(target, value))
                return target
            return fill(target, value)

        def unpinned(make: Callable[..., Tensor], *args: Any, pin_memory: bool = False, **keys: Any) -> Tensor:
            return make(*args, **keys)

        monkeypatch.setattr(Tensor, "copy_", copy_)
        monkeypatch.setattr(Tensor, "fill_", fill_)
        for name in ("zeros", "empty", "full", "tensor"):
            monkeypatch.setattr(torch, name, functools.partial(unpinned, getattr(torch, name)))
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)


class LateEvent:
    """An event that is complete when everything queued before its recording has run."""

    def __init__(self, device: LateDevice) -> None:
        self._device, self._mark = device, 0

    def record(self) -> None:
        self._mark = self._device.queued

    def synchronize(self) -> None:
        self._device.waits += 1
        self._device.work_until(self._mark)

"""Triton kernels, compiled by other processes while the code around them is still being written.

Triton compiles a kernel when it is first launched: one after the other, on one core. But tracing a program shows all its launches, long
before its code is ready to run. Other processes compile their kernels meanwhile, each as the launch would, and the launch finds them in
Triton's cache on disk.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from .launch import Launch, observing

logger = logging.getLogger(__name__)
MOST_PROCESSES = 8
"""Each imports torch and Triton, which takes seconds of a core and 0.4 GB."""
ALIGNMENT = 16
"""Bytes; a kernel for addresses that are multiples of it is another one."""
MARKS = "graphspec-kernels"
"""Folder in Triton's cache with an empty file for every kernel that was compiled ahead: asking Triton itself needs a compilation."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """What the code of a kernel depends on in a tensor: its dtype, and its address modulo :data:`ALIGNMENT`."""

    dtype: torch.dtype
    offset: int

    def tensor(self) -> Tensor:
        """A tensor like it, without data."""
        return torch.empty(ALIGNMENT, dtype=self.dtype, device="meta")[self.offset // self.dtype.itemsize :]


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel to compile, in a form that another process understands. Launches of one kernel have equal jobs.

    Attributes:
        module, kernel: where the ``triton.jit`` function is found.
        args: numbers stand for all that give the same code; tensors are :class:`Pointer`.
        constexprs: compile-time arguments, by name.
        num_warps, num_stages: of the compiled kernel.
        target: device to compile for.
    """

    module: str
    kernel: str
    args: tuple[Any, ...]
    constexprs: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int
    target: GPUTarget

    @classmethod
    def of(cls, launch: Launch, target: GPUTarget) -> Job:
        """The kernel of a launch, for a device."""
        function, constexprs = launch.kernel.fn, tuple(sorted(launch.constexprs.items()))
        args = tuple(_kind(value) for value in launch.args)
        return cls(function.__module__, function.__name__, args, constexprs, launch.num_warps, launch.num_stages, target)

    def compile(self) -> str:
        """Compile the kernel as its launch would, for Triton's active driver; returns the name of its entry in Triton's cache."""
        args = [value.tensor() if isinstance(value, Pointer) else value for value in self.args]
        constexprs = dict(self.constexprs)
        programmatic = {"launch_pdl": True} if constexprs.get("PDL") else {}
        kernel = getattr(importlib.import_module(self.module), self.kernel)
        settings = {"num_warps": self.num_warps, "num_stages": self.num_stages, **programmatic}
        return str(kernel.warmup(*args, grid=(1,), **settings, **constexprs).hash)

    def mark(self) -> Path:
        """The file that says that this kernel is in the cache, whether or not it exists."""
        key = getattr(importlib.import_module(self.module), self.kernel).cache_key
        digest = hashlib.sha256(repr((triton.__version__, key, self)).encode()).hexdigest()
        return Path(triton.knobs.cache.dir) / MARKS / digest


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of a job: the kernel's name, seconds it took, and its entry in Triton's cache or an error."""

    kernel: str
    seconds: float
    entry: str = ""
    error: str = ""


class _Target:
    """A driver of Triton for a process that compiles for a device without using it."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _kind(value: Any) -> Any:
    """A value that Triton specialises a kernel to in the same way: it looks at the type, at 1, and at divisibility by 16."""
    if isinstance(value, Tensor):
        return Pointer(value.dtype, value.data_ptr() % ALIGNMENT)
    if isinstance(value, int) and not isinstance(value, bool) and value != 1:
        wide = 0 if -(1 << 31) <= value < 1 << 31 else 1 << 40
        return wide + (ALIGNMENT if value % ALIGNMENT == 0 else ALIGNMENT + 1)
    return 0.5 if isinstance(value, float) else value


class KernelCompiler:
    """Compiles kernels in processes, each of which is started when there is work for it.

    Args:
        target: device to compile for.
        processes: how many, at most.
    """

    def __init__(self, target: GPUTarget, processes: int) -> None:
        self._target = target
        self._threads = ThreadPoolExecutor(processes, "kernel-compiler")
        """One for each process, which waits for it."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: list[subprocess.Popen[bytes]] = []
        self._starting = Lock()
        self._closed = False
        self._jobs: dict[Job, Future[Compiled]] = {}
        self._said: set[Job] = set()
        self.cached: set[Job] = set()
        """Kernels that were in the cache before."""

    def take(self, launches: Iterable[Launch]) -> None:
        """Have the kernels of ``launches`` compiled that are not in the cache."""
        for launch in launches:
            job = Job.of(launch, self._target)
            if job in self._jobs or job in self.cached or not _found(launch):
                continue
            if job.mark().exists():
                self.cached.add(job)
            else:
                self._jobs[job] = self._threads.submit(self._compile, job)

    def wait(self, seconds: float | None = None) -> list[Compiled]:
        """What became of all kernels so far, in the order in which they were taken; those that take longer are left out.

        One that does not compile is logged: its launch will try again, and raise.
        """
        wait(self._jobs.values(), seconds)
        done = {job: future.result() for job, future in self._jobs.items() if future.done()}
        for job, compiled in done.items():
            if compiled.error and job not in self._said:
                logger.warning("%s was not compiled ahead: %s", compiled.kernel, compiled.error)
                self._said.add(job)
        return list(done.values())

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        with self._starting:
            self._closed = True
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            with suppress(OSError):
                process.communicate()

    def _compile(self, job: Job) -> Compiled:
        """What became of a job. Whatever goes wrong here must not stop the engine, whose launch compiles the kernel then."""
        began = time.monotonic()
        try:
            entry, error = self._ask(job)
            if not error:
                mark = job.mark()
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()
        except (OSError, EOFError, pickle.UnpicklingError) as reason:
            entry, error = "", f"{type(reason).__name__}: {reason}"
        return Compiled(job.kernel, time.monotonic() - began, entry, error)

    def _ask(self, job: Job) -> tuple[str, str]:
        """The answer of a process to a job: its entry in the cache, or an error.

        Raises:
            OSError, EOFError, pickle.UnpicklingError: there is no process, or no answer.
        """
        process = self._process()
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump(job, process.stdin)
            process.stdin.flush()
            answer: tuple[str, str] = pickle.load(process.stdout)
        except (EOFError, OSError):
            raise EOFError(f"its process ended with {process.wait()}") from None
        self._idle.append(process)
        return answer

    def _process(self) -> subprocess.Popen[bytes]:
        """One that is idle, else a new one.

        Raises:
            OSError: it can't be started, or the compiler was closed.
        """
        with self._starting:
            if self._closed:
                raise OSError("the compiler was closed")
            if not self._idle:
                self._processes.append(_start())
                return self._processes[-1]
            return self._idle.pop()


def _found(launch: Launch) -> bool:
    """Another process finds the kernel under its name."""
    function = launch.kernel.fn
    module = sys.modules.get(function.__module__)
    return function.__module__ != "__main__" and getattr(module, function.__name__, None) is launch.kernel


def _start() -> subprocess.Popen[bytes]:
    """A process that runs :func:`work`, with the modules of this one. A session of its own keeps Ctrl-C from it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-c", f"from {__name__} import work; work()"]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
    )


def work() -> None:
    """Read jobs from standard input until it ends, and answer each on standard output with its entry in the cache and an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # What a compiler prints is no answer.
    os.dup2(2, 1)
    while True:
        try:
            job = pickle.load(source)
        except EOFError:
            return
        try:
            driver.set_active(_Target(job.target))
            answer = job.compile(), ""
        except Exception as error:  # noqa: BLE001 - one kernel that does not compile must not cost the others
            answer = "", f"{type(error).__name__}: {error}"[:1000]
        pickle.dump(answer, sink)
        sink.flush()


def processes_for(engines: int = 1) -> int:
    """Number of compiler processes per engine, where ``engines`` start at the same time.

    An engine keeps one of its share of the cores for itself. ``TORCHINDUCTOR_COMPILE_THREADS`` is the upper limit, as for Inductor's own
    kernels; at 1 nothing is compiled in other processes.
    """
    from torch._inductor import config

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = config.compile_threads or 1
    return min(max(cores // engines - 1, 0), MOST_PROCESSES, threads if threads > 1 else 0)


@contextmanager
def compiling_ahead(engines: int = 1) -> Iterator[Callable[[], object]]:
    """A context in which the kernels of everything that is traced are compiled meanwhile, for the current device.

    Args:
        engines: number of engines that start at the same time on this machine; see :func:`processes_for`. Without a process nothing is
            compiled ahead.

    Yields:
        Waits for the kernels traced so far.
    """
    processes = processes_for(engines)
    if not processes:
        yield lambda: None
        return
    compiler = KernelCompiler(driver.active.get_current_target(), processes)
    try:
        with observing(compiler.take):
            yield compiler.wait
    finally:
        compiler.close()

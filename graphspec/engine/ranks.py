"""The processes of an engine with several ranks: started here, or by ``torchrun``.

An engine with ``runtime.tensor_parallel=n`` starts n - 1 processes next to its own, which is rank 0. They are given the configuration
through a pipe that stays open: when it closes, rank 0 is gone, and so are they. They are no ``multiprocessing`` children, which would run
the caller's main module again. Under ``torchrun`` every process makes the same engine, and all but rank 0 serve it until it closes.
"""

from __future__ import annotations

import atexit
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from ..config.schema import Config
from ..errors import ConfigError, GraphspecError, ResourceError
from ..graphs.cycle import Cycle
from ..graphs.ranks import CLOSE, Channel, FollowingCycle, LeadingCycle
from ..kernels.collectives import Comm, make_comm
from .device import resolve_device

KEY = "runtime.tensor_parallel"
COLLECTIVE_TIMEOUT = timedelta(days=365)
"""Timeout of a collective. It is long because the ranks of an idle engine wait in one; a rank that dies closes its sockets, which ends
the wait at once."""
EXIT_SECONDS = 30.0
"""Seconds that a rank has to exit by itself before it is killed."""
REASON_SECONDS = 5.0
"""Seconds to wait for a rank to exit and give its reason."""
READY = b"\n"


@dataclass(slots=True)
class Child:
    """A rank that this process started."""

    rank: int
    process: subprocess.Popen[bytes]
    pipe: IO[bytes]
    """From the rank: :data:`READY`, and later why it exits."""
    reason: str = ""

    def exit_reason(self) -> str:
        """Why the rank exited; empty if it still runs, or exited because of another rank."""
        try:
            code = self.process.wait(REASON_SECONDS)
        except subprocess.TimeoutExpired:
            return ""
        self.reason = self.reason or self.pipe.read().decode(errors="replace").strip()
        if self.reason:
            return f"rank {self.rank}: {self.reason}"
        return f"rank {self.rank} was ended by signal {-code}" if code < 0 else ""


@dataclass(slots=True)
class Ranks:
    """The ranks of an engine, as this process sees them.

    Attributes:
        rank: of this process.
        size: number of ranks.
        children: the ranks that this process started.
        owns_group: the process group is this engine's, and ends with it.
    """

    rank: int
    size: int
    children: list[Child] = field(default_factory=list)
    owns_group: bool = False
    folder: tempfile.TemporaryDirectory[str] | None = None
    """Holds the rendezvous file; NCCL looks there again when it is first used."""

    def comm(self, device: torch.device, numerics: str) -> Comm:
        """The collectives of the networks, under ``kernels.numerics`` as resolved."""
        assert dist.group.WORLD is not None, "a group that was joined"
        return make_comm(dist.group.WORLD, device, numerics)

    def agree(self, chunks: tuple[int, ...], pages: int) -> tuple[tuple[int, ...], int]:
        """The shortest of the ranks' tuples and the smallest of their numbers, the same on every rank."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (chunks, pages))
        return min((one for one, _ in found), key=len), min(number for _, number in found)

    def channel(self, words: int) -> Channel:
        return Channel(words, self.failure_reason)

    def failure_reason(self) -> str:
        """Why another rank ended, as far as it is known here."""
        return next((reason for child in self.children if (reason := child.exit_reason())), "another rank has ended")

    def end(self, *, at_once: bool) -> None:
        """Wait for the ranks that were started here, kill those that don't exit in time, and leave the process group.

        Args:
            at_once: kill all of them now; so it is after an error before the cycle exists.
        """
        _end_children(self.children, at_once=at_once)
        if self.owns_group:
            leave_group()
        if self.folder is not None:
            self.folder.cleanup()

    def lead_or_follow(self, cycle: Cycle) -> Callable[[], object]:
        """Rank 0 returns a function that closes the ranks; they also close with the cycle and the interpreter. Other ranks follow
        rank 0 until it closes, then exit.

        Raises:
            ResourceError: a rank ended unexpectedly.
            SystemExit: rank 0 has closed the engine.
        """
        if isinstance(cycle, LeadingCycle):
            return weakref.finalize(cycle, _close, self, cycle.channel, cycle.failures)
        assert isinstance(cycle, FollowingCycle), "a cycle of ranks"
        channel = self.channel(cycle.layout.size)
        try:
            cycle.follow(channel)
        except RuntimeError as error:
            raise error if isinstance(error, GraphspecError) else channel.out_of_step(error) from error
        self.end(at_once=False)
        sys.exit(0)


def _close(ranks: Ranks, channel: Channel, failures: list[ResourceError]) -> None:
    reached = False
    if not failures:
        with suppress(Exception):
            channel.send_call(CLOSE)
            reached = True
    ranks.end(at_once=not reached)


def _end_children(children: list[Child], *, at_once: bool) -> None:
    for child in children:
        if at_once:
            child.process.kill()
        try:
            child.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        # Only now: a rank whose input closes ends at once, whatever it does.
        assert child.process.stdin is not None
        with suppress(OSError):
            child.process.stdin.close()
        child.pipe.close()
    children.clear()


def existing_ranks(size: int, device: str) -> Ranks | None:
    """This process's rank where ``torchrun`` or the caller has started the ranks; else None.

    Args:
        size: ranks of the engine.
        device: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        ConfigError: another number of processes than ranks.
    """
    if not dist.is_available():
        raise ConfigError(KEY, "1, since this torch has no torch.distributed", size)
    owns = not dist.is_initialized()
    if owns and not dist.is_torchelastic_launched():
        return None
    if owns:
        if "cuda" in _backend(device):
            torch.cuda.set_device(dist.get_node_local_rank())
        _init_group(_backend(device))
    if dist.get_world_size() != size:
        raise ConfigError(KEY, f"{dist.get_world_size()}, the processes that were started", size)
    ranks = Ranks(dist.get_rank(), size, owns_group=owns)
    if ranks.rank and not owns:
        # The engine ends this process, so whoever made the group can't.
        atexit.register(leave_group)
    return ranks


def leave_group() -> None:
    """End the process group, and with it its threads, which must not outlive the interpreter.

    A thread of gloo that drops the last reference to a tensor of Python's waits for the interpreter's lock. Once the interpreter ends, that
    ends the thread instead, inside a destructor, which aborts the process ("terminate called without an active exception").
    """
    if dist.is_initialized():
        with suppress(Exception):
            dist.destroy_process_group()


def _backend(device: str) -> str:
    return "cpu:gloo,cuda:nccl" if resolve_device(device) == "cuda" else "gloo"


def start(config: Config, device: str) -> Ranks:
    """Start the other ranks of an engine, and join them as rank 0.

    Args:
        config: of the engine.
        device: ``cpu`` or ``cuda``.

    Raises:
        ResourceError: a rank ended before it was there.
    """
    size = config.runtime.tensor_parallel
    folder = tempfile.TemporaryDirectory(prefix="graphspec-ranks-")
    ranks = Ranks(0, size, owns_group=True, folder=folder)
    rendezvous = str(Path(folder.name) / "store")
    try:
        for rank in range(1, size):
            ranks.children.append(_spawn(rank, pickle.dumps((config, rank, size, rendezvous, device))))
        for child in ranks.children:
            if child.pipe.read(len(READY)) != READY:
                raise ResourceError("ranks", f"rank {child.rank} to start", child.exit_reason() or "it ended")
        join(0, size, rendezvous, device)
    except BaseException:
        ranks.end(at_once=True)
        raise
    return ranks


def _spawn(rank: int, given: bytes) -> Child:
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "graphspec.api.follower", str(writer)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, pass_fds=(writer,))
    os.close(writer)
    child = Child(rank, process, os.fdopen(reader, "rb"))
    assert process.stdin is not None
    try:
        process.stdin.write(struct.pack("=q", len(given)) + given)
        process.stdin.flush()
    except OSError as error:
        raise ResourceError("ranks", f"rank {rank} to start", child.exit_reason() or error) from error
    return child


def _init_group(backend: str, **rendezvous: Any) -> None:
    # Functions of this module have the group of the time of its import as a default. Imported later, by anything, it would hold ours after
    # we have left it, and with it the threads that must not outlive the interpreter.
    import torch.distributed.nn.functional  # noqa: F401

    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, **rendezvous)


def join(rank: int, size: int, rendezvous: str, device: str) -> None:
    """Join the ranks of an engine on this machine, whose rendezvous is a file."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    _init_group(_backend(device), init_method=f"file://{rendezvous}", rank=rank, world_size=size)


def end_with_pipe(pipe: IO[bytes]) -> None:
    """End this process when the pipe from rank 0 closes, whatever it does then."""

    def wait() -> None:
        # Not by a method of the pipe: the interpreter, when it ends, waits for the lock that one would hold.
        os.read(pipe.fileno(), 1)
        os._exit(1)

    threading.Thread(target=wait, name="graphspec rank 0", daemon=True).start()

"""The processes of an engine with several ranks: started here, or by ``torchrun``.

An engine with ``runtime.tensor_parallel=n`` starts n - 1 processes next to its own, which is rank 0. They are given the configuration
through a pipe that stays open: when it closes, rank 0 is gone, and so are they. They are no ``multiprocessing`` children, which would run
the caller's main module again. Under ``torchrun`` every process makes the same engine, and all but rank 0 serve it until it closes.
"""

from __future__ import annotations

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

from ..config import Config
from ..errors import ConfigError, GraphspecError, ResourceError
from ..graphs.cycle import Cycle
from ..graphs.ranks import CLOSE, Channel, FollowingCycle, LeadingCycle
from ..kernels.collectives import Comm, make_comm

KEY = "runtime.tensor_parallel"
PATIENCE = timedelta(days=365)
"""How long a rank waits for another: an idle engine has its ranks wait. A rank that dies closes its sockets, which ends the wait."""
GRACE = 30.0
"""Seconds that a rank has to end by itself."""
LAST_WORDS = 5.0
"""Seconds that a rank has to say why it ended."""
READY = b"\n"


@dataclass(slots=True)
class Child:
    """A rank that this process started."""

    rank: int
    process: subprocess.Popen[bytes]
    words: IO[bytes]
    """It says that it is ready, and why it ends."""
    said: str = ""

    def last_words(self) -> str:
        """Why it ended; empty where another rank's end was the reason, or it still runs."""
        try:
            code = self.process.wait(LAST_WORDS)
        except subprocess.TimeoutExpired:
            return ""
        self.said = self.said or self.words.read().decode(errors="replace").strip()
        if self.said:
            return f"rank {self.rank}: {self.said}"
        return f"rank {self.rank} was ended by signal {-code}" if code < 0 else ""


@dataclass(slots=True)
class Ranks:
    """This process's place among the ranks of an engine.

    Attributes:
        rank, size: of the engine's ranks.
        children: those that this process started.
        owns_group: the process group is this engine's, and ends with it.
    """

    rank: int
    size: int
    children: list[Child] = field(default_factory=list)
    owns_group: bool = False
    folder: tempfile.TemporaryDirectory[str] | None = None
    """Where they met; NCCL looks there again when it is first used."""

    def comm(self, device: torch.device) -> Comm:
        """The collectives of the networks."""
        assert dist.group.WORLD is not None, "a group that was joined"
        return make_comm(dist.group.WORLD, device)

    def agree(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """The shortest of what the ranks have."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, values)
        return min(found, key=len)

    def channel(self, words: int) -> Channel:
        return Channel(words, self.why)

    def why(self) -> str:
        """Why another rank has ended, as far as this one knows."""
        return next((said for child in self.children if (said := child.last_words())), "another rank has ended")

    def abandon(self) -> None:
        """End what was begun, after an error before there is a cycle."""
        self.end(at_once=True)

    def end(self, *, at_once: bool) -> None:
        """Wait for the ranks that were started here, and kill those that don't end by themselves; leave the group."""
        _end_children(self.children, at_once=at_once)
        if self.owns_group and dist.is_initialized():
            with suppress(Exception):
                dist.destroy_process_group()
        if self.folder is not None:
            self.folder.cleanup()

    def lead_or_follow(self, cycle: Cycle) -> Callable[[], None]:
        """On rank 0, return what closes the ranks; the end of the cycle or of the interpreter does so too. Elsewhere follow, then exit.

        Raises:
            ResourceError: a rank has ended otherwise.
            SystemExit: rank 0 has closed the engine.
        """
        if isinstance(cycle, LeadingCycle):
            closing = weakref.finalize(cycle, _close, self, cycle.channel, cycle.parting)

            def close() -> None:
                closing()

            return close
        assert isinstance(cycle, FollowingCycle), "a cycle of ranks"
        channel = self.channel(cycle.layout.size)
        try:
            cycle.follow(channel)
        except RuntimeError as error:
            raise error if isinstance(error, GraphspecError) else channel.parted(error) from error
        self.end(at_once=False)
        sys.exit(0)


def _close(ranks: Ranks, channel: Channel, parting: list[ResourceError]) -> None:
    if not parting:
        with suppress(Exception):
            channel.tell(CLOSE)
    ranks.end(at_once=bool(parting))


def _end_children(children: list[Child], *, at_once: bool) -> None:
    for child in children:
        if at_once:
            child.process.kill()
        assert child.process.stdin is not None
        with suppress(OSError):
            child.process.stdin.close()
        try:
            child.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        child.words.close()
    children.clear()


def place(size: int, device: str) -> Ranks | None:
    """This process's place among ranks that are there already, started by ``torchrun`` or joined by the caller; None: there are none.

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
        dist.init_process_group(_backend(device), timeout=PATIENCE)
    if dist.get_world_size() != size:
        raise ConfigError(KEY, f"{dist.get_world_size()}, the processes that were started", size)
    return Ranks(dist.get_rank(), size, owns_group=owns)


def _backend(device: str) -> str:
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    return "cpu:gloo,cuda:nccl" if cuda else "gloo"


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
    meeting = str(Path(folder.name) / "store")
    try:
        for rank in range(1, size):
            ranks.children.append(_spawn(rank, pickle.dumps((config, rank, size, meeting, device))))
        for child in ranks.children:
            if child.words.read(len(READY)) != READY:
                raise ResourceError("ranks", f"rank {child.rank} to start", child.last_words() or "it ended")
        join(0, size, meeting, device)
    except BaseException:
        ranks.abandon()
        raise
    return ranks


def _spawn(rank: int, given: bytes) -> Child:
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "graphspec.engine.follower", str(writer)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, pass_fds=(writer,))
    os.close(writer)
    child = Child(rank, process, os.fdopen(reader, "rb"))
    assert process.stdin is not None
    try:
        process.stdin.write(struct.pack("=q", len(given)) + given)
        process.stdin.flush()
    except OSError as error:
        raise ResourceError("ranks", f"rank {rank} to start", child.last_words() or error) from error
    return child


def join(rank: int, size: int, meeting: str, device: str) -> None:
    """Join the ranks of an engine on this machine, which meet in a file."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(_backend(device), init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=PATIENCE)


def end_with_pipe(pipe: IO[bytes]) -> None:
    """End this process when the pipe from rank 0 closes, whatever it does then."""

    def wait() -> None:
        pipe.read()
        os._exit(1)

    threading.Thread(target=wait, name="graphspec rank 0", daemon=True).start()

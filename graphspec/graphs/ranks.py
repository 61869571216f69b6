"""Several ranks, one scheduler: rank 0 decides, and the others do what it does, in its order.

Before each launch rank 0 broadcasts its message as a block of fixed size. Rare calls (programs to build, rows to clear) are pickled.
Everything that a program computes after its logits has the same bits on every rank, so nothing is sent back.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import GraphspecError, ResourceError
from ..kernels.collectives import Comm
from ..shapes import SamplingClass
from .cycle import TIMED_RUNS, Cycle, Progress, RingEntry
from .programs import Key, Program
from .stages.mailbox import Message

CLOSE = "close"
MIRRORED = ("prepare", "time_depths", "share", "clear_row", "write_row", "reset")
"""Methods of a cycle that every rank calls."""
HEADER = 2
"""Words before the message of a launch: what follows (0: a launch, else bytes of an object), and the number of the program."""
HASHED = ("ring_ZBJ", "seq_len_R", "status_R", "window_token_RAc", "window_len_R", "path_BA", "accept_len_B")
"""What ranks compare in debug mode: tokens, paths and lengths."""


class Channel:
    """Broadcasts from rank 0 to the other ranks, on the host. Not thread-safe.

    Args:
        words: int64 words of a message.
        failure_reason: called after a collective failed; returns why the ranks are out of step.
    """

    def __init__(self, words: int, failure_reason: Callable[[], str]) -> None:
        self._block = torch.zeros(HEADER + words, dtype=torch.int64)
        self._failure_reason = failure_reason

    def send_launch(self, number: int, words: Tensor) -> None:
        """Have every rank launch a program.

        Args:
            number: of the program, in the order they were built.
            words: int64, the message.
        """
        self._block[:HEADER] = torch.tensor((0, number))
        self._block[HEADER:] = words
        dist.broadcast(self._block, 0)

    def send_call(self, name: str, *arguments: Any) -> None:
        """Have every rank call a method of its cycle, or end with :data:`CLOSE`."""
        call = torch.frombuffer(bytearray(pickle.dumps((name, arguments))), dtype=torch.uint8)
        self._block[:HEADER] = torch.tensor((call.numel(), 0))
        dist.broadcast(self._block, 0)
        dist.broadcast(call, 0)

    def receive(self) -> tuple[int, Tensor] | tuple[str, tuple[Any, ...]]:
        """Wait for the next broadcast of rank 0: ``(program number, message)`` of a launch, or ``(method, arguments)`` of a call."""
        dist.broadcast(self._block, 0)
        size, number = self._block[:HEADER].tolist()
        if size == 0:
            return number, self._block[HEADER:]
        call = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(call, 0)
        name, arguments = pickle.loads(call.numpy().tobytes())
        return name, arguments

    def out_of_step(self, error: BaseException) -> ResourceError:
        """The error to raise after ``error`` left the ranks out of step."""
        # A collective raises a plain RuntimeError when a peer is gone.
        peer_gone = isinstance(error, RuntimeError) and not isinstance(error, GraphspecError)
        reason = self._failure_reason() if peer_gone else str(error) or type(error).__name__
        return ResourceError("ranks", "every rank in step with rank 0", reason, "the engine has to be made anew")


class RankCycle(Cycle):
    """A cycle whose programs run on every rank at once; ``comm`` is that of its networks."""

    def __init__(self, *arguments: Any, comm: Comm, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._comm = comm

    def _dispensable(self, key: Key, coming: list[Key]) -> bool:
        """Never: all ranks need the same programs, so none is left out when memory is short."""
        return False

    def _digest(self, program: Program) -> Tensor:
        """int64 ``[ranks]``: each rank's hash of what the last program decided. Equal while the ranks are in step."""
        total = torch.zeros(1, dtype=torch.int64, device=self.arena.device)
        for name in HASHED:
            values = getattr(program.views, name).flatten().to(torch.int64)
            total = total * 1_000_003 + (values * torch.arange(1, len(values) + 1, device=values.device)).sum()
        return self._comm.all_gather(total)


class LeadingCycle(RankCycle):
    """The cycle of rank 0. After an error inside an operation of all ranks, the engine can only be closed."""

    def __init__(self, *arguments: Any, channel: Callable[[int], Channel], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.channel = channel(self.layout.size)
        self._numbers: dict[Key, int] = {}
        self._digests: dict[int, Tensor] = {}
        self.failures: list[ResourceError] = []
        """The error after which the ranks are out of step; empty before."""

    def _on_all_ranks(self, do: Callable[[], Any], *call: Any) -> Any:
        """Call ``do`` here and ``call``, a method name and its arguments, on the other ranks; returns the result of ``do``.

        Raises:
            ResourceError: it failed here, or a rank has ended; every later call raises the same error.
        """
        if self.failures:
            raise self.failures[0]
        try:
            if call:
                self.channel.send_call(*call)
            return do()
        except BaseException as error:
            self.failures.append(self.channel.out_of_step(error))
            raise self.failures[0] from error

    def prepare(self, keys: Iterable[Key], progress: Progress | None = None) -> None:
        missing = [key for key in keys if not self.prepared(key)]
        if not missing:
            return
        if self._in_flight:
            super().prepare(missing, progress)
        self._on_all_ranks(lambda: super(LeadingCycle, self).prepare(missing, progress), "prepare", missing)
        for key in missing:
            self._numbers.setdefault(key, len(self._numbers))

    def time_depths(self, buckets: Iterable[int], sampling: SamplingClass, runs: int = TIMED_RUNS) -> dict[int, dict[int, float]]:
        found = list(buckets)
        do = super().time_depths
        times: dict[int, dict[int, float]] = self._on_all_ranks(lambda: do(found, sampling, runs), "time_depths", found, sampling, runs)
        return times

    def clear_row(self, row: int, groups: AbstractSet[str]) -> None:
        do = super().clear_row
        self._on_all_ranks(lambda: do(row, groups), "clear_row", row, groups)

    def write_row(self, row: int, values: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[Any]]]) -> None:
        do = super().write_row
        self._on_all_ranks(lambda: do(row, values), "write_row", row, dict(values))

    def reset(self) -> None:
        do = super().reset
        self._on_all_ranks(do, "reset")

    def _send(self, slot: int, program: Program, key: Key, message: Message) -> None:
        do = super()._send

        def launch() -> None:
            for shared in message.shared:
                self.channel.send_call("share", shared)
            self.channel.send_launch(self._numbers[key], self._mail[slot].write(message))
            do(slot, program, key, message)
            if self.plan.debug:
                self._digests[slot] = self._digest(program)

        self._on_all_ranks(launch)

    def read(self, ticket: int) -> RingEntry:
        entry = super().read(ticket)
        digest = self._digests.pop(ticket % self.plan.ring_depth, None)
        if digest is not None and len(found := set(digest.tolist())) > 1:
            error = ResourceError("ranks", "the same tokens, paths and lengths on every rank", f"{len(found)} different hashes")
            self.failures.append(error)
            raise error
        return entry


class FollowingCycle(RankCycle):
    """The cycle of every other rank."""

    def follow(self, channel: Channel) -> None:
        """Mirror rank 0 until it closes.

        Raises:
            ResourceError: rank 0 or another rank has ended.
        """
        keys: list[Key] = []
        while True:
            received = channel.receive()
            if isinstance(received[1], Tensor):
                self._launch_again(keys[int(received[0])], received[1])
                continue
            name, arguments = received
            if name == CLOSE:
                return
            assert name in MIRRORED, "rank 0 runs the same code"
            getattr(self, str(name))(*arguments)
            if name == "prepare":
                keys += arguments[0]

    def _launch_again(self, key: Key, words: Tensor) -> None:
        program, slot = self.programs[key], self._launched % self.plan.ring_depth
        event = self._events[slot]
        if event is not None:
            # The buffer's last message may not have been copied to the device yet.
            event.synchronize()
        self._mail[slot].words.copy_(words)
        self._launched += 1
        with torch.no_grad():
            if self.plan.debug:
                self.arena.poison(("lane",))
            if program.prefills:
                self.arena["mail"].copy_(self._mail[slot].words, non_blocking=True)
            else:
                self._send_front[slot]()
            program()
            if event is not None:
                event.record()
            if self.plan.debug:
                self._digest(program)

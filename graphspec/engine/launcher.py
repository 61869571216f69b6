"""What the scheduler launches with, and what it keeps of a launch until its result is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..graphs.cycle import Cycle, RingEntry
from ..graphs.programs import Key
from ..graphs.stages.mailbox import Message
from ..plan.buffers import Kind
from .request import Request


class Launcher(Protocol):
    """The part of a cycle that the scheduler uses."""

    def launch(self, key: Key, message: Message) -> int: ...

    def read(self, ticket: int) -> RingEntry: ...

    @property
    def in_flight(self) -> int: ...


class Forwarding:
    """A launcher that forwards every call to a cycle: what recorders and comparisons begin from."""

    def __init__(self, cycle: Cycle) -> None:
        self.cycle = cycle

    @property
    def in_flight(self) -> int:
        return self.cycle.in_flight

    def launch(self, key: Key, message: Message) -> int:
        return self.cycle.launch(key, message)

    def read(self, ticket: int) -> RingEntry:
        return self.cycle.read(ticket)

    def mail(self, message: Message) -> Tensor:
        """``message`` as the ``mail`` slot holds it."""
        mail = torch.zeros(self.cycle.layout.size, dtype=torch.int64)
        self.cycle.layout.encode(message, mail)
        return mail

    @contextmanager
    def rewinding(self, message: Message, *kinds: Kind) -> Iterator[Callable[[], None]]:
        """Gives a function that puts slots of these kinds back to their contents now, with ``message`` as mail; done at the end too."""
        arena, mail = self.cycle.arena, self.mail(message)
        before = arena.snapshot(kinds)

        def rewind() -> None:
            arena.restore(before)
            arena["mail"].copy_(mail)

        try:
            yield rewind
        finally:
            arena.restore(before)


@dataclass(frozen=True, slots=True)
class Ticket:
    """An unread launch: its program, and the request of each of its lanes."""

    number: int
    lanes: tuple[Request, ...]
    key: Key
    launched: float
    """Seconds of :func:`time.perf_counter`."""
    drafts: tuple[int, ...] | None
    """The most tokens that each lane of a cycle whose depth was chosen can draft; None: not known before the launch."""

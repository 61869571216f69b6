"""What the scheduler launches with, and what it keeps of a launch until its result is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..graphs.cycle import RingEntry
from ..graphs.programs import Key
from ..graphs.stages.mailbox import Message
from .request import Request


class Launcher(Protocol):
    """The part of a cycle that the scheduler uses."""

    def launch(self, key: Key, message: Message) -> int: ...

    def read(self, ticket: int) -> RingEntry: ...

    @property
    def in_flight(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Ticket:
    """An unread launch: its program, and the request of each of its lanes."""

    number: int
    lanes: tuple[Request, ...]
    key: Key
    launched: float
    """Seconds of :func:`time.perf_counter`."""

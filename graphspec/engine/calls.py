"""Calls: requests that were submitted together, as the driving thread (:class:`Call`) and the caller (:class:`Handle`) see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from ..host.progress import Progress
from .depth import DepthPolicy
from .launcher import Launcher
from .request import Request

BuildProgress = tuple[str, int, int]
"""Progress of building programs: phase, done, total."""
InboxItem = Request | BuildProgress | None
"""One entry of a call's inbox: a request whose output or state changed, build progress, or None when the call has ended."""


@dataclass(frozen=True, slots=True)
class Exclusive:
    """Settings of an exclusive call, which runs while no other call is open.

    Attributes:
        launcher: used instead of the cycle; None: the cycle.
        policy: used instead of the engine's; None: the engine's.
        until: called after every step; returning True ends the call and aborts its unfinished requests. It may read the slots.
    """

    launcher: Launcher | None = None
    policy: DepthPolicy | None = None
    until: Callable[[], bool] | None = None


@dataclass(eq=False, slots=True)
class Call:
    """Requests that were submitted together, or other work for the driving thread.

    Attributes:
        requests: checked, and not ended.
        streaming: the caller is sent each request whenever its output has grown; otherwise it is woken once, when all have ended.
        exclusive: the settings of an exclusive call; None: other calls may be open.
        work: called by the driving thread between two steps, for a call without requests.
        notify: called by the driving thread after each item it sent; it must not block.
        failure: the error that ended the call early.
        unfinished: requests that have not ended, as the driving thread counts them.
    """

    requests: Sequence[Request] = ()
    streaming: bool = True
    exclusive: Exclusive | None = None
    work: Callable[[], None] | None = None
    notify: Callable[[], None] | None = None
    failure: BaseException | None = None
    inbox: SimpleQueue[InboxItem] = field(default_factory=SimpleQueue)
    unfinished: int = 0

    def send(self, item: InboxItem) -> None:
        """Send an item to the caller. Thread-safe."""
        self.inbox.put(item)
        if self.notify is not None:
            self.notify()


@dataclass(frozen=True, slots=True)
class CallerLeft:
    """The caller no longer waits for a call, which is aborted."""

    call: Call


Commands = SimpleQueue[Call | CallerLeft | None]
"""From callers to the driving thread; None ends it. ``put`` of a SimpleQueue is reentrant, so a finalizer may call it anywhere."""


class Handle:
    """The caller's end of a call. Dropping the last reference aborts what is left of the call.

    Args:
        call: sent, or about to be.
        commands: the queue of the driving thread.
        engine: kept alive while the call is open.
        progress: called in the caller's thread while programs are built.
    """

    ended = True
    """Everything that the call sends has been received."""

    def __init__(self, call: Call, commands: Commands, engine: object, progress: Progress | None) -> None:
        self._call, self._commands, self._engine, self._progress = call, commands, engine, progress
        self.ended = False

    def wait(self) -> list[Request]:
        """Wait until a request has changed; returns those that have. Empty: the call has ended. A finished request may be reported twice.

        Raises:
            Exception: the error that ended the call early.
        """
        found: list[Request] = []
        while not found and not self.ended:
            found = self._sort([self._call.inbox.get(), *self._received()])
        return found

    def take(self) -> list[Request]:
        """As :meth:`wait`, without waiting: returns what has arrived, possibly nothing."""
        return [] if self.ended else self._sort(self._received())

    def abort(self) -> None:
        """Abort the unfinished requests. Thread-safe and idempotent; what was sent before can still be received."""
        if not self.ended:
            self._commands.put(CallerLeft(self._call))

    def _received(self) -> list[InboxItem]:
        items: list[InboxItem] = []
        while True:
            try:
                items.append(self._call.inbox.get_nowait())
            except Empty:
                return items

    def _sort(self, items: list[InboxItem]) -> list[Request]:
        found: dict[Request, None] = {}
        for item in items:
            if item is None:
                self.ended = True
            elif isinstance(item, Request):
                found[item] = None
            elif self._progress is not None:
                self._progress(*item)
        if self._call.failure is not None:
            self.ended = True
            raise self._call.failure
        return list(found)

    def __del__(self) -> None:
        if not self.ended:
            self._commands.put(CallerLeft(self._call))

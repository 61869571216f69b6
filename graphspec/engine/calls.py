"""Calls: requests that came together, as the driving thread sees them (:class:`Call`) and as their caller does (:class:`Handle`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from ..graphs.cycle import Progress
from .depth import DepthPolicy
from .launcher import Launcher
from .request import Request

BuildProgress = tuple[str, int, int]
"""Progress of building programs: phase, done, total."""
InboxItem = Request | BuildProgress | None
"""What a caller is sent: a request whose output or state changed, progress, or that the call has ended."""


@dataclass(frozen=True, slots=True)
class Exclusive:
    """How a call runs that has the engine to itself.

    Attributes:
        launcher: used in place of the cycle; None: the cycle.
        policy: used in place of the engine's; None: the engine's.
        until: asked after every step; True ends the call, whose unfinished requests are aborted. It may read what the step left.
    """

    launcher: Launcher | None = None
    policy: DepthPolicy | None = None
    until: Callable[[], bool] | None = None


@dataclass(eq=False, slots=True)
class Call:
    """Requests that came together, or other work for the driving thread.

    Attributes:
        requests: checked, and not ended.
        streaming: the caller wants each request whenever its output has grown; otherwise it is woken when all have ended.
        exclusive: the call has the engine to itself.
        work: what the driving thread does between two steps, where that is all there is to the call.
        notify: called by the driving thread after each item it sent; it may not block.
        failure: what ended the call before its requests had ended.
        unfinished: how many requests have not ended, as the driving thread counts them.
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
        """Give an item to the caller, in any thread."""
        self.inbox.put(item)
        if self.notify is not None:
            self.notify()


@dataclass(frozen=True, slots=True)
class CallerLeft:
    """The caller of a call does not wait for it any more."""

    call: Call


Commands = SimpleQueue[Call | CallerLeft | None]
"""What callers send to the driving thread, None to end it. Putting is one step, so a finalizer may do it anywhere."""


class Handle:
    """The caller's end of a call. Dropping the last reference aborts what is left of the call.

    Args:
        call: that was sent, or is about to be.
        commands: of the driving thread.
        engine: kept alive while the call is open.
        progress: called in the caller's thread while programs are built.
    """

    ended = True
    """All that the call sends has been received."""

    def __init__(self, call: Call, commands: Commands, engine: object, progress: Progress | None) -> None:
        self._call, self._commands, self._engine, self._progress = call, commands, engine, progress
        self.ended = False

    def wait(self) -> list[Request]:
        """Requests that changed; waits until there is one. Empty: the call has ended. One that has ended may be reported twice.

        Raises:
            Exception: what ended the call early.
        """
        found: list[Request] = []
        while not found and not self.ended:
            found = self._sort([self._call.inbox.get(), *self._received()])
        return found

    def take(self) -> list[Request]:
        """What :meth:`wait` returns, as far as it is there; does not wait."""
        return [] if self.ended else self._sort(self._received())

    def abort(self) -> None:
        """End what is left of the call. Any thread may do so, more than once; what was sent before stays."""
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

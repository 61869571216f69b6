"""The thread that drives an engine, and calls: requests that were submitted together, as the thread and the caller see them."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from ..errors import ResourceError
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
        """Like :meth:`wait`, but returns at once, possibly with an empty list."""
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


Outbox = list[tuple[Call, InboxItem]]
"""Items to send to callers."""


class DrivenEngine(Protocol):
    """The engine as its thread sees it. The thread holds it weakly between turns, so that an unused engine can be collected."""

    def turn(self, command: Call | CallerLeft | None) -> tuple[Outbox, bool]:
        """Handle commands and make one step; returns what to send to callers, and whether there is more to do. Never raises."""

    def shut_down(self) -> Outbox:
        """End every call and wait for the device. Never raises."""


def thread_settings(device: str) -> Callable[[], None]:
    """A function that gives the driving thread torch's settings of this one, which loads the engine: torch keeps them per thread."""
    threads, on_cuda = torch.get_num_threads(), device == "cuda" and torch.cuda.is_available()
    # Weights were loaded on it; launches go to the same one.
    stream = torch.cuda.current_stream() if on_cuda else None

    def apply() -> None:
        # Without a first read, torch later replaces the thread's count by the one last set in any thread.
        torch.get_num_threads()
        torch.set_num_threads(threads)
        if device == "cpu":
            # Denormals make CPU kernels many times slower and carry no information here.
            torch.set_flush_denormal(True)
        if stream is not None:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)

    return apply


class Driver:
    """One thread for one engine.

    It ends when it is closed, when the engine is collected, and before the interpreter does.

    Args:
        driven: the engine.
        device: of the engine, ``cpu`` or ``cuda``.
    """

    def __init__(self, driven: DrivenEngine, device: str) -> None:
        self.commands: Commands = SimpleQueue()
        self._stopping, self._process = threading.Event(), os.getpid()
        arguments = weakref.ref(driven), self.commands, self._stopping, thread_settings(device)
        # A daemon: at exit the interpreter joins other threads before it runs the finalizer that stops this one.
        self.thread = threading.Thread(target=_drive, args=arguments, name="graphspec engine", daemon=True)
        self._finalizer = weakref.finalize(driven, _stop, self.commands, self._stopping, self.thread, self._process)
        self.thread.start()

    @property
    def stopping(self) -> bool:
        """The thread ends after its current step."""
        return self._stopping.is_set()

    @property
    def runs(self) -> bool:
        """Whether the thread runs and is not being ended."""
        return self.thread.is_alive() and not self.stopping

    def check(self) -> None:
        """Check that this thread may send commands.

        Raises:
            ResourceError: the engine is closed, or belongs to another process, or this is the driving thread, which would wait for itself.
        """
        if self._process != os.getpid():
            hint = "make the engine in the process that uses it"
            raise ResourceError("engine", f"use in the process that made it, {self._process}", f"a fork of it, {os.getpid()}", hint)
        if threading.get_ident() == self.thread.ident:
            raise ResourceError("engine", "a call from outside its own steps", "one from a launcher or a policy in a step")
        if self.stopping:
            raise closed()

    def send(self, call: Call) -> None:
        """Send a call to the thread.

        Raises:
            ResourceError: as :meth:`check`.
        """
        self.check()
        self.commands.put(call)
        if self.stopping:
            # The thread may have emptied the queue for the last time before this call was put.
            _refuse(call)

    def close(self) -> None:
        """End the thread after its step, and every open call with an error. Idempotent."""
        self._finalizer()


def closed() -> ResourceError:
    """The error of a call on an engine that is closed."""
    return ResourceError("engine", "an open engine", "one that was closed")


def _refuse(call: Call) -> None:
    call.failure = call.failure or closed()
    # An event loop may be closed as well.
    with suppress(RuntimeError):
        call.send(None)


def _stop(commands: Commands, stopping: threading.Event, thread: threading.Thread, process: int) -> None:
    if os.getpid() != process:
        return
    stopping.set()
    commands.put(None)
    if threading.get_ident() != thread.ident:
        thread.join()


def _drive(weak: weakref.ref[DrivenEngine], commands: Commands, stopping: threading.Event, apply_settings: Callable[[], None]) -> None:
    apply_settings()
    busy = False
    while True:
        # An idle thread holds no reference to the engine.
        command = None if busy else commands.get()
        driven = weak()
        if driven is None:
            break
        outbox: Outbox = []
        last = stopping.is_set()
        if not last:
            outbox, busy = driven.turn(command)
        else:
            if isinstance(command, Call):
                _refuse(command)
            outbox = driven.shut_down()
        # Callers are notified only after this reference is gone, so that a caller who drops the engine drops the last one.
        del driven, command
        _send(outbox, commands)
        outbox.clear()
        if last:
            break
        # When stopping, do not wait for another command: the one that woke the thread may have been consumed.
        busy = busy or stopping.is_set()
    while True:
        try:
            command = commands.get_nowait()
        except Empty:
            return
        if isinstance(command, Call):
            _refuse(command)


def _send(outbox: Outbox, commands: Commands) -> None:
    for call, item in outbox:
        try:
            call.send(item)
        except Exception:  # noqa: BLE001  its event loop is closed: nobody waits for that call
            commands.put(CallerLeft(call))

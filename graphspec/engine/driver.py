"""The thread that drives an engine: its settings, its loop, and its end."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from ..errors import ResourceError
from ..plan import Plan
from .calls import Call, CallerLeft, Commands, InboxItem

Outbox = list[tuple[Call, InboxItem]]
"""What callers are to be sent."""


class DrivenEngine(Protocol):
    """What the thread drives. It is held weakly between turns, so that an engine nobody holds can be collected."""

    def turn(self, command: Call | CallerLeft | None) -> tuple[Outbox, bool]:
        """Obey, make one step; returns what callers are to be sent, and whether there is more to do. Raises nothing."""

    def shut_down(self) -> Outbox:
        """End every call and wait for the device. Raises nothing."""


@dataclass(frozen=True, slots=True)
class ThreadSettings:
    """What torch keeps per thread, as the thread that loaded the engine has it.

    Attributes:
        threads: of torch's loops on a CPU.
        flush_denormal: denormals make CPU kernels many times slower and carry no information here.
        stream: CUDA stream on which weights were loaded, and launches follow them.
    """

    threads: int
    flush_denormal: bool
    stream: torch.cuda.Stream | None

    @classmethod
    def of(cls, plan: Plan) -> ThreadSettings:
        on_cuda = plan.device == "cuda" and torch.cuda.is_available()
        return cls(torch.get_num_threads(), plan.device == "cpu", torch.cuda.current_stream() if on_cuda else None)

    def apply(self) -> None:
        """Give them to this thread."""
        # A thread that has never asked takes the count that was set last in any thread, whatever was set in it before.
        torch.get_num_threads()
        torch.set_num_threads(self.threads)
        if self.flush_denormal:
            torch.set_flush_denormal(True)
        if self.stream is not None:
            torch.cuda.set_device(self.stream.device)
            torch.cuda.set_stream(self.stream)


class Driver:
    """One thread for one engine.

    It ends when it is closed, when the engine is collected, and before the interpreter does.

    Args:
        driven: the engine.
        plan: of the engine.
    """

    def __init__(self, driven: DrivenEngine, plan: Plan) -> None:
        self.commands: Commands = SimpleQueue()
        self._stopping, self._process = threading.Event(), os.getpid()
        arguments = weakref.ref(driven), self.commands, self._stopping, ThreadSettings.of(plan)
        # A daemon, since the interpreter waits for other threads before it runs what stops this one.
        self.thread = threading.Thread(target=_drive, args=arguments, name="graphspec engine", daemon=True)
        self._finalizer = weakref.finalize(driven, _stop, self.commands, self._stopping, self.thread, self._process)
        self.thread.start()

    @property
    def stopping(self) -> bool:
        """Nothing new is begun."""
        return self._stopping.is_set()

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
            # The thread may have looked for the last time before the call came.
            _refuse(call)

    def close(self) -> None:
        """End the thread after its step, and every open call with an error. May be called again."""
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


def _drive(weak: weakref.ref[DrivenEngine], commands: Commands, stopping: threading.Event, settings: ThreadSettings) -> None:
    settings.apply()
    busy = False
    while True:
        # Idle, the thread holds nothing of the engine.
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
        # What callers learn of a step they learn after the step: whoever drops the engine then drops the last reference.
        del driven, command
        _send(outbox, commands)
        outbox.clear()
        if last:
            break
        # The next turn is the last: nothing waits for a command that has come already.
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
        except Exception:  # noqa: BLE001  an event loop that was closed: nobody waits for that call
            commands.put(CallerLeft(call))

"""The thread that drives an engine: its settings, its loop, and its end."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from ..errors import ResourceError
from .calls import Call, CallerLeft, Commands, InboxItem

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

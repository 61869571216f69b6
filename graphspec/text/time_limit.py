"""A time limit for Python code that has none of its own."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class LateError(BaseException):
    """The code took too long. No ``Exception``, so that the code does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """A context whose code is interrupted after ``seconds``, between two instructions of the interpreter; a call into C ends first.

    Raises:
        LateError: it was interrupted.
    """
    thread, lock = ctypes.c_ulong(threading.get_ident()), threading.Lock()
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    late = over = False

    def interrupt() -> None:
        nonlocal late
        with lock:
            if not over:
                late = True
                raise_in(thread, ctypes.py_object(LateError))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            over = True
            if late:
                # It may not have been raised yet, and must not be raised later.
                raise_in(thread, None)
        if late:
            raise LateError

"""A time limit for Python code that has none of its own."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MAX_CHECKS = 1_000_000
"""Steps of a loop, before each of which the interpreter raises what another thread sent; one is enough unless the code caught it."""


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
    late = over = delivered = False

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
    except LateError:
        delivered = True
        raise
    finally:
        timer.cancel()
        with lock:
            over = True
        if late and not delivered:
            # It is on its way, and must not be raised later. It can't be taken back: Python 3.11 would look for it for ever, at every call.
            with suppress(LateError):
                for _ in range(MAX_CHECKS):
                    pass
            raise LateError

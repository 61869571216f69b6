"""A program of native ops as one call, the CPU's counterpart of a captured graph.

Addresses of slots and weights are fixed for the lifetime of an engine, and every op has the same sizes at each launch. So the calls of one
run can be repeated by a loop in C++, without Python, dispatcher or compiler. A tape also owns the intermediate tensors of that run, so
nothing is allocated later. :mod:`.record` records the calls.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from ..threads import team_threads
from .build import function


class Calls:
    """Recorded calls of native ops, in order, and the memory they use."""

    def __init__(self) -> None:
        self.made: list[tuple[int, bytes]] = []
        """``(address of a function, fields it was called with)``."""
        self.memory: list[Tensor] = []

    def add(self, run: Callable[..., None], fields: bytes, tensors: Iterable[Tensor]) -> None:
        """Record one call."""
        address = ctypes.cast(run, ctypes.c_void_p).value  # type: ignore[arg-type]
        assert address is not None, "a function of the library"
        self.made.append((address, fields))
        self.memory.extend(tensors)


class Tape:
    """Repeats recorded calls whenever it is called.

    Args:
        calls: to repeat, in order.
    """

    def __init__(self, calls: Sequence[Calls]) -> None:
        self._made = [made for each in calls for made in each.made]
        self._memory = [tensor for each in calls for tensor in each.memory]
        self._entries = array("Q")
        for address, fields in self._made:
            at = ctypes.cast(ctypes.c_char_p(fields), ctypes.c_void_p).value
            assert at is not None, "bytes have an address"
            self._entries.extend((address, at))
        self._replay = function("replay")

    def __len__(self) -> int:
        return len(self._made)

    def __call__(self) -> None:
        """Repeat all calls."""
        self._replay(self._entries.buffer_info()[0], len(self._made), team_threads())


_noted: ContextVar[Calls | None] = ContextVar("noted", default=None)


def recording() -> Calls | None:
    """The recording of this thread's native ops; None: there is none."""
    return _noted.get()


@contextmanager
def noting(calls: Calls) -> Iterator[None]:
    """A context in which native ops of this thread are recorded in ``calls``."""
    token = _noted.set(calls)
    try:
        yield
    finally:
        _noted.reset(token)

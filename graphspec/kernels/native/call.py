"""Calls from Python into C++, one packed struct each, and tapes that repeat them.

A tape is a program of native ops as one call, the CPU's counterpart of a captured graph. Addresses of slots and weights are fixed for the
lifetime of an engine, and every op has the same sizes at each launch. So the calls of one run can be repeated by a loop in C++, without
Python, dispatcher or compiler. A tape also owns the intermediate tensors of that run, so nothing is allocated later. It holds native ops
only. Views and allocations need not be repeated, and copies are done by a native op. If any other op runs, there is no tape, and the
caller has to compile the program.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import ConfigError
from .build import function


def call(name: str, tensors: Sequence[Tensor | None], *values: int) -> None:
    """Run ``graphspec_<name>`` of the library.

    Args:
        name: of the function.
        tensors: the pointers at the start of its struct; None: null.
        values: the int64 fields after them; a double is passed as :func:`bits`.
    """
    fields = struct.pack(f"={len(tensors) + len(values)}q", *(0 if x is None else x.data_ptr() for x in tensors), *values)
    run = function(name)
    run(fields, team_threads())
    calls = recording()
    if calls is not None:
        calls.add(run, fields, [x for x in tensors if x is not None])


@functools.lru_cache(maxsize=256)
def bits(value: float) -> int:
    """The bits of a double as an int64."""
    word: int = struct.unpack("=q", struct.pack("=d", value))[0]
    return word


KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of KV pools, whose numbers are widened to float32 as they are read."""
MAX_DIMS = 6


def copy(to: Tensor, x: Tensor) -> None:
    """``to.copy_(x)`` for any strides.

    Args:
        to: written; no two elements share memory.
        x: of the same dtype, shape or a shape that broadcasts to it.

    Raises:
        ConfigError: another dtype, or more than :data:`MAX_DIMS` dimensions.
    """
    if to.dtype != x.dtype or to.dim() > MAX_DIMS:
        raise ConfigError("native copy", f"{to.dtype} of at most {MAX_DIMS} dimensions", f"{x.dtype} of {to.dim()}")
    x = x.expand(to.shape)
    room = [1] * (MAX_DIMS - to.dim())
    call("copy", (to, x), to.element_size(), *room, *to.shape, *room, *to.stride(), *room, *x.stride())


def dense(x: Tensor) -> Tensor:
    """``x`` if it is contiguous, else a contiguous copy."""
    if x.is_contiguous():
        return x
    made = torch.empty(x.shape, dtype=x.dtype)
    copy(made, x)
    return made


def require(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Check the dtype of a tensor that C++ reads.

    Raises:
        ConfigError: it has another dtype.
    """
    if tensor.dtype is not dtype:
        hint = "the native CPU kernels are float32 only; choose kernels.attention=reference for others" if dtype is torch.float32 else ""
        raise ConfigError(f"native kernels: {name}", str(dtype), str(tensor.dtype), hint)


def require_slots(*slots: Tensor | None) -> None:
    """Check that slots which C++ accesses in place are contiguous.

    Raises:
        ConfigError: one is not.
    """
    for slot in slots:
        if slot is not None and not slot.is_contiguous():
            raise ConfigError("native cycle op", "contiguous slots", f"strides {slot.stride()}")


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


ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
NAMESPACE = "graphspec_native"


class _Watch(TorchDispatchMode):
    """Watches all operators, and records the first that a tape cannot repeat."""

    refused: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].dtype == args[1].dtype:
            copy(*args[:2])
            return args[0]
        if not (func.namespace == NAMESPACE or func.is_view or func.overloadpacket.__name__ in ALLOCATIONS):
            self.refused = self.refused or str(func)
        return func(*args, **kwargs or {})


def record(run: Callable[[], None]) -> Calls | str:
    """Call ``run``. Returns its native calls or, if it also ran other operators, the name of the first."""
    calls, watch = Calls(), _Watch()  # type: ignore[no-untyped-call]
    with noting(calls), watch:
        run()
    return calls if watch.refused is None else watch.refused


_team: ContextVar[int | None] = ContextVar("team", default=None)


def team_threads() -> int:
    """Threads of native ops: as many as torch has, or had outside :func:`torch_loops`."""
    return _team.get() or torch.get_num_threads()


@contextmanager
def torch_loops(threads: int) -> Iterator[None]:
    """A context in which torch's loops in this thread use ``threads`` threads, and native ops as many as before.

    OpenMP keeps the number per thread, so other threads of the program are not affected.
    """
    before = torch.get_num_threads()
    token = _team.set(team_threads())
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _team.reset(token)

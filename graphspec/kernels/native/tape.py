"""A program of native ops as one call: what a captured graph is on a GPU.

Every slot and every weight lies where it lies for as long as an engine lives, and every op has the same sizes at each launch. So the calls
that one run of a program makes can be made again, in one loop in C++ and without Python, dispatcher or compiler. A tape is made by running
the program under :func:`record`. It holds what the run left between two ops as well, so nothing is allocated later.

Only native ops are on a tape. Views and allocations need not be; copies are done by a native op. When anything else computes, there is no
tape, and whoever asked for one has to compile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..threads import team_threads
from .build import function

_recording: ContextVar[Tape | None] = ContextVar("recording", default=None)
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
NAMESPACE = "graphspec_native"


class Tape:
    """Calls of native ops in order, and the memory they use."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, bytes]] = []
        self._memory: list[Tensor] = []
        self._entries: ctypes.Array[ctypes.c_void_p] = (ctypes.c_void_p * 0)()

    def add(self, run: Callable[..., None], fields: bytes, tensors: Iterable[Tensor]) -> None:
        """Note one call."""
        address = ctypes.cast(run, ctypes.c_void_p).value  # type: ignore[arg-type]
        assert address is not None, "a function of the library"
        self._calls.append((address, fields))
        self._memory.extend(tensors)

    def __len__(self) -> int:
        return len(self._calls)

    def __call__(self) -> None:
        """All calls again."""
        function("replay")(self._entries, len(self._calls), team_threads())

    @classmethod
    def joined(cls, tapes: Sequence[Tape]) -> Tape:
        """One tape of several, in this order."""
        made = cls()
        for tape in tapes:
            made._calls += tape._calls
            made._memory += tape._memory
        words = [word for address, fields in made._calls for word in (address, ctypes.cast(fields, ctypes.c_void_p).value)]
        made._entries = (ctypes.c_void_p * len(words))(*words)
        return made


def recording() -> Tape | None:
    """The tape that native ops are noted on in this thread, if there is one."""
    return _recording.get()


class _Watch(TorchDispatchMode):
    """Sees every operator that runs, and notes the first that a tape cannot repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: str | None = None
        self._constant: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and args[0].dtype == args[1].dtype and self._fresh(args[:1]):
            from .call import copy

            copy(*args[:2])
            return args[0]
        result = func(*args, **kwargs)
        if self.refused is None and not self._repeats(func, args, kwargs, result):
            self.refused = str(func)
        return result

    def _fresh(self, written: Iterable[Any]) -> bool:
        """None of these tensors was made once and for all."""
        return not any(isinstance(x, Tensor) and x.untyped_storage().data_ptr() in self._constant for x in written)

    def _repeats(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        if func.namespace == NAMESPACE:
            arguments = func._schema.arguments
            given = {**dict(zip((one.name for one in arguments), args, strict=False)), **kwargs}
            return self._fresh(given.get(one.name) for one in arguments if one.alias_info is not None and one.alias_info.is_write)
        if func.is_view or func.overloadpacket.__name__ in ALLOCATIONS:
            return True
        if any(isinstance(x, Tensor) for x in (*args, *kwargs.values())) or not isinstance(result, Tensor):
            return False
        # What is made from nothing is the same every time; it is kept, unless an op writes to it.
        self._constant.add(result.untyped_storage().data_ptr())
        return True


def record(run: Callable[[], None]) -> Tape | str:
    """Run ``run``, and return its calls as a tape, or the operator that keeps it from being one."""
    tape, watch = Tape(), _Watch()
    token = _recording.set(tape)
    try:
        with watch:
            run()
    finally:
        _recording.reset(token)
    return tape if watch.refused is None else watch.refused

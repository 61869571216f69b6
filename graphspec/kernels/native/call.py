"""Calls from Python into C++: one packed struct per call, which a tape can keep and pass again."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import ConfigError
from ..threads import team_threads
from .build import function
from .tape import recording


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

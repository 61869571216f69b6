"""The two kinds of weight files: safetensors, and what ``torch.save`` wrote."""

from __future__ import annotations

import pickle
import zipfile
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class TensorFile(Protocol):
    """Named tensors of one file; dtypes are called as safetensors calls them."""

    def names(self) -> list[str]: ...

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype, without reading the tensor."""
        ...

    def tensor(self, name: str) -> Tensor: ...


class _Safetensors:
    def __init__(self, file: Path) -> None:
        try:
            self._handle: Any = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(str(file), "a complete safetensors file", f"{error}, {file.stat().st_size} bytes") from error

    def names(self) -> list[str]:
        return list(self._handle.keys())

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        view = self._handle.get_slice(name)
        return tuple(view.get_shape()), str(view.get_dtype())

    def tensor(self, name: str) -> Tensor:
        found: Tensor = self._handle.get_tensor(name)
        return found


def load_pickle(file: Path) -> Any:
    """What ``torch.save`` wrote: tensors, numbers and containers of them; nothing that could run code (``weights_only``).

    Raises:
        CheckpointError: unreadable, or something else.
    """
    try:
        # only the zip format of torch >= 1.6 can be mapped
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError, AttributeError) as error:
        size = file.stat().st_size if file.is_file() else 0
        found = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}, {size} bytes"
        raise CheckpointError(str(file), "a complete file of plain tensors, written by torch.save", found) from error


class _Pickled:
    def __init__(self, file: Path) -> None:
        values = load_pickle(file)
        stray = next((name for name, value in values.items() if not isinstance(value, Tensor)), None) if isinstance(values, dict) else ""
        if stray is not None:
            found = f"{stray} of type {type(values[stray]).__name__}" if isinstance(values, dict) else type(values).__name__
            raise CheckpointError(str(file), "a dictionary of name: tensor", found)
        self._tensors: dict[str, Tensor] = values

    def names(self) -> list[str]:
        return list(self._tensors)

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        found = self._tensors[name]
        return tuple(found.shape), _NAMES.get(found.dtype, str(found.dtype))

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def open_tensors(file: Path) -> TensorFile:
    """The tensors of a ``.safetensors`` or ``.bin`` file.

    Raises:
        CheckpointError: damaged, or no file of named tensors.
    """
    return _Safetensors(file) if file.suffix == ".safetensors" else _Pickled(file)

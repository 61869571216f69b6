"""The two kinds of weight files: safetensors, and what ``torch.save`` wrote. Either may come from anywhere and hold anything."""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from ..config.checks import LONG, brief
from ..errors import CheckpointError, spell_bytes
from ..facts.files import open_file, plain, require_file

if TYPE_CHECKING:
    from pathlib import Path

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip

_ZIP = b"PK\x03\x04"
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How a file from before torch 1.6 begins: a pickle of its own, the magic number."""
_LEGACY_PROGRAMS = 5
"""Magic number, version, kind of machine, the object, and the keys of its storages, whose data follow."""
MAX_PROGRAM = 4 * 2**20
"""Bytes of a pickle, without the data of its tensors: some 20,000 of them. Reading it takes time in proportion."""
_TENSOR_PARTS = (
    "collections OrderedDict", "torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3",
    "torch._utils _rebuild_parameter", "torch.nn.parameter Parameter", "torch Tensor", "torch Size",
)  # fmt: skip
"""Names in the pickle of a dictionary of plain tensors, apart from storages and dtypes. ``weights_only`` lets more through, among it
``bytearray``, which takes any amount of memory."""
_TOO_NEW = {"STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4", "FRAME"}


class TensorFile(Protocol):
    """Named tensors of one file; dtypes are called as safetensors calls them."""

    def names(self) -> list[str]: ...

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype, without reading the tensor."""
        ...

    def tensor(self, name: str) -> Tensor: ...

    def part(self, name: str, dim: int, begin: int, length: int) -> Tensor:
        """A consecutive part of one dimension, without reading the rest."""
        ...


class _Safetensors:
    def __init__(self, file: Path) -> None:
        self._file, size = file, require_file(file)
        try:
            self._handle: Any = safe_open(file, framework="pt")
        except Exception as error:  # whatever a damaged file makes of the library
            raise CheckpointError(str(file), "a complete safetensors file", f"{_line(error)}, {size} bytes") from error

    def names(self) -> list[str]:
        return list(self._handle.keys())

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        view = self._handle.get_slice(name)
        return tuple(view.get_shape()), str(view.get_dtype())

    def tensor(self, name: str) -> Tensor:
        try:
            found: Tensor = self._handle.get_tensor(name)
        except Exception as error:  # as above: a dtype that torch doesn't have
            raise CheckpointError(f"{self._file}: {plain(name)}", "a tensor that torch can hold", _line(error)) from error
        return found

    def part(self, name: str, dim: int, begin: int, length: int) -> Tensor:
        view = self._handle.get_slice(name)
        try:
            found: Tensor = view[(*[slice(None)] * dim, slice(begin, begin + length))]
        except Exception as error:  # as above
            raise CheckpointError(f"{self._file}: {plain(name)}", "a tensor that torch can hold", _line(error)) from error
        return found


def load_pickle(file: Path) -> Any:
    """Contents of a file of ``torch.save``: plain tensors, numbers, texts and containers of them.

    Nothing in the file is run. Before torch sees it (``weights_only``), the pickle in it is read as text: what it names must be a part of a
    tensor, and neither it nor the archive around it may unfold into more than the file has.

    Raises:
        CheckpointError: unreadable, or something else.
    """
    expected = "a complete file of plain tensors, written by torch.save"
    with open_file(file, expected) as stream:
        size = stream.seek(0, io.SEEK_END)
        stream.seek(0)
        zipped = stream.read(len(_ZIP)) == _ZIP
        try:
            if zipped:
                _check_zip(stream, size)
            else:
                _check_legacy(stream)
            # only the zip format of torch >= 1.6 can be mapped
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
        except Exception as error:  # whatever a damaged file makes of the libraries
            raise CheckpointError(str(file), expected, f"{_line(error)}, {size} bytes") from error


def _line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {plain(lines[0]) if lines else ''}"


def _check_zip(stream: BinaryIO, size: int) -> None:
    """``torch.save`` stores members as they are: nothing unfolds.

    Raises:
        ValueError: a compressed archive, members that overlap, no pickle, or a long one.
        UnpicklingError: as :func:`_check_program`.
    """
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size for member in members):
            raise ValueError("compressed members")
        if sum(member.file_size for member in members) > size:
            raise ValueError("members of more bytes than the file has")
        programs = [member for member in members if member.filename.rpartition("/")[2] == "data.pkl"]
        if len(programs) != 1:
            raise ValueError(f"{len(programs)} members data.pkl")
        if programs[0].file_size > MAX_PROGRAM:
            raise ValueError(f"a pickle of {spell_bytes(programs[0].file_size)}, at most {spell_bytes(MAX_PROGRAM)}")
        _check_program(io.BytesIO(archive.read(programs[0])))


def _check_legacy(stream: BinaryIO) -> None:
    stream.seek(0)
    if stream.read(len(_LEGACY)) != _LEGACY:
        raise ValueError("the beginning of another kind of file")
    bounded = io.BytesIO(_LEGACY + stream.read(MAX_PROGRAM))
    for _ in range(_LEGACY_PROGRAMS):
        _check_program(bounded)


def _check_program(program: io.BytesIO) -> None:
    """Reads a pickle to its end and checks that it names nothing but parts of tensors.

    Raises:
        UnpicklingError: it names something else.
        ValueError: it is no pickle.
    """
    for opcode, argument, _ in pickletools.genops(program):
        if opcode.name in _TOO_NEW:
            raise pickle.UnpicklingError(f"{opcode.name}, which torch.save doesn't write")
        if isinstance(argument, str) and opcode.name == "GLOBAL" and argument not in _TENSOR_PARTS and not _is_dtype(argument):
            raise pickle.UnpicklingError(f"{brief(argument, LONG)}, which is no part of a plain tensor")


def _is_dtype(name: str) -> bool:
    """``torch FloatStorage``, ``torch bfloat16``: how a tensor's elements are called."""
    module, _, attribute = name.partition(" ")
    found = getattr(torch, attribute, None) if module == "torch" and attribute.isidentifier() else None
    is_storage = isinstance(found, type) and attribute.endswith("Storage")
    return is_storage or isinstance(found, torch.dtype) or name == "torch.storage UntypedStorage"


class _Pickled:
    def __init__(self, file: Path) -> None:
        values = load_pickle(file)
        if not isinstance(values, dict):
            raise CheckpointError(str(file), "a dictionary of name: tensor", type(values).__name__)
        self._tensors: dict[str, Tensor] = {}
        for name, value in values.items():
            if not isinstance(name, str):
                raise CheckpointError(str(file), "a dictionary of name: tensor", f"a name that is {brief(name, LONG)}")
            if not isinstance(value, Tensor):
                raise CheckpointError(str(file), "a dictionary of name: tensor", f"{plain(name)} of type {type(value).__name__}")
            if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
                raise CheckpointError(f"{file}: {plain(name)}", "a plain tensor", f"{value.layout} on {value.device}, {value.dtype}")
            self._tensors[name] = value.detach()  # of a parameter: what it holds

    def names(self) -> list[str]:
        return list(self._tensors)

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        found = self._tensors[name]
        return tuple(found.shape), _NAMES.get(found.dtype, str(found.dtype))

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def part(self, name: str, dim: int, begin: int, length: int) -> Tensor:
        return self._tensors[name].narrow(dim, begin, length)  # the file is mapped: what is not touched is not read


def open_tensors(file: Path) -> TensorFile:
    """The tensors of a ``.safetensors`` or ``.bin`` file.

    Raises:
        CheckpointError: damaged, or no file of named tensors.
    """
    return _Safetensors(file) if file.suffix == ".safetensors" else _Pickled(file)

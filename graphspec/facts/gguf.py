"""GGUF files, as llama.cpp writes them: their header, read with every length checked before it is believed, and nothing beyond the file.

Source: the GGUF specification of ggml (docs/gguf.md), version 3; 2 differs in nothing that is read here.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.checks import LONG, brief
from ..errors import CheckpointError
from .files import plain, require_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 2**24
"""Maximum number of metadata keys, of tensors, and of entries in one array."""
ARCHITECTURE, ALIGNMENT = "general.architecture", "general.alignment"
SPLIT_COUNT = "split.count"
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Kinds of values of fixed size, and how :mod:`struct` calls them."""
_STRING, _ARRAY = 8, 9

BLOCKS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}  # fmt: skip
"""Types of tensors that load, by their number: name, channels of a block, and its bytes."""
OTHERS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip
"""Types that don't load."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a file.

    Attributes:
        name: as the file has it.
        shape: rows first, as torch has it; the file has channels first.
        type: of :data:`BLOCKS`.
        begin: offset in the file.
        nbytes: of all its blocks.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What precedes the data of a file."""

    file: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def error(self, key: str, expected: object, hint: str = "") -> CheckpointError:
        """About a key of the metadata."""
        found = brief(self.metadata[key], LONG) if key in self.metadata else "no such key"
        return CheckpointError(f"{self.file}: {key}", expected, found, hint)


class _Reader:
    """Reads little-endian values one after the other; every error names the file and what was being read."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self.file, self.data, self.at = file, data, 0

    def error(self, what: str, expected: object, found: object) -> CheckpointError:
        return CheckpointError(f"{self.file}: {plain(what)}", expected, found)

    def bytes(self, count: int, what: str) -> bytes:
        if count > len(self.data) - self.at:
            raise self.error(what, f"{count} bytes from byte {self.at} on", f"a file of {len(self.data)} bytes")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, kind: str, what: str) -> Any:
        return struct.unpack(f"<{kind}", self.bytes(struct.calcsize(kind), what))[0]

    def count(self, what: str) -> int:
        found: int = self.number("Q", what)
        if found > MAX_ENTRIES:
            raise self.error(what, f"at most {MAX_ENTRIES} entries", found)
        return found

    def text(self, what: str) -> str:
        size = self.number("Q", what)
        if size > len(self.data) - self.at:
            raise self.error(what, f"a text within the file of {len(self.data)} bytes", f"one of {size} bytes")
        try:
            return self.bytes(size, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(what, "text in UTF-8", "other bytes") from error

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind], what)
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY or depth:
            raise self.error(what, "a number, a text or an array of them", f"a value of kind {kind}")
        item, count = self.number("I", what), self.count(what)
        if item in _NUMBERS:
            code = _NUMBERS[item]
            return list(struct.unpack(f"<{count}{code}", self.bytes(count * struct.calcsize(code), what)))
        if count * 8 > len(self.data) - self.at:
            raise self.error(what, f"an array within the file of {len(self.data)} bytes", f"{count} texts")
        return [self.value(item, what, depth + 1) for _ in range(count)]


def read_header(file: Path) -> GgufHeader:
    """The metadata and tensors of one file.

    Raises:
        CheckpointError: no such file, another format, lengths that lead out of the file, or a type of tensor that doesn't load.
    """
    if not require_file(file):
        raise CheckpointError(str(file), "a GGUF file", "an empty file")
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(file, data)
        if reader.bytes(min(4, len(data)), "magic") != MAGIC:
            raise reader.error("magic", "a GGUF file", brief(data[:4]))
        version = reader.number("I", "version")
        if version not in VERSIONS:
            raise reader.error("version", "one of " + ", ".join(map(str, VERSIONS)), version)
        tensors, entries = reader.count("tensor count"), reader.count("metadata count")
        metadata: dict[str, Any] = {}
        for place in range(entries):
            key = reader.text(f"key {place}")
            if key in metadata:
                raise reader.error(key, "each key once", "a second one")
            metadata[key] = reader.value(reader.number("I", key), key)
        found = [_tensor(reader, place) for place in range(tensors)]
        alignment = metadata.get(ALIGNMENT, 32)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise reader.error(ALIGNMENT, "a power of two, at least 8", brief(alignment))
        begin = -(-reader.at // alignment) * alignment
        placed: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in found:
            if name in placed:
                raise reader.error(name, "each tensor once", "a second one")
            if offset % alignment:
                raise reader.error(name, f"an offset that is a multiple of {alignment}", offset)
            type_, channels, size = BLOCKS[kind]
            elements = 1
            for extent in shape:
                elements *= extent
            nbytes = elements // channels * size
            if begin + offset + nbytes > len(data):
                raise reader.error(name, f"{nbytes} bytes from byte {begin + offset} on", f"a file of {len(data)} bytes")
            placed[name] = GgufTensor(name, shape, type_, begin + offset, nbytes)
    return GgufHeader(file, metadata, placed)


def _tensor(reader: _Reader, place: int) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.text(f"name of tensor {place}")
    dimensions = reader.number("I", name)
    if not 1 <= dimensions <= 4:
        raise reader.error(name, "1 to 4 dimensions", dimensions)
    shape = tuple(reader.number("Q", name) for _ in range(dimensions))[::-1]
    kind, offset = reader.number("I", name), reader.number("Q", name)
    if kind not in BLOCKS:
        loads = ", ".join(type_ for type_, _, _ in BLOCKS.values())
        raise CheckpointError(f"{reader.file}: {plain(name)}", f"one of {loads}", OTHERS.get(kind, f"type {kind}"))
    type_, channels, _ = BLOCKS[kind]
    if not all(0 < extent < 2**32 for extent in shape) or shape[-1] % channels:
        raise reader.error(name, f"rows of whole blocks of {channels} channels of {type_}", f"shape {list(shape)}")
    return name, shape, kind, offset


def parts_of(file: Path) -> list[Path]:
    """The files of a model, in order: those of a split one by the numbers in their names.

    Raises:
        CheckpointError: a part whose number is larger than the number of parts.
    """
    match = _SPLIT.fullmatch(file.name)
    if match is None:
        return [file]
    stem, part, count = match.groups()
    if not 1 <= int(part) <= int(count):
        raise CheckpointError(str(file), f"a part from 1 to {int(count)}, as its name says", f"part {int(part)}")
    return [file.with_name(f"{stem}-{part:05d}-of-{count}.gguf") for part in range(1, int(count) + 1)]


def read_headers(parts: Sequence[Path]) -> list[GgufHeader]:
    """The headers of the files of a model, in order; the metadata is in the first.

    Raises:
        CheckpointError: as :func:`read_header`; a part that isn't there, or the number of parts is another than the first one says.
    """
    for part in parts:
        require_file(part, f"a part of {parts[0].name}" if len(parts) > 1 else "a GGUF file")
    headers = [read_header(part) for part in parts]
    stated = headers[0].metadata.get(SPLIT_COUNT, 1)
    if stated not in (len(parts), 0):
        raise headers[0].error(SPLIT_COUNT, f"{len(parts)}, as the name of the file says")
    names = [name for header in headers for name in header.tensors]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"{parts[0]}: {plain(twice)}", "each tensor in one part", "several")
    return headers

"""Tensors of GGUF files: blocks of every type that loads, as :class:`~graphspec.kernels.linear.packed.Packed`.

Source: ``ggml-quants.c`` of ggml for the layout of blocks; values equal those of the ``gguf`` package bit for bit.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..facts.files import plain
from ..facts.gguf import BLOCKS, GgufHeader, GgufTensor, read_headers
from ..facts.gguf_families import Tiling, tiling
from ..facts.gguf_model import hf_name, norm_offset, row_order
from ..kernels.linear.packed import Packed
from .quantised import Codes, paired

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SHARED_GATE = "mlp.shared_expert_gate.weight"
"""A matrix of one row, which files may have as a vector."""
_CONVOLUTION, _DECAY = "linear_attn.conv1d.weight", "linear_attn.A_log"
"""Tensors of gated delta nets: kernels, which files have without a dimension of 1, and decays, which they have as ``-exp``."""
_BLOCK = {name: (channels, size) for name, channels, size in BLOCKS.values()}


def _half(block: Tensor, begin: int) -> Tensor:
    """A float16 of each block, ``[N, blocks]``."""
    return block[..., begin : begin + 2].contiguous().view(torch.float16)[..., 0]


def _halves(packed: Tensor) -> Tensor:
    """The codes of a block of 32: the lower halves of its bytes, then the upper ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth_bits(block: Tensor, begin: int) -> Tensor:
    """Bits of a 32-bit word per block, as codes of 16 or 0."""
    return ((block[..., begin : begin + 4, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2) << 4


def _q4_0(block: Tensor) -> Packed:
    return Packed(paired(_halves(block[..., 2:])).flatten(1), _half(block, 0), "int4", 32)


def _q4_1(block: Tensor) -> Packed:
    return Packed(paired(_halves(block[..., 4:])).flatten(1), _half(block, 0), "uint4", 32, minimums=_half(block, 2))


def _q5_0(block: Tensor) -> Packed:
    codes = (_halves(block[..., 6:]) | _fifth_bits(block, 2)).view(torch.int8) - 16
    return Packed(codes.flatten(1), _half(block, 0), "int8", 32)


def _q5_1(block: Tensor) -> Packed:
    codes = _halves(block[..., 8:]) | _fifth_bits(block, 4)
    return Packed(codes.flatten(1), _half(block, 0), "uint8", 32, minimums=_half(block, 2))


def _q8_0(block: Tensor) -> Packed:
    return Packed(block[..., 2:].contiguous().view(torch.int8).flatten(1), _half(block, 0), "int8", 32)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minimums of 6 bits from 12 bytes: four of each whole, of the others the upper two bits lie there."""
    low, mid, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), -1)
    minimums = torch.cat((mid & 63, (high >> 4) | (mid >> 6 << 4)), -1)
    return scales, minimums


def _by_super_blocks(block: Tensor, codes: Tensor, code: str) -> Packed:
    scales, minimums = _six_bits(block[..., 4:16])
    return Packed(
        codes.flatten(1), scales.flatten(1), code, 32, super_scales=_half(block, 0), minimums=minimums.flatten(1),
        super_minimums=-_half(block, 2),
    )  # fmt: skip


def _q4_k(block: Tensor) -> Packed:
    codes = _halves(block[..., 16:].unflatten(-1, (4, 32)))
    return _by_super_blocks(block, paired(codes), "uint4")


def _q5_k(block: Tensor) -> Packed:
    low = _halves(block[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32))
    # Bit i of byte j is the highest bit of channel j of the i-th 32.
    high = ((block[..., 16:48, None] >> torch.arange(8, dtype=torch.uint8)) & 1).transpose(-1, -2).unflatten(-2, (4, 2))
    return _by_super_blocks(block, low | high << 4, "uint8")


def _q6_k(block: Tensor) -> Packed:
    low = _halves(block[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    high = (block[..., 128:192].unflatten(-1, (2, 1, 32)) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]) & 3
    codes = (low | high << 4).view(torch.int8) - 32
    scales = block[..., 192:208].contiguous().view(torch.int8)
    return Packed(codes.flatten(1), scales.flatten(1), "int8", 16, super_scales=_half(block, 208))


def _mxfp4(block: Tensor) -> Packed:
    scales = block[..., 0].contiguous().view(torch.float8_e8m0fnu)
    return Packed(paired(_halves(block[..., 1:])).flatten(1), scales, "e2m1", 32)


DECODE: dict[str, Callable[[Tensor], Packed]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}  # fmt: skip
"""From blocks, bytes ``[N, blocks, bytes of a block]``."""


def _experts(tensor: GgufTensor) -> list[GgufTensor]:
    """The matrices or biases of all experts, which lie one after another."""
    count, *own = tensor.shape
    size = tensor.nbytes // count
    return [replace(tensor, shape=tuple(own), begin=tensor.begin + expert * size, nbytes=size) for expert in range(count)]


class GgufFile:
    """The tensors of a model in GGUF files, under the names that they have in Hugging Face checkpoints.

    Args:
        files: of the model, in order.

    Raises:
        CheckpointError: as :func:`graphspec.facts.gguf.read_headers`, or a tensor that the architecture doesn't have, or not of this shape.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        headers = read_headers(files)
        self._tensors: dict[str, tuple[Path, GgufTensor]] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self._orders: dict[str, Tensor] = {}
        self._offsets: set[str] = set()
        self._columns: dict[str, tuple[Tensor, int]] = {}
        for header in headers:
            for tensor in header.tensors.values():
                name = hf_name(headers[0], tensor.name)
                if name is not None:
                    self._add(name, tensor, header.file, headers[0])

    def _add(self, name: str, tensor: GgufTensor, file: Path, model: GgufHeader) -> None:
        """Take a tensor in under its name, ``#`` in which is the number of an expert, and note what its values and rows need."""
        if "#" in name and len(tensor.shape) == (2 if name.endswith(".bias") and tensor.type in _FLOATS else 3):
            for expert, part in enumerate(_experts(tensor)):
                self._tensors[name.replace("#", str(expert))] = (file, part)
            return
        if tensor.type not in _FLOATS and len(tensor.shape) != 2:
            expected = f"a matrix, or one of {', '.join(_FLOATS)}"
            raise CheckpointError(f"{file}: {plain(tensor.name)}", expected, f"{tensor.type} of shape {list(tensor.shape)}")
        if name.endswith(_CONVOLUTION) and len(tensor.shape) == 2:
            tensor = replace(tensor, shape=(tensor.shape[0], 1, tensor.shape[1]))
        if name.endswith(_SHARED_GATE) and len(tensor.shape) == 1:
            tensor = replace(tensor, shape=(1, *tensor.shape))
        self._tensors[name] = (file, tensor)
        if (tiles := tiling(model, tensor.name)) is not None:
            self._place(name, tiles)
        if norm_offset(model, tensor.name):
            self._offsets.add(name)
        if (heads := row_order(model, tensor.name)) is not None:
            if tensor.shape[0] % (2 * heads):
                expected = f"rows of {heads} heads of an even width"
                raise CheckpointError(f"{file}: {plain(tensor.name)}", expected, f"{tensor.shape[0]} rows")
            self._orders[name] = torch.arange(tensor.shape[0]).view(heads, -1, 2).transpose(1, 2).flatten()

    def _place(self, name: str, tiles: Tiling) -> None:
        """Note where the value heads of a tensor lie."""
        file, tensor = self._tensors[name]
        extent = tensor.shape[1 if tiles.columns else 0]
        if extent != (wanted := tiles.before + tiles.repeats * tiles.key_heads * tiles.size):
            raise CheckpointError(f"{file}: {plain(tensor.name)}", f"{wanted} {'columns' if tiles.columns else 'rows'}", extent)
        order = torch.arange(tiles.repeats * tiles.key_heads).view(tiles.repeats, tiles.key_heads).T.flatten()
        if tiles.columns:
            self._columns[name] = order, tiles.size
            return
        rows = (order[:, None] * tiles.size + torch.arange(tiles.size)).flatten()
        self._orders[name] = torch.cat((torch.arange(tiles.before), tiles.before + rows))

    def names(self) -> list[str]:
        """Names of the tensors that are stored as floats."""
        return [name for name, (_, tensor) in self._tensors.items() if tensor.type in _FLOATS]

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype."""
        _, tensor = self._tensors[name]
        return tensor.shape, tensor.type

    def tensor(self, name: str) -> Tensor:
        """A tensor of numbers."""
        _, tensor = self._tensors[name]
        found = self._bytes(name).view(_FLOATS[tensor.type]).view(tensor.shape)
        if name in self._offsets:  # exact near 1, and what the network adds 1 to
            found = found.float() - 1
        if name.endswith(_DECAY):
            found = (-found.float()).log()
        if name in self._columns:
            order, size = self._columns[name]
            found = found.unflatten(1, (-1, size))[:, order].flatten(1)
        return found[self._orders[name]] if name in self._orders else found

    def part(self, name: str, dim: int, begin: int, length: int) -> Tensor:
        """A part of one dimension of a tensor of numbers."""
        return self.tensor(name).narrow(dim, begin, length)

    def codes(self) -> dict[str, Codes]:
        """The tensors of low precision."""
        found = {}
        for name, (_, tensor) in self._tensors.items():
            if tensor.type not in _FLOATS:
                rows, channels = tensor.shape
                found[name] = Codes((rows, channels), tensor.type, partial(self._packed, name), partial(self._outline, name))
        return found

    def _bytes(self, name: str) -> Tensor:
        file, tensor = self._tensors[name]
        if file not in self._maps:
            with file.open("rb") as stream:
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return torch.frombuffer(self._maps[file], dtype=torch.uint8, count=tensor.nbytes, offset=tensor.begin)

    def _packed(self, name: str) -> Packed:
        _, tensor = self._tensors[name]
        size = _BLOCK[tensor.type][1]
        block = self._bytes(name).view(tensor.shape[0], -1, size)
        if name in self._orders:
            block = block[self._orders[name]]
        return self._with_columns(name, DECODE[tensor.type](block))

    def _with_columns(self, name: str, weight: Packed) -> Packed:
        """The same with its columns where a Hugging Face checkpoint has them. A group of scales wider than a part that moves is cut.

        Raises:
            CheckpointError: a part that cuts a group of codes.
        """
        if name not in self._columns:
            return weight
        (order, size), (file, tensor) = self._columns[name], self._tensors[name]
        if size % weight.group:
            expected = f"groups of channels that divide the {size} of a head"
            raise CheckpointError(f"{file}: {plain(tensor.name)}", expected, f"{tensor.type}, groups of {weight.group}")

        def moved(part: Tensor) -> Tensor:
            whole = part.repeat_interleave(-(-len(order) // part.shape[1]), 1) if part.shape[1] < len(order) else part
            return whole.unflatten(1, (len(order), -1))[:, order].flatten(1)

        return weight.with_tensors({field: moved(part) for field, part in weight.tensors.items()})

    def _outline(self, name: str) -> Packed:
        _, tensor = self._tensors[name]
        channels, size = _BLOCK[tensor.type]
        found = DECODE[tensor.type](torch.zeros(1, tensor.shape[1] // channels, size, dtype=torch.uint8))
        rows = {
            field: torch.empty((tensor.shape[0], *part.shape[1:]), dtype=part.dtype, device="meta") for field, part in found.tensors.items()
        }
        return self._with_columns(name, found.with_tensors(rows))

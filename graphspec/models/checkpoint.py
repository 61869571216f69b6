"""Reads checkpoint folders into modules by the tables of :mod:`graphspec.facts.layouts`. Every tensor is checked before it is copied."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..facts.files import find_file, plain, read_shards, require_file
from ..facts.gguf_model import weights_files
from ..facts.layouts import Layout, TensorRule
from ..facts.quantisation import read_quantisation
from ..facts.sharding import Shard, joined
from ..kernels.linear.packed import Packed, dequantise, take_rows
from ..weights.gguf import GgufFile
from ..weights.quantised import Codes, codes_of
from .experts import MixtureOfExperts
from .layers import Embedding, Linear, ParameterShards
from .packed_weight import PackedWeight, Segment, shard_of, stacked
from .tensor_files import TensorFile, open_tensors
from .vocabulary import set_weight

if TYPE_CHECKING:
    from pathlib import Path

Progress = Callable[[int, int], None]
"""Called with (tensors read, tensors in all) after each one."""

_KINDS = (("model.safetensors", "model.safetensors.index.json"), ("pytorch_model.bin", "pytorch_model.bin.index.json"))
_QUANTISED = re.compile(
    r"\.(weight_scale|weight_scale_inv|input_scale|weight_packed|weight_zero_point|qweight|qzeros|scales|g_idx|absmax)\b"
)
_QUANTISED_DTYPES = ("I8", "U8", "F8_E4M3", "F8_E5M2")
_QUANTISED_HINT = "this looks like a quantised checkpoint, but its config.json has no quantization_config"
FLOATS = ("F64", "F32", "BF16", "F16")
INTEGERS = ("I64", "I32")
_NARROW = {"BF16": torch.bfloat16, "F16": torch.float16}
_COMPARED = 2**22
"""Numbers of two tensors that are compared at a time."""


class Checkpoint:
    """The tensors of a folder: ``model.safetensors`` or ``pytorch_model.bin``, or the shards listed in the index of one of them.

    Args:
        path: the folder.
        renamed: prefixes in the files and their replacements; the last one that matches a name applies.

    Raises:
        CheckpointError: no such file, a damaged file, an index that is no index, a shard that is missing or lacks a tensor.
    """

    def __init__(self, path: Path, renamed: tuple[tuple[str, str], ...] = ()) -> None:
        self.path = path
        self._renamed = renamed
        self._files: dict[Path, TensorFile] = {}
        self._gguf: GgufFile | None = None
        self._tensors: dict[str, tuple[Path, str]] = {}
        self._rows: dict[str, int] = {}
        for stored, file in self._stored().items():
            name = self.rename(stored)
            if name in self._tensors:
                raise CheckpointError(
                    f"{file}: {plain(stored)}", f"{plain(name)} under one name", f"{plain(self._tensors[name][1])} as well"
                )
            self._tensors[name] = (file, stored)
        self._codes: dict[str, Codes] = self._gguf.codes() if self._gguf is not None else {}
        self._stored_as: dict[str, list[str]] = {}
        """Tensors that belong to weights of low precision, by weight."""
        quantisation = read_quantisation(path)
        if quantisation is not None:
            self._codes, self._stored_as = codes_of(self, self._tensors, quantisation)
        self._parts = {part for parts in self._stored_as.values() for part in parts}

    @staticmethod
    def is_there(path: Path) -> bool:
        """Whether a folder holds one of the files that are read."""
        return bool(weights_files(path)) or any(find_file(path / name) for kind in _KINDS for name in kind)

    def _stored(self) -> dict[str, Path]:
        if files := weights_files(self.path):
            self._files[files[0]] = self._gguf = GgufFile(files)
            return dict.fromkeys(self._gguf.names(), files[0])
        for single, index in _KINDS:
            if find_file(self.path / single):
                return dict.fromkeys(self._open(self.path / single).names(), self.path / single)
            if find_file(self.path / index):
                return self._shards(self.path / index)
        expected = " or ".join(name for kind in _KINDS for name in kind)
        found = sorted(file.name for pattern in ("*.safetensors", "*.bin", "*.pt", "*.gguf") for file in self.path.glob(pattern))
        hint = next((f"model.path={self.path / name}" for name in found if name.endswith(".gguf")), "")
        raise CheckpointError(str(self.path), expected, ", ".join(found) or "none of them", hint)

    def _shards(self, index: Path) -> dict[str, Path]:
        shards = {name: self.path / file for name, file in read_shards(index).items()}
        for file in dict.fromkeys(shards.values()):
            require_file(file, f"a shard listed in {index.name}")
        present = {file: set(self._open(file).names()) for file in dict.fromkeys(shards.values())}
        for name, file in shards.items():
            if name not in present[file]:
                raise CheckpointError(f"{file}: {plain(name)}", f"a tensor, as {index.name} says", "no such tensor")
        return shards

    def _open(self, file: Path) -> TensorFile:
        if file not in self._files:
            self._files[file] = open_tensors(file)
        return self._files[file]

    def rename(self, stored: str) -> str:
        """The name here of a tensor, or of a layer, in the files."""
        name = stored
        for theirs, ours in self._renamed:
            name = ours + stored.removeprefix(theirs) if stored.startswith(theirs) else name
        return name

    def names(self) -> list[str]:
        """Tensor names, prefixes already renamed. A weight of low precision has one name, that of its numbers."""
        return [*self._codes, *(name for name in self._tensors if name not in self._parts)]

    def __contains__(self, name: str) -> bool:
        return name in self._codes or (name in self._tensors and name not in self._parts)

    def key(self, name: str) -> str:
        """File and stored name, for messages."""
        file, stored = self._tensors.get(name, (self.path, name))
        return f"{file}: {plain(stored)}"

    def trim(self, name: str, rows: int) -> None:
        """From now on an existing tensor consists of its first ``rows`` rows; the others are not read."""
        assert rows <= self.shape(name)[0], "rows that it has"
        self._rows[name] = rows

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of a tensor in the files. Reads no data."""
        file, stored = self._tensors[name]
        return self._open(file).describe(stored)

    def tensor(self, name: str) -> Tensor:
        """A tensor in the files, all of it."""
        file, stored = self._tensors[name]
        return self._open(file).tensor(stored)

    def stored(self, name: str) -> dict[str, Tensor]:
        """The tensors in the files that make up an existing one: several for a weight of low precision."""
        return {part: self.tensor(part) for part in self._stored_as.get(name, [name])}

    def _describe(self, name: str) -> tuple[tuple[int, ...], str]:
        shape, dtype = (self._codes[name].shape, self._codes[name].format) if name in self._codes else self.describe(name)
        return ((self._rows[name], *shape[1:]) if name in self._rows else shape), dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an existing tensor. Reads no data."""
        return self._describe(name)[0]

    def is_packed(self, name: str) -> bool:
        """Whether an existing tensor has low precision."""
        return name in self._codes

    def codes(self, name: str, *, outline: bool = False) -> Packed:
        """A weight of low precision; ``outline``: with ``meta`` tensors, and nothing is read."""
        packed = self._codes[name].outline() if outline else self._codes[name].make()
        if name not in self._rows:
            return packed
        return packed.with_tensors({field: part[: self._rows[name]] for field, part in packed.tensors.items() if field != "group_of"})

    def narrow(self, names: Iterable[str]) -> torch.dtype | None:
        """The 16-bit dtype in which all of these tensors are stored; None: they have another dtype, or several. Reads no data."""
        found = {self._describe(name)[1] for name in names}
        return _NARROW.get(found.pop()) if len(found) == 1 else None

    def raw(self, name: str) -> Tensor:
        """An existing tensor, as it is stored; of low precision, the float32 numbers that it stands for."""
        if name in self._codes:
            return dequantise(self.codes(name), torch.float32)
        file, stored = self._tensors[name]
        if name in self._rows:
            return self._open(file).part(stored, 0, 0, self._rows[name])
        return self._open(file).tensor(stored)

    def check(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS) -> None:
        """Check that a tensor exists, with this shape and one of these dtypes. Reads no data.

        Raises:
            CheckpointError: it isn't there, or has another shape or dtype.
        """
        if name not in self:
            raise CheckpointError(f"{self.path}: {name}", f"a tensor of shape {list(shape)}", "no such tensor")
        found, dtype = self._describe(name)
        if dtype not in dtypes and not (name in self._codes and dtypes == FLOATS):
            hint = _QUANTISED_HINT if dtype in _QUANTISED_DTYPES and dtypes == FLOATS else ""
            raise CheckpointError(self.key(name), "dtype " + " or ".join(dtypes), dtype, hint)
        if found != shape:
            raise CheckpointError(self.key(name), f"shape {list(shape)}", f"shape {list(found)}")

    def read(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS) -> Tensor:
        """One tensor on the CPU, in the dtype it is stored in; errors as :meth:`check`."""
        self.check(name, shape, dtypes)
        return self.raw(name)

    def part(self, name: str, dim: int, begin: int, length: int) -> Tensor:
        """The entries of an existing tensor from ``begin`` to ``begin + length`` of one dimension, as :meth:`raw` has them."""
        if name in self._codes:
            return self.raw(name).narrow(dim, begin, length)
        file, stored = self._tensors[name]
        return self._open(file).part(stored, dim, begin, length)

    def _rows_reader(self, name: str) -> Callable[[int, int], Tensor]:
        """A function from ``begin, length`` to rows of an existing tensor, as :meth:`raw` has them. Codes are read once."""
        if name not in self._codes:
            return lambda begin, length: self.part(name, 0, begin, length)
        weight = PackedWeight((self.codes(name),), torch.float32)
        return lambda begin, length: weight.lookup(torch.arange(begin, begin + length))

    def equals(self, name: str, other: Checkpoint, theirs: str, *, rounded: bool = False) -> bool:
        """Whether an existing tensor holds the same numbers as one of ``other``. Both are read in parts, up to the first that differs.

        ``rounded``: tensors of two dtypes are equal if one is the other, rounded.
        """
        shape = self.shape(name)
        if shape != other.shape(theirs):
            return False
        ours_fits = theirs_fits = True
        read, read_theirs = self._rows_reader(name), other._rows_reader(theirs)
        step = max(1, _COMPARED // max(1, math.prod(shape[1:])))
        for begin in range(0, shape[0], step):
            length = min(step, shape[0] - begin)
            mine, their = read(begin, length), read_theirs(begin, length)
            ours_fits = ours_fits and torch.equal(mine.to(their.dtype), their)
            theirs_fits = ours_fits if mine.dtype == their.dtype else theirs_fits and torch.equal(their.to(mine.dtype), mine)
            if not (ours_fits or theirs_fits if rounded else ours_fits and theirs_fits):
                return False
        return True


def tensor_rule(layout: Layout, ours: str, checkpoint: Checkpoint | tuple[()]) -> TensorRule:
    """The rule of a parameter; where a layout knows several spellings, that of tensors that are there."""
    generic, index = re.sub(r"\.\d+\.", ".*.", ours), re.search(r"\.(\d+)\.", ours)
    found = [
        replace(rule, sources=tuple(s.replace("*", index[1] if index else "*") for s in rule.sources))
        for rule in layout.rules
        if rule.ours == generic
    ]
    if not found:
        raise KeyError(f"the layout has no rule for {ours}")
    return next((rule for rule in found if rule.sources[0].replace("#", "0") in checkpoint), found[0])


def tensor_sources(layout: Layout, ours: str, checkpoint: Checkpoint | tuple[()]) -> tuple[str, ...]:
    """The checkpoint's tensors that make up a parameter."""
    return tensor_rule(layout, ours, checkpoint).sources


def _blocks(rule: TensorRule, parameter: Tensor) -> list[tuple[str, ...]]:
    """Sources of a parameter, one tuple per matrix: one for each expert where there are experts."""
    if not any("#" in source for source in rule.sources):
        return [rule.sources]
    return [tuple(source.replace("#", str(expert)) for source in rule.sources) for expert in range(parameter.shape[0])]


def _two_by_two(value: Tensor) -> Tensor:
    """Rows that take turns, those of the first projection before those of the second; they are dimension 1."""
    return torch.cat((value[:, ::2], value[:, 1::2]), 1)


def _turns(shards: tuple[Shard, ...]) -> Shard:
    """The shard of a tensor in which the rows of several projections, of which a rank has the same, take turns."""
    first, count = shards[0], len(shards)
    return Shard(count * first.full_size, tuple((count * at, count * length) for at, length in first.pieces), count * first.size)


def _fill_sharded(matrix: Tensor, sources: tuple[str, ...], cut: ParameterShards, checkpoint: Checkpoint) -> None:
    """Fill a rank's parameter from tensors that are stored whole: one source for each shard, or one that holds all of them in order."""
    shape, dim = list(matrix.shape), cut.dim % matrix.dim()
    shards = cut.shards if len(sources) == len(cut.shards) else (joined(*cut.shards),)
    for source, shard in zip(sources, shards, strict=True):
        shape[dim] = shard.full_size
        checkpoint.check(source, tuple(shape))
    if matrix.is_meta:
        return
    parts = matrix.split([shard.size for shard in shards], dim)
    for own, source, shard in zip(parts, sources, shards, strict=True):
        filled = 0
        for begin, length in shard.pieces:
            if length:
                own.narrow(dim, filled, length).copy_(checkpoint.part(source, dim, begin, length))
            filled += length
        own.narrow(dim, filled, shard.size - filled).zero_()


def _groups(weight: Packed) -> str:
    return "groups in no order" if weight.group_of is not None else f"groups of {weight.group}"


def _fill_packed(
    owner: Linear | Embedding, sources: tuple[str, ...], checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> None:
    """Give a layer its weight from tensors of which some have low precision. They lie below each other in the layer."""
    assert isinstance(owner.weight, nn.Parameter), "a layer that is not filled yet"
    outputs, channels = owner.weight.shape
    rows = owner.stored_parts if isinstance(owner, Linear) and len(sources) > 1 else (outputs // len(sources),) * len(sources)
    cut = owner.shards.get("weight")
    shards: tuple[Shard | None, ...] = (None,) * len(sources)
    if cut is not None:
        shards = cut.shards if len(sources) == len(cut.shards) else (joined(*cut.shards),)
    segments: list[Segment] = []
    for source, count, shard in zip(sources, rows, shards, strict=True):
        shape = [count, channels]
        if cut is not None and shard is not None:
            shape[cut.dim] = shard.full_size
        checkpoint.check(source, (shape[0], shape[1]))
        segment: Segment | None
        if checkpoint.is_packed(source):
            segment = checkpoint.codes(source, outline=device.type == "meta")
        else:
            segment = torch.empty(shape, dtype=dtype, device="meta") if device.type == "meta" else checkpoint.raw(source).to(dtype)
        if cut is not None and shard is not None:
            segment = shard_of(segment, cut.dim, shard)
        if segment is None:
            expected, hint = f"groups of channels that divide those of a rank, {channels}", "runtime.tensor_parallel"
            raise CheckpointError(checkpoint.key(source), expected, _groups(checkpoint.codes(source, outline=True)), hint)
        segments.append(segment)
    weight = PackedWeight(segments, dtype).to(device)
    if isinstance(owner, Linear):
        order = owner.arrange(torch.arange(outputs)[:, None])[:, 0]
        if not torch.equal(order, torch.arange(outputs)):
            weight = weight.take(order)
    set_weight(owner, weight)


def _fill_packed_experts(
    owner: MixtureOfExperts,
    leaf: str,
    rule: TensorRule,
    blocks: list[tuple[str, ...]],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Give a mixture a weight from tensors of low precision: one of all experts, or one or several of each."""
    experts, rows, channels = owner.get_parameter(leaf).shape
    cut = owner.shards.get(leaf)
    each = experts if len(blocks) == 1 else 1  # experts of a tensor
    found: list[Packed] = []
    for sources in blocks:
        shards: tuple[Shard | None, ...] = (None,) * len(sources)
        if cut is not None:
            whole = _turns(cut.shards) if rule.interleaved else joined(*cut.shards)
            shards = cut.shards if len(sources) == len(cut.shards) and not rule.interleaved else (whole,)
        own = (rows // len(sources), channels)
        found += [_expert_codes(source, each, own, cut, shard, checkpoint, device) for source, shard in zip(sources, shards, strict=True)]
    weight = stacked(found)
    if weight is None:
        raise CheckpointError(checkpoint.key(blocks[0][0]), "experts of one format, and channels in one order", "several")
    if rule.interleaved:
        weight = take_rows(weight, _two_by_two(torch.arange(experts * rows).view(experts, rows)).flatten())
    owner.set_experts(leaf, PackedWeight((weight,), dtype).to(device))


def _expert_codes(
    source: str,
    experts: int,
    shape: tuple[int, int],
    cut: ParameterShards | None,
    shard: Shard | None,
    checkpoint: Checkpoint,
    device: torch.device,
) -> Packed:
    """Codes of a tensor that holds ``experts`` matrices of this shape below each other: this rank's part of each, if ranks share them."""
    whole = list(shape)
    if cut is not None and shard is not None:
        whole[cut.dim] = shard.full_size
    checkpoint.check(source, (experts * whole[0], whole[1]))
    if not checkpoint.is_packed(source):
        raise CheckpointError(checkpoint.key(source), "codes, as other experts of the layer have", "numbers")
    codes = checkpoint.codes(source, outline=device.type == "meta")
    if cut is None or shard is None:
        return codes
    by_rows = cut.dim == -2
    if by_rows:
        pieces = [(expert * whole[0] + at, length) for expert in range(experts) for at, length in shard.pieces]
        shard = Shard(experts * whole[0], tuple(pieces), experts * shard.size)
    part = shard_of(codes, 0 if by_rows else 1, shard)
    if part is None:
        expected, hint = f"groups of channels that divide those of a rank, {shape[1]}", "runtime.tensor_parallel"
        raise CheckpointError(checkpoint.key(source), expected, _groups(codes), hint)
    return cast("Packed", part)


def fill(
    module: nn.Module,
    checkpoint: Checkpoint,
    layout: Layout,
    own: list[str],
    ignored: set[str],
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
) -> None:
    """Replace the parameters named in ``own`` by the checkpoint's tensors; refuse tensors that nothing uses.

    Of a sharded tensor only this rank's shard is read. On the device ``meta`` everything is checked and no data is read.
    """
    rules = {name: tensor_rule(layout, name, checkpoint) for name in own}
    wanted = {name: _blocks(rule, module.get_parameter(name)) for name, rule in rules.items()}
    used = {source for blocks in wanted.values() for block in blocks for source in block}
    patterns = [re.escape(pattern).replace(r"\*", r"\d+") for pattern in layout.ignored]
    for name in checkpoint.names():
        known = name in used or name in ignored or name.startswith(layout.unread)
        if not known and not any(re.fullmatch(pattern, name) for pattern in patterns):
            # a missing tensor says more about a wrong checkpoint than a superfluous one
            missing = next((source for source in sorted(used) if source not in checkpoint), None)
            hint = _QUANTISED_HINT if _QUANTISED.search(name) else f"missing: {missing}" if missing else ""
            raise CheckpointError(checkpoint.key(name), "no such tensor", "one this model doesn't use", hint)
    filled = _Filled(len(used), progress)
    for name, blocks in wanted.items():
        owner_name, _, leaf = name.rpartition(".")
        owner, rule = module.get_submodule(owner_name), rules[name]
        if isinstance(owner, MixtureOfExperts) and any(map(checkpoint.is_packed, blocks[0])):
            _fill_packed_experts(owner, leaf, rule, blocks, checkpoint, dtype, device)
            filled.add(sum(map(len, blocks)))
        elif isinstance(owner, Linear | Embedding) and any(map(checkpoint.is_packed, blocks[0])):
            _fill_packed(owner, blocks[0], checkpoint, dtype, device)
            filled.add(len(blocks[0]))
        else:
            _fill_numbers(owner, leaf, rule, blocks, checkpoint, dtype, device, filled)


class _Filled:
    """Counts the tensors that were read, for the caller's progress."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, tensors: int) -> None:
        self._done += tensors
        if self._progress is not None:
            self._progress(self._done, self._total)


def _fill_numbers(
    owner: nn.Module,
    leaf: str,
    rule: TensorRule,
    blocks: list[tuple[str, ...]],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    filled: _Filled,
) -> None:
    """Fill one parameter from tensors of numbers, which are its rows from top to bottom, in a list for each expert if there are experts."""
    wide = leaf in getattr(owner, "float32_names", ())
    value = torch.empty(owner.get_parameter(leaf).shape, dtype=torch.float32 if wide else dtype, device=device)
    # One matrix per expert; the heads of a projection lie below each other in the checkpoint, unless it has them as we do.
    as_stored = value.dim() <= 2 or (blocks[0][0] in checkpoint and len(checkpoint.shape(blocks[0][0])) == value.dim())
    matrices = value.unbind() if len(blocks) > 1 else (value if as_stored else value.flatten(0, -2),)
    cut = cast("dict[str, ParameterShards]", getattr(owner, "shards", {})).get(leaf)
    if cut is not None and rule.interleaved:
        cut = ParameterShards(cut.dim, (_turns(cut.shards),))
    if rule.transposed:
        matrices = tuple(matrix.transpose(-1, -2) for matrix in matrices)
        cut = cut and ParameterShards(-3 - cut.dim, cut.shards)
    for matrix, sources in zip(matrices, blocks, strict=True):
        if cut is not None:
            _fill_sharded(matrix, sources, cut, checkpoint)
            filled.add(len(sources))
            continue
        # A file may have fused the projections that are fused here: one source, which is read at once.
        fused = isinstance(owner, Linear) and len(sources) > 1
        rows = cast("Linear", owner).stored_parts if fused else (matrix.shape[0] // len(sources),) * len(sources)
        for part, source in zip(torch.split(matrix, list(rows)), sources, strict=True):
            one_row = rule.flat and source in checkpoint and len(checkpoint.shape(source)) > part.dim()
            shape = (1, *part.shape) if one_row else tuple(part.shape)
            if value.is_meta:
                checkpoint.check(source, shape)
            else:
                part.copy_(checkpoint.read(source, shape).view_as(part))
            filled.add(1)
    value = owner.arrange(value) if isinstance(owner, Linear) else value
    value = _two_by_two(value) if rule.interleaved else value
    setattr(owner, leaf, nn.Parameter(value, requires_grad=False))
    if isinstance(owner, Linear | Embedding) and leaf == "weight":
        owner.stored = checkpoint.narrow(source for block in blocks for source in block)
    elif isinstance(owner, MixtureOfExperts):
        owner.stored[leaf] = checkpoint.narrow(source for block in blocks for source in block)

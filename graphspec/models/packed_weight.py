"""The weight of a linear layer or an embedding that a checkpoint stores in low precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..facts.sharding import Shard
from ..kernels.linear.packed import Packed, as_bytes, dequantise, take_rows

Segment = Packed | Tensor
"""Some output rows of a weight: codes, or numbers where the checkpoint has these rows in full precision."""


class PackedWeight(nn.Module):
    """A weight ``[N, K]`` in segments by output rows: projections fused into one layer may be stored in different formats.

    Args:
        segments: top to bottom; neighbours of one format are joined.
        dtype: of the model: what the values are rounded to.
    """

    def __init__(self, segments: Sequence[Segment], dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.activations = "full"
        """What native products round activations to, as :func:`graphspec.kernels.native.pack_segments` takes it."""
        self._native: Tensor | None = None
        joined: list[Segment] = []
        for segment in segments:
            if joined and _alike(joined[-1], segment):
                joined[-1] = _stacked(joined[-1], segment)
            else:
                joined.append(segment)
        self._formats: list[tuple[str, int, bool] | None] = []
        self._fields: list[dict[str, str]] = []
        for place, segment in enumerate(joined):
            tensors = {"values": segment} if isinstance(segment, Tensor) else segment.tensors
            names = {field: f"segment{place}_{field}" for field in tensors}
            for field, name in names.items():
                self.register_buffer(name, tensors[field], persistent=False)
            self._fields.append(names)
            self._formats.append(None if isinstance(segment, Tensor) else (segment.code, segment.group, segment.divides))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedWeight:
        """Moves go through; codes and scales have no other dtype."""
        for name, buffer in self._buffers.items():
            if buffer is not None:
                made = fn(buffer)
                self._buffers[name] = made if made.dtype == buffer.dtype else buffer.to(made.device)
        return self

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Top to bottom."""
        made: list[Segment] = []
        for kind, names in zip(self._formats, self._fields, strict=True):
            tensors = {field: getattr(self, name) for field, name in names.items()}
            made.append(tensors["values"] if kind is None else Packed(code=kind[0], group=kind[1], divides=kind[2], **tensors))
        return tuple(made)

    @property
    def float_segments(self) -> tuple[Segment, ...]:
        """Top to bottom, numbers as float32."""
        return tuple(segment.float() if isinstance(segment, Tensor) else segment for segment in self.segments)

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        shapes = [tuple(segment.shape) for segment in self.segments]
        return sum(rows for rows, _ in shapes), shapes[0][1]

    @property
    def device(self) -> torch.device:
        """Device of all its tensors."""
        return next(self.buffers()).device

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.buffers())

    def pack(self) -> Tensor:
        """The weight as native products read it, see :func:`graphspec.kernels.native.pack_segments`; made once."""
        from ..kernels.native import pack_segments

        if self._native is None:
            self._native = pack_segments(self.float_segments, activations=self.activations)
        return self._native

    def take(self, row: Tensor) -> PackedWeight:
        """The weight of these rows, in this order.

        Args:
            row: int64 ``[M]``.
        """
        segments = self.segments
        ends = torch.tensor([segment.shape[0] for segment in segments]).cumsum(0).tolist()
        begin, parts = 0, []
        # Rows of one segment that follow each other stay one segment.
        place = torch.bucketize(row.cpu(), torch.tensor(ends), right=True)
        for own, count in zip(*(each.tolist() for each in torch.unique_consecutive(place, return_counts=True)), strict=True):
            first = ends[own] - segments[own].shape[0]
            parts.append(_rows(segments[own], row[begin : begin + count] - first))
            begin += count
        return PackedWeight(parts, self.dtype)

    def dequantise(self) -> Tensor:
        """All of the weight as a tensor ``[N, K]``."""
        return torch.cat([_values(segment, self.dtype) for segment in self.segments])

    def lookup(self, row: Tensor) -> Tensor:
        """Rows of a weight of one segment as numbers, ``[..., K]``, of int64 ``[...]`` in range: only these are dequantised."""
        [segment] = self.segments
        return _values(_rows(segment, row.flatten()), self.dtype).view(*row.shape, -1)


def _values(segment: Segment, dtype: torch.dtype) -> Tensor:
    return segment.to(dtype) if isinstance(segment, Tensor) else dequantise(segment, dtype)


def _rows(segment: Segment, row: Tensor) -> Segment:
    return segment[row] if isinstance(segment, Tensor) else take_rows(segment, row)


def shard_of(segment: Segment, dim: int, shard: Shard) -> Segment | None:
    """The rows or columns of a segment that a rank holds, in its own memory; those past the last piece are zero.

    None: a piece begins or ends inside a group of channels, or channels have groups in no order.
    """
    if isinstance(segment, Tensor):
        return _cut(segment, dim, shard, 0)
    if dim == 0:
        # Codes of padding are zero, and so is what they are multiplied by, or it is 1.
        fill = {"codes": 0x88 if segment.code == "int4" else 0, "super_scales": 1}
        rows = {name: tensor for name, tensor in segment.tensors.items() if name != "group_of"}
        return segment.with_tensors({name: _cut(tensor, 0, shard, fill.get(name, 0)) for name, tensor in rows.items()})
    channels, group, per_code = segment.shape[1], segment.group, 8 // segment.bits
    [(begin, count)] = shard.pieces
    ends, whole = begin + count, group >= channels
    aligned = whole or (begin % group == 0 and (count % group == 0 or ends == channels))
    if segment.group_of is not None or not aligned or begin % per_code or count % per_code or shard.size != count:
        return None
    found = {"codes": segment.codes[:, begin // per_code : ends // per_code]}
    groups = segment.scales.shape[1]
    for name, tensor in segment.tensors.items():
        if name == "codes":
            continue
        # Factors of several groups that end elsewhere than the piece: one for each group has the same values.
        factors = tensor if whole or tensor.shape[1] in (1, groups) else tensor.repeat_interleave(groups // tensor.shape[1], 1)
        found[name] = factors if whole or factors.shape[1] == 1 < groups else factors[:, begin // group : -(-ends // group)]
    made = segment.with_tensors({name: tensor.contiguous() for name, tensor in found.items()})
    return made._replace(group=count) if whole else made


def _cut(tensor: Tensor, dim: int, shard: Shard, fill: float) -> Tensor:
    parts = [as_bytes(tensor).narrow(dim, begin, count) for begin, count in shard.pieces]
    if missing := shard.size - sum(count for _, count in shard.pieces):
        shape = list(tensor.shape)
        shape[dim] = missing
        parts.append(as_bytes(torch.full(shape, fill, dtype=as_bytes(tensor).dtype, device=tensor.device)))
    return torch.cat(parts, dim).view(tensor.dtype)


def stacked(weights: Sequence[Packed]) -> Packed | None:
    """Weights below each other as one; None: their formats differ."""
    first = weights[0]
    if not all(_alike(first, other) for other in weights[1:]):
        return None
    fields = {name: [weight.tensors[name] for weight in weights] for name in first.tensors if name != "group_of"}
    return first.with_tensors({name: torch.cat([as_bytes(part) for part in parts]).view(parts[0].dtype) for name, parts in fields.items()})


def _alike(one: Segment, other: Segment) -> bool:
    """Whether two segments can be one."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and one.dtype == other.dtype
    fields, others = one.tensors, other.tensors
    if (one.code, one.group, one.divides, fields.keys()) != (other.code, other.group, other.divides, others.keys()):
        return False
    if one.group_of is not None and other.group_of is not None and not torch.equal(one.group_of, other.group_of):
        return False
    return all(tensor.dtype == others[name].dtype and tensor.shape[1:] == others[name].shape[1:] for name, tensor in fields.items())


def _stacked(one: Segment, other: Segment) -> Segment:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return torch.cat([part for part in (one, other) if isinstance(part, Tensor)])
    both = stacked((one, other))
    assert both is not None, "segments that can be one"
    return both

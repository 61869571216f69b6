"""Which kernel multiplies which shape: tiles and splits of the fused linear layer, or cuBLAS."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from ...errors import ConfigError

FORMAT = 1
FUSED_ROWS = 64
"""Above, weights are no longer what a product waits for, and cuBLAS multiplies; unless the numerics forbid it."""
SCANNED_ROWS = 8
"""Up to here every program computes the norm's factors itself: rows of that few are read faster than another kernel starts."""
ENOUGH_PROGRAMS = 256
"""About two for each multiprocessor of an H200. A constant, so that the bits do not depend on the device."""
LEAST_STEPS = 4
"""Tiles along the input that a split is worth."""
SHARED_BYTES = 227 * 1024


@dataclass(frozen=True, slots=True)
class LinearShape:
    """All that the choice may depend on.

    Attributes:
        rows: product of the leading dimensions of the input.
        outputs: rows of the weight, gate and up both counted.
        inputs: columns of the weight.
        dtype: of input and weight, as ``bfloat16``.
    """

    rows: int
    outputs: int
    inputs: int
    dtype: str
    norm: bool = False
    gated: bool = False
    residual: bool = False
    bias: bool = False
    float32: bool = False

    @property
    def item_size(self) -> int:
        """Bytes of a weight."""
        return getattr(torch, self.dtype).itemsize

    @property
    def aligned(self) -> bool:
        """Rows of the weight begin at 16 bytes, so that they can be copied past the registers."""
        return self.inputs * self.item_size % 16 == 0

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.outputs // 2 if self.gated else self.outputs


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How the fused kernel cuts a shape.

    Attributes:
        tile_rows: rows of ``x`` a program multiplies; the narrow side of its matrix instructions.
        tile_outputs: columns of the result it computes (of each half, if gated).
        tile_inputs: columns of the weight it loads at a time.
        splits: programs that share the inputs of one tile.
        warps, stages: of the compiled kernel.
        scan: every program computes the norm's factors itself; else a kernel of one program per row does before.
    """

    tile_rows: int
    tile_outputs: int
    tile_inputs: int
    splits: int
    warps: int
    stages: int
    scan: bool = False

    def shared_bytes(self, shape: LinearShape) -> int:
        """Shared memory of the tiles in flight."""
        rows = self.tile_outputs * (2 if shape.gated else 1) + self.tile_rows
        return rows * self.tile_inputs * shape.item_size * self.stages

    def encoded(self) -> tuple[int, ...]:
        """As integers, for a graph to hold."""
        return tuple(int(value) for value in astuple(self))


def decoded(numbers: Iterable[int]) -> LinearConfig:
    """The config behind :meth:`LinearConfig.encoded`."""
    tile_rows, tile_outputs, tile_inputs, splits, warps, stages, scan = numbers
    return LinearConfig(tile_rows, tile_outputs, tile_inputs, splits, warps, stages, bool(scan))


def split_inputs(shape: LinearShape, tile_inputs: int, wanted: int) -> int:
    """``wanted``, or fewer so that every split has a tile to multiply."""
    steps = -(-shape.inputs // tile_inputs)
    return -(-steps // -(-steps // max(wanted, 1)))


def _splits(shape: LinearShape, tile_outputs: int, tile_inputs: int) -> int:
    """As many as make enough programs, each with enough to multiply; a function of the weight alone."""
    tiles, steps = -(-shape.width // tile_outputs), -(-shape.inputs // tile_inputs)
    wanted = 1
    while tiles * wanted < ENOUGH_PROGRAMS and steps >= 2 * wanted * LEAST_STEPS and wanted < 16:
        wanted *= 2
    return split_inputs(shape, tile_inputs, wanted)


def _tile_inputs(shape: LinearShape, wanted: int) -> int:
    """``wanted``, or less where there is less to multiply or where a tile passes through the registers."""
    most = 32 if shape.item_size > 2 else wanted if shape.aligned else min(wanted, 64)
    return min(most, max(1 << (shape.inputs - 1).bit_length(), 16))


def _config(shape: LinearShape, tile_rows: int, tile_inputs: int, stages: int, scan: bool) -> LinearConfig:
    if shape.item_size == 2:
        return LinearConfig(tile_rows, 64, tile_inputs, _splits(shape, 64, tile_inputs), 4 if shape.aligned else 8, stages, scan)
    # Without matrix instructions, sums and operands are all in registers: more threads, and less for each.
    tile_outputs = 32 if shape.gated else 64
    return LinearConfig(tile_rows, tile_outputs, tile_inputs, _splits(shape, tile_outputs, tile_inputs), 8, 2, scan)


def invariant_config(shape: LinearShape) -> LinearConfig:
    """A config that does not depend on the number of rows, so that a row's bits do not either.

    Tiles are 64 rows wide whatever the number of rows: with few rows most of a matrix instruction is padding, yet it takes a third of the
    time its weights take to arrive. Tiles of 16 would read the weights from L2 four times at 64 rows, which costs more than the padding.
    The norm's factors come from a kernel of one program per row.
    """
    tile_inputs = _tile_inputs(shape, 64)
    return _config(shape, FUSED_ROWS, tile_inputs, 4, scan=False)


def fast_config(shape: LinearShape) -> LinearConfig | None:
    """What to run where nothing was measured; None: cuBLAS."""
    if shape.rows > FUSED_ROWS:
        return None
    tile_rows = 16 if shape.rows <= 16 else 32 if shape.rows <= 32 else 64
    scan = shape.norm and shape.rows <= SCANNED_ROWS
    tile_inputs = _tile_inputs(shape, 128 if tile_rows == 16 else 64)
    return _config(shape, tile_rows, tile_inputs, 3 if shape.gated and tile_inputs == 128 else 4, scan)


def candidates(shape: LinearShape) -> list[LinearConfig]:
    """Fused configs worth measuring for ``shape`` in fast numerics, the unmeasured choice first; none where only cuBLAS is worth it."""
    base = fast_config(shape)
    if base is None:
        return []
    found = [base]
    for tile_outputs in (64, 128) if shape.aligned else (64,):
        # Four warps hold the sums of 64 by 64; more would leave them no registers.
        warps = 2 * base.warps if tile_outputs * base.tile_rows > 64 * 64 else base.warps
        for tile_inputs in sorted({_tile_inputs(shape, 64), _tile_inputs(shape, 128)}):
            splits = _splits(shape, tile_outputs, tile_inputs)
            for wanted in (splits, 2 * splits, max(splits // 2, 1)):
                parts = split_inputs(shape, tile_inputs, wanted)
                one = replace(base, tile_outputs=tile_outputs, tile_inputs=tile_inputs, splits=parts, warps=warps, stages=1)
                # As deep as leaves room for two programs on a multiprocessor.
                stages = min(SHARED_BYTES // 2 // one.shared_bytes(shape), 6)
                if stages >= 2:
                    found.append(replace(one, stages=stages))
    return list(dict.fromkeys(found))


def device_identity(device: torch.device) -> dict[str, str]:
    """What a measurement holds for: the GPU, and who compiled the kernels."""
    import triton

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"gpu": gpu, "triton": triton.__version__, "torch": torch.__version__}


@dataclass(slots=True)
class LinearTable:
    """Measured choices; what is not in it is chosen by :func:`fast_config`.

    Attributes:
        entries: None stands for cuBLAS.
        asked: every shape that was looked up, in order.
    """

    entries: dict[LinearShape, LinearConfig | None] = field(default_factory=dict)
    asked: dict[LinearShape, None] = field(default_factory=dict)

    def choose(self, shape: LinearShape, numerics: str = "fast") -> LinearConfig | None:
        """The config of ``shape``, or None for cuBLAS. ``batch_invariant`` numerics look nothing up: rows may not matter."""
        self.asked[shape] = None
        if numerics == "batch_invariant":
            return invariant_config(shape)
        return self.entries[shape] if shape in self.entries else fast_config(shape)

    def save(self, path: Path, identity: dict[str, str]) -> None:
        """Write the entries as JSON, with ``identity`` (:func:`device_identity`) beside them."""
        entries = [{"shape": asdict(shape), "config": None if config is None else asdict(config)} for shape, config in self.entries.items()]
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(path.name + ".part")
        scratch.write_text(json.dumps({"format": FORMAT, "identity": identity, "entries": entries}, indent=1) + "\n", encoding="utf-8")
        scratch.replace(path)

    @classmethod
    def load(cls, path: Path, identity: dict[str, str], key: str = "linear table") -> LinearTable:
        """What :meth:`save` wrote.

        Args:
            path: of the file.
            identity: of the device that will run it (:func:`device_identity`).
            key: what the error names, with the path.

        Raises:
            ConfigError: there is no such file, it is no such table, or it was measured elsewhere.
        """
        key = f"{key} {path}"
        hint = "delete it to measure again"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(key, "a table of measured linear layers", error.strerror or str(error)) from error
        except ValueError as error:
            raise ConfigError(key, "JSON", str(error), hint) from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            found = content.get("format", "none") if isinstance(content, dict) else type(content).__name__
            raise ConfigError(key, f"format {FORMAT}", found, hint)
        if content.get("identity") != identity:
            raise ConfigError(key, f"measurements of {identity}", content.get("identity"), hint)
        table = cls()
        try:
            for entry in content["entries"]:
                config = entry["config"]
                table.entries[_of(LinearShape, entry["shape"])] = None if config is None else _of(LinearConfig, config)
        except (KeyError, TypeError) as error:
            raise ConfigError(key, "entries of shape and config", f"{type(error).__name__}: {error}", hint) from error
        return table


def _of(kind: type[Any], values: dict[str, Any]) -> Any:
    """``kind`` with exactly its fields, each of the type it declares."""
    types = {"int": int, "bool": bool, "str": str}
    for item in fields(kind):
        if type(values[item.name]) is not types[str(item.type)]:
            raise TypeError(f"{item.name} {values[item.name]!r} is no {item.type}")
    return kind(**values)

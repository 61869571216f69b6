"""The choice of kernel for a product: tiles and splits of the fused linear layer, or cuBLAS."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from ....errors import ConfigError
from ....shapes import PRODUCT_ROWS
from ...fused.hopper import MULTIPROCESSORS, PROGRAM_SHARED_BYTES, RESERVED_BYTES
from ..packed import code_bits

FORMAT = 3
SCANNED_ROWS = 8
"""Up to this many rows every program computes the norm's factors itself, which takes less time than another launch."""
RESIDENTS = 2
"""Programs per multiprocessor: while one starts or merges, the loads of the other keep the memory busy."""
BAD_WAVES = (1.0, 1.95)
"""Between these numbers of waves, the tail has too few programs to keep the memory busy."""
MIN_STEPS = 4
"""Fewest tiles along the input per split."""
MAX_SPLITS = 16
MAX_STAGES = 4
LONE_STAGES = 6
"""Most stages of a program alone on its multiprocessor, which must keep 32 KB in flight while one stage is multiplied."""
MIN_STAGES = 3
NARROW_OUTPUTS = 32
NARROW_ROWS = 8
"""Up to this many rows tiles may be narrow: every program reads all rows, and more would load L2 noticeably."""
NARROW_WAVES = 0.7
"""Fewest waves of narrow programs without splits; below, too many multiprocessors would be idle."""
UNSPLIT_SUMS = 32
"""Most accumulators per thread where more than two programs share the registers of a multiprocessor."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A product, as far as the choice of kernel depends on it.

    Attributes:
        rows: product of the leading dimensions of the input.
        outputs: rows of the weight, gate and up both counted.
        inputs: columns of the weight.
        dtype: of input and result, and of the weight unless it is packed, as ``bfloat16``.
        norm, gated, residual, bias, float32: which of these the call adds to the product.
        summed: whether the sums of squares for the norm come from the previous product.
        code, group: of a packed weight (:class:`~graphspec.kernels.linear.packed.Packed`).
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
    summed: bool = False
    code: str = ""
    group: int = 0

    @property
    def item_size(self) -> int:
        """Bytes per element of the input."""
        return getattr(torch, self.dtype).itemsize

    @property
    def weight_bits(self) -> int:
        """Bits per element of the weight, without its scales."""
        return code_bits(self.code) if self.code else 8 * self.item_size

    @property
    def aligned(self) -> bool:
        """Whether rows of the weight are aligned to 16 bytes, so that asynchronous copies can load them."""
        return self.inputs * self.weight_bits % 128 == 0

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.outputs // 2 if self.gated else self.outputs


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Tiles and launch options of the fused kernel for a shape.

    Attributes:
        tile_rows: rows of ``x`` per program, the N dimension of its matrix instructions.
        tile_outputs: columns of the result per program (of each half, if gated).
        tile_inputs: columns of the weight loaded at a time.
        splits: programs that share the inputs of one tile (split-K).
        warps, stages: of the compiled kernel.
        scan: if no sums of squares are given to the norm, whether every program computes them itself; else a separate launch does.
    """

    tile_rows: int
    tile_outputs: int
    tile_inputs: int
    splits: int
    warps: int
    stages: int
    scan: bool = False

    def shared_bytes(self, shape: LinearShape) -> int:
        """Bytes of shared memory of the tiles in flight."""
        weights = self.tile_outputs * (2 if shape.gated else 1) * shape.weight_bits // 8
        return (weights + self.tile_rows * shape.item_size) * self.tile_inputs * self.stages

    def encoded(self) -> tuple[int, ...]:
        """The config as integers, which a graph can contain."""
        return tuple(int(value) for value in astuple(self))


def decoded(numbers: Iterable[int]) -> LinearConfig:
    """The inverse of :meth:`LinearConfig.encoded`."""
    tile_rows, tile_outputs, tile_inputs, splits, warps, stages, scan = numbers
    return LinearConfig(tile_rows, tile_outputs, tile_inputs, splits, warps, stages, bool(scan))


def split_inputs(shape: LinearShape, tile_inputs: int, wanted: int) -> int:
    """``wanted`` splits, or fewer so that every split has at least one tile."""
    steps = -(-shape.inputs // tile_inputs)
    return -(-steps // -(-steps // max(wanted, 1)))


def _tile_inputs(shape: LinearShape, wanted: int) -> int:
    """``wanted`` columns, or fewer if the weight has fewer or its tiles have to go through registers.

    Twice as many of 4 bits, up to what fits the registers, which also hold many scales, a norm's input, or gate and up. Few where every
    channel has its own scale.
    """
    if shape.weight_bits == 4:
        wanted = min(2 * wanted, 128 if shape.norm or shape.gated or shape.group < 32 else 256)
    if shape.code and shape.group < 16:
        wanted = min(wanted, 32)
    maximum = 32 if shape.item_size > 2 else wanted if shape.aligned else min(wanted, 64)
    return min(maximum, max(1 << (shape.inputs - 1).bit_length(), 16))


def _resident(
    shape: LinearShape, tile_rows: int, tile_outputs: int, tile_inputs: int, residents: int, scan: bool, minimum: int = MIN_STAGES
) -> LinearConfig | None:
    """The config with ``residents`` programs per multiprocessor and the most splits that still make one wave of them.

    Args:
        shape: what is multiplied.
        tile_rows, tile_outputs, tile_inputs, scan: of the config.
        residents: programs per multiprocessor.
        minimum: fewest stages.

    Returns:
        None if they do not fit.
    """
    tiles, steps = -(-shape.width // tile_outputs), -(-shape.inputs // tile_inputs)
    splits = max(min(residents * MULTIPROCESSORS // tiles, steps // MIN_STEPS, MAX_SPLITS), 1)
    sums = tile_rows * tile_outputs * (2 if shape.gated else 1)
    # Four warps hold accumulators of 64 x 64 for gate and up; larger ones, and unaligned weights, which go through registers, need eight.
    warps = 8 if sums > 2 * 64 * 64 or not shape.aligned else 4
    one = LinearConfig(tile_rows, tile_outputs, tile_inputs, split_inputs(shape, tile_inputs, splits), warps, 1, scan)
    stages = min(
        (PROGRAM_SHARED_BYTES // residents - RESERVED_BYTES) // one.shared_bytes(shape), LONE_STAGES if residents == 1 else MAX_STAGES
    )
    if stages < minimum or (residents > RESIDENTS and sums > UNSPLIT_SUMS * 32 * warps):
        return None
    return replace(one, stages=stages)


def waves(shape: LinearShape, config: LinearConfig, residents: int) -> float:
    """Waves of programs for one tile of rows on an H200."""
    return -(-shape.width // config.tile_outputs) * config.splits / (residents * MULTIPROCESSORS)


def _config(shape: LinearShape, tile_rows: int, tile_inputs: int, scan: bool) -> LinearConfig:
    """Tiles and splits without a bad tail: at most one wave of programs, or enough waves that the last one does not matter."""
    if shape.item_size > 2:
        # Without matrix instructions, accumulators and operands are all in registers: use more threads and one program per multiprocessor.
        tile_outputs = 32 if shape.gated else 64
        one = _resident(shape, tile_rows, tile_outputs, tile_inputs, 1, scan)
        assert one is not None, shape
        return replace(one, warps=8, stages=2)
    for tile_outputs, residents in ((64, RESIDENTS), (64, 3), (64, 4), (128, RESIDENTS)):
        for narrower in (tile_inputs, tile_inputs // 2, tile_inputs // 4):
            found = _resident(shape, tile_rows, tile_outputs, max(narrower, 16), residents, scan)
            if found is not None and not BAD_WAVES[0] < waves(shape, found, residents) < BAD_WAVES[1]:
                return found
            if found is not None:
                break
    raise AssertionError(shape)


def invariant_config(shape: LinearShape, narrow: bool = True) -> LinearConfig:
    """A config whose order of summation does not depend on the number of rows, so that a row's bits do not either.

    Tiles have 64 rows. With few rows most of a matrix instruction is padding, yet it takes a third of the time of loading its weights.
    Tiles of 16 would read the weights from L2 four times at 64 rows, which costs more than the padding. Where narrow tiles need no splits,
    they are too narrow for ``wgmma``; the instruction is then ``mma.m16n8k16``, which a tile of more rows only repeats, so that its rows
    may follow their number. Missing sums of squares are computed by a separate launch with one program per row.

    Args:
        shape: what is multiplied.
        narrow: tiles may be narrow.
    """
    for residents in (1, RESIDENTS) if narrow and _may_be_narrow(shape) else ():
        # As many inputs at a time as fit with the most rows: the same for every number of rows.
        found = [_resident(shape, PRODUCT_ROWS, NARROW_OUTPUTS, inputs, residents, scan=False) for inputs in (256, 128)]
        widest = next((config for config in found if config is not None), None)
        if widest is not None and NARROW_WAVES <= waves(shape, replace(widest, splits=1), residents) <= BAD_WAVES[0]:
            few = _resident(shape, _tile_rows(shape), NARROW_OUTPUTS, widest.tile_inputs, residents, scan=False)
            assert few is not None, "fewer rows take less memory"
            return replace(few, splits=1)
    return _config(shape, PRODUCT_ROWS, _tile_inputs(shape, 64), scan=False)


def _tile_rows(shape: LinearShape) -> int:
    return 16 if shape.rows <= 16 else 32 if shape.rows <= 32 else 64


def _may_be_narrow(shape: LinearShape) -> bool:
    """Whether tiles may be so narrow that one wave of programs needs no splits, and hence no merge.

    Not after a norm, which every program would apply to the whole input. Not for codes either: in tiles of fewer than 64 outputs several
    warps would convert the same ones.
    """
    return not (shape.code or shape.item_size > 2 or not shape.aligned or shape.norm or shape.gated)


def _narrow(shape: LinearShape) -> list[LinearConfig]:
    """Configs with narrow tiles and no splits; none for shapes that need splits anyway."""
    if not _may_be_narrow(shape) or shape.rows > NARROW_ROWS:
        return []
    made = ((residents, _resident(shape, 16, NARROW_OUTPUTS, _tile_inputs(shape, 256), residents, scan=False)) for residents in (1, 2))
    fitting = ((residents, replace(config, splits=1)) for residents, config in made if config is not None)
    return [config for residents, config in fitting if NARROW_WAVES <= waves(shape, config, residents) <= BAD_WAVES[0]]


def fast_config(shape: LinearShape) -> LinearConfig | None:
    """The choice for an unmeasured shape; None: cuBLAS."""
    if shape.rows > PRODUCT_ROWS:
        return None
    if narrow := _narrow(shape):
        return narrow[0]
    tile_rows = _tile_rows(shape)
    scan = shape.norm and shape.rows <= SCANNED_ROWS
    wide = tile_rows == 16 or (bool(shape.code) and tile_rows == 32 and not shape.norm)
    return _config(shape, tile_rows, _tile_inputs(shape, 128 if wide else 64), scan)


def candidates(shape: LinearShape) -> list[LinearConfig]:
    """Fused configs to measure for ``shape`` in fast numerics, :func:`fast_config` first; empty where only cuBLAS is worth measuring."""
    base = fast_config(shape)
    if base is None:
        return []
    found = [base]
    for tile_outputs in (NARROW_OUTPUTS, 64, 128) if shape.aligned else (64,):
        for tile_inputs in sorted({_tile_inputs(shape, 64), _tile_inputs(shape, 128)}):
            for residents in (1, RESIDENTS, 4):
                one = _resident(shape, base.tile_rows, tile_outputs, tile_inputs, residents, base.scan, minimum=2)
                found += [] if one is None else [one]
    return list(dict.fromkeys(found))


def device_identity(device: torch.device) -> dict[str, str]:
    """Key of a measurement: the GPU, and the versions of triton and torch."""
    import triton

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"gpu": gpu, "triton": triton.__version__, "torch": torch.__version__}


@dataclass(slots=True)
class LinearTable:
    """Measured choices; shapes without an entry use :func:`fast_config`.

    Attributes:
        entries: config by shape; None: cuBLAS.
        requested: every shape that was looked up, in order.
    """

    entries: dict[LinearShape, LinearConfig | None] = field(default_factory=dict)
    requested: dict[LinearShape, None] = field(default_factory=dict)

    def choose(self, shape: LinearShape, numerics: str = "fast", narrow: bool = True) -> LinearConfig | None:
        """The config of ``shape``; None: cuBLAS. Under ``batch_invariant`` numerics, and of the rows of a cycle under ``cycle_invariant``,
        :func:`invariant_config`, whatever was measured.
        """
        self.requested[shape] = None
        if numerics == "batch_invariant" or (numerics == "cycle_invariant" and shape.rows <= PRODUCT_ROWS):
            return invariant_config(shape, narrow)
        return self.entries[shape] if shape in self.entries else fast_config(shape)

    def save(self, path: Path, identity: dict[str, str]) -> None:
        """Write the entries as JSON, with ``identity`` (:func:`device_identity`)."""
        entries = [{"shape": asdict(shape), "config": None if config is None else asdict(config)} for shape, config in self.entries.items()]
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(path.name + ".part")
        scratch.write_text(json.dumps({"format": FORMAT, "identity": identity, "entries": entries}, indent=1) + "\n", encoding="utf-8")
        scratch.replace(path)

    @classmethod
    def load(cls, path: Path, identity: dict[str, str], key: str = "linear table") -> LinearTable:
        """Read a file of :meth:`save`.

        Args:
            path: of the file.
            identity: of the current device (:func:`device_identity`).
            key: first part of the key of errors, followed by the path.

        Raises:
            ConfigError: the file can't be read, is not such a table, or was measured on another device.
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
    """A dataclass ``kind`` from values that have exactly its fields and types."""
    types = {"int": int, "bool": bool, "str": str}
    for item in fields(kind):
        if type(values[item.name]) is not types[str(item.type)]:
            raise TypeError(f"{item.name} {values[item.name]!r} is no {item.type}")
    return kind(**values)

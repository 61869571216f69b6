"""Figures that ``graphspec plan`` takes from results of ``graphspec profile``: acceptance, bandwidth, share of the floor."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...config.catalog import Variant
from ...config.checks import LONG, brief
from ...config.paths import user_path
from ...errors import ConfigError
from ...shapes import PLAIN, CycleShape
from ..floor import FloorModel, Hardware
from ..measure.results import SideRecord, read_results
from .acceptance import Acceptance, conditional, fit_sibling
from .advice import Efficiency, Timing, predict
from .passes import PassTimes

KEY = "plan.measured"
ROLES = ("subject", "none")
"""Sides that ran on this engine."""
_FASTEST = 0.05
"""Least time of a stage, as a multiple of its floor: caches can be faster than memory, but not arbitrarily."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Sides of this engine in a result file, without those of other drafters.

    Attributes:
        file: its name.
        sides: without those whose tokens differ from plain decoding's.
        shapes: of each side; plain decoding is ``PLAIN``.
    """

    file: str
    sides: tuple[SideRecord, ...]
    shapes: tuple[CycleShape, ...]

    def on(self, name: str, device: str) -> Measured:
        """The sides that ran on such a device, whose times are therefore valid for it.

        Args:
            name: of the hardware profile, which identifies a GPU; ``auto`` matches any.
            device: ``cpu`` or ``cuda``.
        """
        kept = [i for i, side in enumerate(self.sides) if _ran_on(side, name, device)]
        return replace(self, sides=tuple(self.sides[i] for i in kept), shapes=tuple(self.shapes[i] for i in kept))

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second, measured in the run of the sides; median."""
        found = [value for side in self.sides if (value := side.number("bandwidth")) is not None and value > 0]
        return statistics.median(found) if found else None


def read_measured(file: str, variant: Variant, temperature: float) -> Measured:
    """Read a file, or a folder of files.

    Args:
        file: ``plan.measured``.
        variant: whose sides are read; those of plain decoding are read too.
        temperature: of the sides that are read.

    Raises:
        ConfigError: nothing there, a broken line, or no side of this engine.
    """
    if not user_path(KEY, file).exists():
        raise ConfigError(KEY, "a file that graphspec profile wrote", f"no file {brief(file, LONG)}")
    try:
        results = read_results([file])
    except ConfigError as error:
        raise error if error.key != "report.files" else ConfigError(KEY, error.expected, error.found) from error
    found = _ours((side for side in results.sides if side.get("temperature", 0.0) == temperature), variant, file)
    if not found.sides:
        expected = f"sides of variant {variant.name} or of plain decoding at temperature {temperature:g}, equal to plain decoding"
        raise ConfigError(KEY, expected, f"none among {len(results.sides)} in {file}")
    return found


def of_rows(rows: Iterable[Mapping[str, Any]], variant: Variant, name: str) -> Measured:
    """Records of kind ``side`` that were never in a file.

    Args:
        rows: as :func:`graphspec.lab.measure.compare.records` gives them.
        variant: that ran.
        name: where they come from.
    """
    return _ours((SideRecord(name, dict(row), {}) for row in rows), variant, name)


def _ours(candidates: Iterable[SideRecord], variant: Variant, name: str) -> Measured:
    """Sides of this engine, without those whose tokens were wrong."""
    sides, shapes = [], []
    for side in candidates:
        plain = side.record["role"] == "none" or side.shape is None or side.shape[0] == 0
        ours = side.record["role"] in ROLES and (plain or side.get("variant") == variant.name)
        if ours and side.equal is not False:
            sides.append(side)
            shapes.append(PLAIN if plain or side.shape is None else CycleShape(*side.shape, variant.auto_shape.pool))
    return Measured(name, tuple(sides), tuple(shapes))


def _ran_on(side: SideRecord, name: str, device: str) -> bool:
    on_gpu = not str(side.get("device", "cpu")).startswith("cpu")
    if on_gpu != (device == "cuda"):
        return False
    letters = "".join(letter for letter in side.hardware.lower() if letter.isalnum())
    return not on_gpu or name == "auto" or name.lower() in letters


def acceptance_of(measured: Measured, usual: float) -> Acceptance | None:
    """Shares and lengths as they were measured; None without a speculating side, those with synthetic acceptance not counted.

    The shares are those of the deepest chain. Where only trees ran they are derived from the deepest tree, as if all its levels had
    offered K siblings, which underestimates the deeper ones a little.

    Args:
        measured: sides.
        usual: g where no tree says what it is.
    """
    speculative = [
        (side, shape)
        for side, shape in zip(measured.sides, measured.shapes, strict=True)
        if shape.num_steps and not side.get("synthetic") and side.get("acceptance_unconditional") and side.get("acceptance_length")
    ]
    if not speculative:
        return None
    lengths: dict[CycleShape, list[float]] = {}
    for side, shape in speculative:
        lengths.setdefault(shape, []).append(float(side.record["acceptance_length"]))
    means = {shape: statistics.fmean(values) for shape, values in lengths.items()}
    side, shape = max(speculative, key=lambda entry: (entry[1].is_chain, entry[1].num_steps))
    shares = conditional([float(rate) for rate in side.record["acceptance_unconditional"]])
    if not shape.is_chain:
        shares = tuple(_best_of(share, shape.topk, usual) for share in shares)
    # A share that was hardly ever observed is no estimate for deeper levels.
    while len(shares) > 1 and shares[-1] == 0:
        shares = shares[:-1]
    sibling = fit_sibling(shares, means) if shape.is_chain else None
    return Acceptance(shares, f"measured, {measured.file}", usual if sibling is None else sibling, means)


def _best_of(share: float, siblings: int, sibling: float) -> float:
    """The share of the best of ``siblings`` siblings, one of which is right in ``share`` of the cases; by bisection."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(Acceptance((middle,), sibling=sibling).ranked(1, siblings)) < share:
            low = middle
        else:
            high = middle
    return low


def context_of(side: SideRecord) -> int:
    """Committed tokens of a row half-way through its request."""
    return round((side.number("input_tokens") or 0) + (side.number("output_tokens") or 0) / 2)


def timed(measured: Measured) -> list[int]:
    """Indices of the sides whose cycle time is known."""
    return [i for i, side in enumerate(measured.sides) if side.number("cycle_ms", "median")]


def calibrate(model: FloorModel, measured: Measured, sides: Iterable[int], hardware: Hardware) -> Efficiency | None:
    """How close to its floor each stage came, fitted to some of the sides; None without one whose cycle and stages were timed.

    The time of a cycle is divided among its stages in proportion to the run that timed them one by one. The part of stages without weights
    is added to every cycle as a constant, its median over the sides. The time of a stage is fitted by :func:`fit_stage`.
    """
    points: dict[str, list[tuple[float, float, float]]] = {}
    others: list[float] = []
    for i in sides:
        side = measured.sides[i]
        prediction = predict(model, measured.shapes[i], side.batch, context_of(side), hardware, Efficiency(1.0))
        times, cycle = stage_times(side), side.number("cycle_ms", "median")
        if not cycle or not all(times.get(stage.name) for stage in prediction.stages):
            continue
        scale = cycle / sum(times.values())
        others.append(cycle - scale * sum(times[stage.name] for stage in prediction.stages))
        for stage in prediction.stages:
            points.setdefault(stage.name, []).append((stage.floor_ms, 1e3 * stage.cost.flops, scale * times[stage.name]))
    if not points:
        return None
    fits = {name: fit_stage(found) for name, found in points.items()}
    floors, spent = (sum(point[k] for found in points.values() for point in found) for k in (0, 2))
    return Efficiency(
        overall=floors / spent,
        stages={name: share for name, (share, _) in fits.items()},
        rates={name: rate for name, (_, rate) in fits.items() if rate is not None},
        host_ms=statistics.median(others),
        source=f"measured, {measured.file}",
    )


def fit_stage(points: Sequence[tuple[float, float, float]]) -> tuple[float, float | None]:
    """Share of the floor's speed that a stage reaches, and operations per second of its computation or None.

    Least squares of the relative error of ``floor / share + work / rate``, both terms positive, over sides that differ in batch or nodes.
    Where none differ, or computing more takes no longer, there is no second term.

    Args:
        points: floor in milliseconds, operations times 1000, measured milliseconds.
    """
    ff = fw = ww = f = w = 0.0
    for floor, work, time in points:
        x, y = floor / time, work / time
        ff, fw, ww, f, w = ff + x * x, fw + x * y, ww + y * y, f + x, w + y
    determinant = ff * ww - fw * fw
    if determinant > 1e-9 * ff * ww:
        slow, per_work = (f * ww - w * fw) / determinant, (w * ff - f * fw) / determinant
        if per_work > 0:
            if slow < _FASTEST:
                slow = _FASTEST
                per_work = max((w - slow * fw) / ww, 0.0)
            return 1 / slow, 1 / per_work if per_work > 0 else None
    return ff / f, None


def stage_times(side: SideRecord) -> dict[str, float]:
    """Milliseconds of every stage that was timed."""
    rows: Sequence[Mapping[str, Any]] = side.get("stages", [])
    return {str(row["name"]): float(row["ms"]) for row in rows if isinstance(row.get("ms"), int | float)}


def predictions(
    model: FloorModel, measured: Measured, hardware: Hardware, default: Efficiency, passes: PassTimes | None = None
) -> list[dict[str, Any]]:
    """Records of kind ``prediction``: cycle and stages of every side with a cycle time, predicted from the *other* sides only.

    With ``passes`` they are predicted from these alone. A side without others of another shape or batch is predicted with ``default``. The
    measured time of a stage is its share of the cycle in the run that timed the stages one by one.
    """
    records: list[dict[str, Any]] = []
    for i in timed(measured):
        side, shape = measured.sides[i], measured.shapes[i]
        others = [j for j in timed(measured) if (measured.shapes[j], measured.sides[j].batch) != (shape, side.batch)]
        efficiency: Timing = passes or calibrate(model, measured, others, hardware) or default
        prediction = predict(model, shape, side.batch, context_of(side), hardware, efficiency)
        cycle = side.number("cycle_ms", "median")
        assert cycle is not None
        times = stage_times(side)
        scale = cycle / sum(times.values()) if times else 1.0
        rows: list[tuple[str | None, float, float]] = [(None, prediction.cycle_ms, cycle)]
        rows += [(stage.name, stage.ms, scale * times[stage.name]) for stage in prediction.stages if times.get(stage.name)]
        common = {"kind": "prediction", "case": side.record["case"], "batch": side.batch, "shape": shape.numbers}
        records += [
            {**common, "stage": name, "predicted_ms": ms, "measured_ms": found, "error": ms / found - 1} for name, ms, found in rows
        ]
    return records

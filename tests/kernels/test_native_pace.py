"""When a kind of program runs on the whole team and when on one thread: the choice over times that are given, by no clock."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest

from graphspec.kernels.native.build import load


def chosen(together: Sequence[float] | np.ndarray, alone: Sequence[float] | np.ndarray) -> np.ndarray:
    """``[n]`` bool: which of the programs ran together."""
    times = [np.ascontiguousarray(each, np.float64) for each in (together, alone)]
    out = np.zeros(len(times[0]), np.uint8)
    run = load().graphspec_pace
    run.argtypes, run.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p], None
    run(times[0].ctypes.data, times[1].ctypes.data, len(out), out.ctypes.data)
    return out.astype(bool)


def jitter(level: float, count: int, seed: int) -> np.ndarray:
    """Times of about ``level``: within a tenth, and one in fifty twice as long."""
    draw = np.random.default_rng(seed)
    return level * draw.uniform(0.9, 1.1, count) * np.where(draw.random(count) < 0.02, 2.0, 1.0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("together", "alone"), [(1.0, 1.6), (1.6, 1.0), (1.0, 1.2), (1.2, 1.0)])
def test_the_faster_way_is_taken(together: float, alone: float, seed: int) -> None:
    count = 20_000
    ran = chosen(jitter(together, count, seed), jitter(alone, count, seed + 100))
    wrong = ran if alone < together else ~ran
    assert wrong[:64].sum() <= 30
    assert wrong[64:].mean() < 0.01


def test_another_program_that_comes_and_goes() -> None:
    """Members are kept off their cores from program 5000 to 8000: together then takes four times as long, alone as long as ever."""
    busy = np.zeros(30_000, bool)
    busy[5_000:8_000] = True
    ran = chosen(np.where(busy, 4.0, 1.0), np.full(len(busy), 1.7))
    assert ran[4_000:5_000].mean() > 0.99
    assert not ran[5_012:5_060].any(), "within a dozen programs"
    assert ran[5_012:8_000].mean() < 0.02
    assert ran[12_000:].mean() > 0.99, "and back, no longer after than it lasted"


def test_a_time_that_grows_with_the_text_is_no_other_program() -> None:
    """Three times as long at the end: tried again now and then, never given up."""
    growth = np.linspace(1.0, 3.0, 10_000)
    ran = chosen(growth, 1.5 * growth)
    assert ran[100:].mean() > 0.99


def test_a_trial_of_what_is_clearly_slower_ends_after_two() -> None:
    ran = chosen(np.full(1_000, 1.0), np.full(1_000, 10.0))
    alone = np.flatnonzero(~ran)
    assert len(alone) % 2 == 0 and (np.diff(alone)[::2] == 1).all() and len(alone) <= 8

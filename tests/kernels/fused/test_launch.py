""":func:`graphspec.kernels.fused.launch.launch`: checks, recording and options of a launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from graphspec.errors import CaptureError
from graphspec.kernels.fused import launch as launching


class Kernel:
    """Notes how it is launched."""

    arg_names = ("a", "b", "n")

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def fn(self) -> None:
        """Its name appears in errors."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launched.append((grid, args, options))


@triton.jit
def _multiply(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N), tl.arange(0, K)
    product = tl.dot(tl.load(a + m * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :]), input_precision="ieee")
    tl.store(out + m * N + n[None, :], product)


def _multiplied(a: Tensor, b: Tensor) -> Tensor:
    out = a.new_empty(len(a), b.shape[1], dtype=torch.float32)
    launching.launch(_multiply, (1,), a, b, out, M=len(a), N=b.shape[1], K=len(b))
    return out


_interpreted = pytest.mark.skipif(not launching.INTERPRETED, reason="of the interpreter; kernels are compiled here")


@_interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_dot_of_the_interpreter_is_that_of_the_numbers(dtype: torch.dtype) -> None:
    a, b = torch.randn(32, 64).to(dtype), torch.randn(64, 16).to(dtype)
    exact, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    # Six halvings and the products: what rounding may move, by the standard bound on pairwise sums.
    assert bool((((_multiplied(a, b) - exact).abs()) <= 7 * 2.0**-24 * magnitude).all())


@_interpreted
def test_bits_of_a_dot_do_not_depend_on_the_other_rows_and_columns() -> None:
    a, b = torch.randn(64, 128), torch.randn(128, 64)
    whole = _multiplied(a, b)
    for rows, columns in ((16, 64), (64, 16), (16, 16), (32, 32)):
        for first in range(0, 64, rows):
            part = _multiplied(a[first : first + rows].contiguous(), b[:, :columns].contiguous())
            assert torch.equal(part, whole[first : first + rows, :columns])


def test_a_grid_that_is_too_large_is_refused() -> None:
    kernel, a = Kernel(), torch.zeros(1)
    launching.launch(kernel, (1 << 20, 65535), a)
    assert [grid for grid, _, _ in kernel.launched] == [(1 << 20, 65535)]
    for grid in ((1, 65536), (1, 1, 65536)):
        with pytest.raises(CaptureError, match=r"grid of fn.*65535.*65536"):
            launching.launch(kernel, grid, a)
    assert len(kernel.launched) == 1


def test_the_device_is_that_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, a, entered = Kernel(), torch.zeros(1), []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        entered.append(tensor)
        assert not kernel.launched
        yield
        assert len(kernel.launched) == 1

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    launching.launch(kernel, (1,), None, a, 3)
    assert entered == [a]


def test_one_engine_launches_programmatically_and_another_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever was made last; a launch outside of both is not programmatic."""
    monkeypatch.setattr(launching, "INTERPRETED", False)
    kernel = Kernel()
    kernel.arg_names = ("a", "PDL")
    states = [launching.LaunchState(True), launching.LaunchState(False)]
    with launching.recording() as launches:
        for state in (*states, *reversed(states)):
            with launching.launching(state):
                launching.launch(kernel, (1,), torch.zeros(1))
        launching.launch(kernel, (1,), torch.zeros(1))
    assert [each.constexprs["PDL"] for each in launches] == [True, False, False, True, False]

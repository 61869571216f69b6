"""What :func:`graphspec.kernels.fused.launch.launch` does before and around a launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from graphspec.errors import CaptureError
from graphspec.kernels.fused import launch as launching


class Kernel:
    """Notes how it is launched."""

    arg_names = ("a", "b", "n")

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def fn(self) -> None:
        """Its name is what errors say."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launched.append((grid, args, options))


def test_a_grid_has_an_end() -> None:
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

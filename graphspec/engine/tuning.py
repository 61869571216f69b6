"""Measures the linear layers of a fused engine before anything is compiled or captured, and keeps the results in a file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from ..kernels.fused.linear_choice import LinearShape, LinearTable

logger = logging.getLogger(__name__)


class LinearTuner:
    """Chooses between our kernel and cuBLAS for every shape a program asks for, by measuring both.

    See :mod:`graphspec.kernels.fused.linear_tune`.

    Args:
        table: what the engine's linear layers look up; filled in place.
        path: where the table is kept. What it holds already is not measured again.
        networks: whose layers they are.
        device: a CUDA device.
    """

    def __init__(self, table: LinearTable, path: Path, networks: tuple[nn.Module, ...], device: torch.device) -> None:
        self.table, self.path, self.networks, self.device = table, path, networks, device

    @classmethod
    def read_table(cls, path: Path | None, device: torch.device) -> LinearTable:
        """The table kept at ``path``; an empty one if there is none yet.

        Raises:
            ConfigError: the file is no such table, or was measured on another device or with other versions.
        """
        from ..kernels.fused.linear_choice import LinearTable, device_identity

        if path is None or not path.is_file():
            return LinearTable()
        return LinearTable.load(path, device_identity(device), "kernels.linear_table")

    def __call__(self, run: Callable[[], None]) -> None:
        """Measure the shapes that ``run``, an uncompiled call of one program, uses and the table lacks; then rewrite the file."""
        from ..kernels.fused.linear_choice import device_identity
        from ..kernels.fused.linear_tune import recorded, tune

        with ExitStack() as stack:
            recordings: list[dict[LinearShape, None]] = [stack.enter_context(recorded(network)) for network in self.networks]
            run()
        missing = list(dict.fromkeys(shape for shapes in recordings for shape in shapes if shape not in self.table.entries))
        if not missing:
            return
        logger.info("measuring %d shapes of linear layers for %s", len(missing), self.path)
        tune(self.table, missing, self.device)
        if any(shape.residual and self.table.entries[shape] is None for shape in missing):
            # A product left to cuBLAS gives no sums of squares to the next one, which then has another shape.
            alone = dict.fromkeys(replace(shape, summed=False) for shape in missing if shape.summed)
            tune(self.table, [shape for shape in alone if shape not in self.table.entries], self.device)
        self.table.save(self.path, device_identity(self.device))

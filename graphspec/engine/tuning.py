"""Measures the linear layers of a fused engine before anything is compiled or captured, and keeps the results in a file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from ..kernels.linear.fused.linear_choice import LinearShape, LinearTable

logger = logging.getLogger(__name__)


def read_table(path: Path, device: torch.device) -> LinearTable:
    """The table kept at ``path``; an empty one if there is none yet.

    Raises:
        ConfigError: the file is no such table, or was measured on another device or with other versions.
    """
    from ..kernels.linear.fused.linear_choice import LinearTable, device_identity

    return LinearTable.load(path, device_identity(device), "kernels.linear_table") if path.is_file() else LinearTable()


def tune_program(table: LinearTable, path: Path, networks: Sequence[nn.Module], device: torch.device, run: Callable[[], None]) -> None:
    """Choose between our kernel and cuBLAS for every shape that a program uses and the table lacks, by measuring both.

    See :mod:`graphspec.kernels.linear.fused.linear_tune`.

    Args:
        table: what the engine's linear layers look up; filled in place.
        path: where the table is kept; rewritten if anything was measured.
        networks: whose layers they are.
        device: a CUDA device.
        run: an uncompiled call of the program.
    """
    from ..kernels.linear.fused.linear_choice import device_identity
    from ..kernels.linear.fused.linear_tune import recorded, tune

    with ExitStack() as stack:
        recordings: list[dict[LinearShape, None]] = [stack.enter_context(recorded(network)) for network in networks]
        run()
    missing = list(dict.fromkeys(shape for shapes in recordings for shape in shapes if shape not in table.entries))
    if not missing:
        return
    logger.info("measuring %d shapes of linear layers for %s", len(missing), path)
    tune(table, missing, device)
    if any(shape.residual and table.entries[shape] is None for shape in missing):
        # A product left to cuBLAS gives no sums of squares to the next one, which then has another shape.
        alone = dict.fromkeys(replace(shape, summed=False) for shape in missing if shape.summed)
        tune(table, [shape for shape in alone if shape not in table.entries], device)
    table.save(path, device_identity(device))

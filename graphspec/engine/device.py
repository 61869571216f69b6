"""The device that ``hardware.device`` means on this machine, and torch's settings for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..config.schema import HardwareConfig


def resolve_device(asked: str) -> str:
    """``cpu`` or ``cuda``: what was asked for, and for ``auto`` CUDA if torch sees a GPU. A GPU that is asked for need not be there."""
    return asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def prepare_device(hardware: HardwareConfig, ranks: int) -> str:
    """The device of an engine, with torch's threads set for it; on a CPU several ranks share the cores.

    Raises:
        ConfigError: a GPU is asked for, and torch sees none.
    """
    device = resolve_device(hardware.device)
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("hardware.device", "cpu or auto (torch sees no CUDA device)", "cuda")
    if hardware.threads is not None:
        torch.set_num_threads(hardware.threads)
    elif device == "cpu" and ranks > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    if device == "cpu":
        # Denormals make CPU kernels many times slower and carry no information here.
        torch.set_flush_denormal(True)
    return device

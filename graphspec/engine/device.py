"""The device that ``hardware.device`` means on this machine."""

from __future__ import annotations

import torch


def resolve_device(asked: str) -> str:
    """``cpu`` or ``cuda``: what was asked for, and for ``auto`` CUDA if torch sees a GPU. A GPU that is asked for need not be there."""
    return asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"

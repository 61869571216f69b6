"""Draft checkpoints into our modules: one file per kind of network, one table per layout (:mod:`graphspec.layouts`)."""

from __future__ import annotations

from .eagle import load_eagle, load_eagle3
from .mtp import load_mtp
from .standalone import load_standalone
from .token_map import apply_token_map, load_token_map

__all__ = [
    "apply_token_map",
    "load_eagle",
    "load_eagle3",
    "load_mtp",
    "load_standalone",
    "load_token_map",
]
